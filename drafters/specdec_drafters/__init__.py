"""The built-in drafters, one a file, named as on the command line."""

from __future__ import annotations

from collections.abc import Callable

from specdec_core import Drafter, hookimpl
from specdec_drafters.early_exit import EarlyExit
from specdec_drafters.none import NoDrafter
from specdec_drafters.prompt_lookup import PromptLookup
from specdec_drafters.small_model import SmallModel
from specdec_drafters.tree_top2 import TreeTop2

__all__ = ["EarlyExit", "NoDrafter", "PromptLookup", "SmallModel", "TreeTop2", "specdec_register_drafters"]


@hookimpl
def specdec_register_drafters(register: Callable[[type[Drafter]], None]) -> None:
    for drafter in (EarlyExit, NoDrafter, PromptLookup, SmallModel, TreeTop2):
        register(drafter)
