"""Drafts read as chains: what `rejection` and `block` share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_core import HOLE, Draft, DraftLaw, TargetDistributions, Verdict


@dataclass(frozen=True, eq=False, slots=True)
class Chain:
    """Each row's nodes from the root on, holes left out: a row's parents come before its children.

    Step i (from 0) is the test of node x_{i+1} of the papers, against the distributions after x_1 .. x_i.
    """

    draft: Draft
    nodes: Tensor  # int64 [B, 1 + d + 1]: the last pending token (-1), each node, then -1
    count: Tensor  # int64 [B]: the row's own k

    @classmethod
    def of(cls, draft: Draft) -> Chain:
        """Order a draft's nodes; d is the draft's depth."""
        real = draft.parents != HOLE
        depth = min(draft.depth, draft.nodes)
        # Node number r stands at slot r; holes go to the slot behind, which is then cleared.
        slot = torch.where(real, real.cumsum(dim=1), depth + 1)
        index = torch.arange(draft.nodes, device=slot.device).expand_as(slot)
        nodes = index.new_full((draft.rows, depth + 2), -1).scatter_(1, slot, index)
        nodes[:, -1] = -1
        return cls(draft, nodes, real.sum(dim=1))

    @property
    def depth(self) -> int:
        """d: the most steps of any row, known on the host."""
        return self.nodes.shape[1] - 2

    def node(self, i: int) -> Tensor:
        """Give the node tested in step i: int64 [B]; -1 where the row has none."""
        return self.nodes[:, 1 + i]

    def probs(self, p: TargetDistributions) -> tuple[Tensor, Tensor]:
        """Give p and q of every drafted token, [B, d] each: what each step compares.

        A token outside the vocabulary, and a step that a row does not have, has p = 0.
        """
        rows = torch.arange(self.draft.rows, device=self.nodes.device).unsqueeze(1)
        nodes = self.nodes[:, 1:-1]
        at = nodes.clamp(min=0)
        token = self.draft.tokens.gather(1, at)
        safe = token.clamp(0, p.vocab_size - 1)
        p_x = p.probs[rows, self.nodes[:, :-2] + 1, safe].masked_fill((token != safe) | (nodes < 0), 0.0)
        if self.draft.probs is None:
            return p_x, torch.ones_like(p_x)
        one_hot = (self.draft.laws == DraftLaw.ONE_HOT).unsqueeze(1)
        return p_x, self.draft.probs[rows, at, safe].to(p_x.dtype).masked_fill(one_hot, 1.0)

    def after(self, p: TargetDistributions, node: Tensor) -> Tensor:
        """Give the distribution after a node of each row: int64 [B], -1 for the root -> p [B, V]."""
        return p.probs[torch.arange(node.shape[0], device=node.device), node + 1]

    def stop(self, accepted: Tensor) -> tuple[Tensor, Tensor]:
        """Give the last accepted node and the one rejected after it: int64 [B] -> two of [B], -1 for none."""
        ends = self.nodes.gather(1, torch.stack([accepted, accepted + 1], dim=1))
        return ends[:, 0], ends[:, 1]

    def verdict(self, accepted: Tensor, next_token: Tensor) -> Verdict:
        """Accept the first nodes of each row: int64 [B]."""
        step = torch.arange(self.depth, device=accepted.device)
        return Verdict(self.nodes[:, 1:-1].masked_fill(step >= accepted.unsqueeze(1), -1), next_token)
