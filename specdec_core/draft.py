"""The values that cross the boundary between drafters, the loop and verifiers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

ROOT = -1
"""Parent of a node that hangs on the last pending token."""
HOLE = -2
"""Parent of no node at all: padding, or a place where nothing was drafted."""


class DraftLaw(IntEnum):
    """How the tokens of a row's draft came to be. Declared by the drafter, never guessed."""

    ONE_HOT = 0
    """A fixed function of the context (lookup, argmax, top-k children): q is a point mass on each node."""
    SAMPLED = 1
    """Siblings were drawn independently from q."""
    WITHOUT_REPLACEMENT = 2
    """Siblings were drawn from q one after another, without replacement."""
    COUPLED = 3
    """Drawn with the target's own noise of that position; for `greedy` and `match` only."""


@dataclass(frozen=True, eq=False, slots=True)
class Draft:
    """One round's proposal for the B rows of `Context.rows`, in that order; read until `observe` returns."""

    tokens: Tensor  # int64 [B, n]: parents come before children, siblings in the order they were drawn
    parents: Tensor  # int64 [B, n]: index of the parent node; ROOT or HOLE where there is none
    laws: Tensor  # uint8 [B]: a DraftLaw for each row; not read for a row without nodes
    depth: int  # upper bound on any node's depth (a child of the last pending token has depth 1)
    width: int  # upper bound on the children of a node
    probs: Tensor | None = None  # float32 [B, n, V]: the q each node was drawn from; None: no row needs it
    scores: Tensor | None = None  # float32 [B, n]: the drafter's own guess that a node is accepted

    @property
    def rows(self) -> int:
        """B, the number of rows drafted for."""
        return self.tokens.shape[0]

    @property
    def nodes(self) -> int:
        """n, the width of the draft, holes included."""
        return self.tokens.shape[1]

    @classmethod
    def empty(cls, rows: int, device: torch.device | str = "cpu") -> Draft:
        """Make a draft without nodes for `rows` rows."""
        none = torch.empty((rows, 0), dtype=torch.int64, device=device)
        return cls(none, none, torch.zeros(rows, dtype=torch.uint8, device=device), depth=0, width=0)

    @classmethod
    def chains(cls, tokens: list[list[int]], device: torch.device | str = "cpu") -> Draft:
        """Make a ONE_HOT draft of one chain a row, of any lengths, from token ids known on the host."""
        n = max(map(len, tokens), default=0)
        if n == 0:
            return cls.empty(len(tokens), device)
        ids = [row + [0] * (n - len(row)) for row in tokens]
        parents = [[*range(ROOT, len(row) - 1)] + [HOLE] * (n - len(row)) for row in tokens]
        both = torch.tensor([ids, parents], dtype=torch.int64).to(device, non_blocking=True)
        laws = torch.full((len(tokens),), DraftLaw.ONE_HOT, dtype=torch.uint8, device=device)
        return cls(both[0], both[1], laws, depth=n, width=1)


@dataclass(frozen=True, eq=False, slots=True)
class Verdict:
    """What a verifier decided about a draft."""

    path: Tensor  # int64 [B, d]: accepted node indices from the root, -1 padded
    next_token: Tensor  # int64 [B]: recovered or bonus
