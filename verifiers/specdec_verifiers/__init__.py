"""The built-in verifiers."""

from __future__ import annotations

from collections.abc import Callable

from specdec_core import Verifier, hookimpl
from specdec_verifiers.greedy import Greedy
from specdec_verifiers.match import Match

__all__ = ["Greedy", "Match", "specdec_register_verifiers"]


@hookimpl
def specdec_register_verifiers(register: Callable[[type[Verifier]], None]) -> None:
    for verifier in (Greedy, Match):
        register(verifier)
