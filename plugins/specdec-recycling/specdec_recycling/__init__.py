"""Token recycling for specdec: trees of the target's own discarded candidates, without training."""

from __future__ import annotations

from collections.abc import Callable

from specdec_core import Drafter, hookimpl
from specdec_recycling.drafter import Recycling, RecyclingConfig

__all__ = ["Recycling", "RecyclingConfig", "specdec_register_drafters"]

SPECDEC_API_VERSION = 1


@hookimpl
def specdec_register_drafters(register: Callable[[type[Drafter]], None]) -> None:
    register(Recycling)
