"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057) as a drafter for specdec: `--drafter lookahead`."""

from __future__ import annotations

from collections.abc import Callable

from specdec_core import Drafter, hookimpl
from specdec_lookahead.drafter import Lookahead, LookaheadConfig

SPECDEC_API_VERSION = 1

__all__ = ["SPECDEC_API_VERSION", "Lookahead", "LookaheadConfig", "specdec_register_drafters"]


@hookimpl
def specdec_register_drafters(register: Callable[[type[Drafter]], None]) -> None:
    register(Lookahead)
