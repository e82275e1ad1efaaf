"""Follow chosen tokens down a draft: what `greedy` and `match` share."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_core import Draft, Verdict


def follow(draft: Draft, chosen: Tensor) -> Verdict:
    """Accept while a child carries the token chosen at its parent; the first that none carries is next.

    chosen: int64 [B, 1 + n], the token wanted after the last pending token and after each node.
    """
    rows = draft.rows
    parents = draft.parents
    fits = draft.tokens == chosen.gather(1, (parents + 1).clamp(min=0))
    current = parents.new_full((rows, 1), -1)
    path = []
    for _ in range(draft.depth):
        step = fits & (parents == current)
        # Of equal siblings the first: argmax finds the earliest of the largest.
        found, node = step.max(dim=1, keepdim=True)
        current = torch.where(found, node, current)
        fits = fits & found  # a row that stopped accepts nothing more
        path.append(torch.where(found, node, -1))
    accepted = torch.cat(path, dim=1) if path else parents.new_empty((rows, 0))
    return Verdict(accepted, chosen.gather(1, current + 1).squeeze(1))
