"""Follow chosen tokens down a draft: what `greedy` and `match` share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec_core import Draft, Verdict

Choose = Callable[[Tensor, int], Tensor]
"""(a node of each row, int64 [B], -1 for the root; its depth) -> the token wanted after it, int64 [B]"""


def follow(draft: Draft, choose: Choose) -> Verdict:
    """Accept while a child carries the token chosen at its parent; the first that none carries is next."""
    node = torch.full_like(draft.laws, -1, dtype=torch.int64)
    alive = torch.ones_like(draft.laws, dtype=torch.bool)
    wanted = choose(node, 0)
    path = []
    for depth in range(1, min(draft.depth, draft.nodes) + 1):
        fits = (draft.parents == node.unsqueeze(1)) & (draft.tokens == wanted.unsqueeze(1))
        # Of equal siblings the first: `max` finds the earliest of the largest.
        alive, child = (fits & alive.unsqueeze(1)).max(dim=1)
        node = torch.where(alive, child, node)
        path.append(torch.where(alive, child, -1))
        wanted = torch.where(alive, choose(node, depth), wanted)
    accepted = torch.stack(path, dim=1) if path else node.new_empty((draft.rows, 0))
    return Verdict(accepted, wanted)


def follow_all(draft: Draft, chosen: Tensor) -> Verdict:
    """Follow what was chosen after the last pending token and after every node: int64 [B, 1 + n]."""
    if not draft.chain:
        return follow(draft, choose_from(chosen))
    fits = (draft.tokens == chosen[:, :-1]) & (draft.parents >= -1)
    accepted = (~fits).cumsum(dim=1) == 0
    index = torch.arange(draft.nodes, device=accepted.device)
    at_the_end = accepted.sum(dim=1, keepdim=True)
    return Verdict(torch.where(accepted, index, -1), chosen.gather(1, at_the_end).squeeze(1))


def choose_from(chosen: Tensor) -> Choose:
    """Choose from what was chosen beforehand: int64 [B, 1 + n], after the root and after each node."""
    return lambda node, _: chosen.gather(1, (node + 1).unsqueeze(1)).squeeze(1)
