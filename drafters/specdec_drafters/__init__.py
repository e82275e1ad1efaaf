"""The built-in drafters, one a file, named as on the command line."""

from __future__ import annotations

from collections.abc import Callable

from specdec_core import Drafter, hookimpl
from specdec_drafters.none import NoDrafter
from specdec_drafters.prompt_lookup import PromptLookup

__all__ = ["NoDrafter", "PromptLookup", "specdec_register_drafters"]


@hookimpl
def specdec_register_drafters(register: Callable[[type[Drafter]], None]) -> None:
    for drafter in (NoDrafter, PromptLookup):
        register(drafter)
