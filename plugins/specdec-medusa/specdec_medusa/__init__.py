"""Medusa heads (Cai et al. 2024, arXiv 2401.10774) as a drafter for specdec: `--drafter medusa:heads=...`."""

from __future__ import annotations

from collections.abc import Callable

from specdec_core import Drafter, hookimpl
from specdec_medusa.drafter import Medusa, MedusaConfig

SPECDEC_API_VERSION = 1

__all__ = ["SPECDEC_API_VERSION", "Medusa", "MedusaConfig", "specdec_register_drafters"]


@hookimpl
def specdec_register_drafters(register: Callable[[type[Drafter]], None]) -> None:
    register(Medusa)
