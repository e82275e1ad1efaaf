"""Suffix decoding for specdec: drafts from the text itself and from earlier outputs, without a model."""

from __future__ import annotations

from collections.abc import Callable

from specdec_core import Drafter, hookimpl
from specdec_suffix.drafter import Suffix, SuffixConfig

__all__ = ["Suffix", "SuffixConfig", "specdec_register_drafters"]

SPECDEC_API_VERSION = 1


@hookimpl
def specdec_register_drafters(register: Callable[[type[Drafter]], None]) -> None:
    register(Suffix)
