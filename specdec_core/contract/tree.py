"""What follows from a draft's parents: ancestors, depths, and which nodes are none."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_core.contract.draft import HOLE


@dataclass(frozen=True, eq=False, slots=True)
class Tree:
    """What follows from a draft's parents."""

    ancestors: Tensor  # bool [B, n, n]: row j marks node j and its ancestors
    depths: Tensor  # int64 [B, n]: 1 for a child of the last pending token; meaningless in holes
    real: Tensor  # bool [B, n]: False for holes and their descendants

    @classmethod
    def of(cls, parents: Tensor, depth: int | None = None) -> Tree:
        """Find ancestors and depths; parents: int64 [B, n] of a valid forest.

        depth: a bound on it, holes counted like nodes; None: n. What lies deeper lacks ancestors, and is
        told to be at least that deep.
        """
        n = parents.shape[1]
        index = torch.arange(n, device=parents.device)
        reach = ((parents.unsqueeze(-1) == index) | (index[:, None] == index)).float()
        # (I + P)^(2^i) reaches ancestors up to 2^i generations away; the deepest node has depth - 1 of them.
        deepest = n if depth is None else min(depth, n)
        for _ in range(max(deepest - 2, 0).bit_length()):
            reach = torch.bmm(reach, reach).clamp_(max=1)
        ancestors = reach > 0
        hole = parents == HOLE
        real = ~(ancestors & hole.unsqueeze(1)).any(dim=-1)
        return cls(ancestors, reach.sum(dim=-1).long(), real)

    @classmethod
    def of_chains(cls, parents: Tensor) -> Tree:
        """Give the same for chains, whose holes come last: ROOT, 0, 1, ... and then HOLE."""
        rows, n = parents.shape
        index = torch.arange(n, device=parents.device)
        ancestors = (index <= index[:, None]).expand(rows, n, n)
        return cls(ancestors, (index + 1).expand(rows, n), parents != HOLE)
