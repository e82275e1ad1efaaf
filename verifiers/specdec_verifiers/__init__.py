"""The built-in verifiers."""

from __future__ import annotations

from collections.abc import Callable

from specdec_core import Verifier, hookimpl
from specdec_verifiers.block import Block
from specdec_verifiers.greedy import Greedy
from specdec_verifiers.match import Match
from specdec_verifiers.rejection import Rejection
from specdec_verifiers.tree_mask import TreeMask
from specdec_verifiers.typical import Typical

__all__ = [
    "Block",
    "Greedy",
    "Match",
    "Rejection",
    "TreeMask",
    "Typical",
    "specdec_register_verifiers",
]


@hookimpl
def specdec_register_verifiers(register: Callable[[type[Verifier]], None]) -> None:
    for verifier in (Greedy, Match, Rejection, Block, TreeMask, Typical):
        register(verifier)
