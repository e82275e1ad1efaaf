"""Verifier `tree_mask`: descend a tree, testing siblings in the order in which they were drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_core import Draft, DraftLaw, RowRng, TargetDistributions, Verdict, VerifierConfig
from specdec_verifiers._residual import proposal, ratio, residual, token_probs


class TreeMask:
    """Try each child x of a node with min(1, p(x)/q(x)); a rejected one leaves p <- norm((p - q)+).

    What q is follows the row's law, and with it the rule: SAMPLED siblings share q (SpecInfer, Miao et al.
    2023, arXiv 2305.09781, algorithm 2); drawn WITHOUT_REPLACEMENT, each has the conditional q without the
    earlier ones (Sequoia, Chen et al. 2024, arXiv 2402.12374, algorithm 2); ONE_HOT children (the top k,
    EAGLE-2 style) have a point mass each, so x is accepted with p(x) and else removed from p. No child
    accepted: the next token has the law of the p that is left; a leaf accepted: p there.
    """

    name = "tree_mask"
    Config = VerifierConfig
    laws = frozenset({DraftLaw.ONE_HOT, DraftLaw.SAMPLED, DraftLaw.WITHOUT_REPLACEMENT})
    handles_trees = True
    lossless = True
    samples = True
    drafter_invariant = False
    preference = 50

    def __init__(self, config: VerifierConfig) -> None:
        self.config = config

    def verify(self, p: TargetDistributions, draft: Draft, rng: RowRng) -> Verdict:
        """Judge a draft; see `Verifier.verify`.

        Of each node, draw 0 is its acceptance test and draw 1 the token that follows it. One distribution
        [B, V] is at work at a time: that of the node each row stands at.
        """
        descent = _Descent(p, draft)
        for _ in range(min(draft.depth, draft.nodes)):
            descent.step(rng)
        path = torch.stack(descent.path, dim=1) if descent.path else descent.node.new_empty((draft.rows, 0))
        return Verdict(path, rng.categorical(descent.left, descent.node, 1))


class _Descent:
    """Where each row stands."""

    def __init__(self, p: TargetDistributions, draft: Draft) -> None:
        self.p, self.draft = p, draft
        self.node = torch.full_like(draft.laws, -1, dtype=torch.int64)  # [B]: -1 is the last pending token
        self.left = p.at(self.node + 1).probs.squeeze(1)  # [B, V]: p there, or what rejections left of it
        self.alive = torch.ones_like(self.node, dtype=torch.bool)  # [B]: accepted a node at every depth
        self.path: list[Tensor] = []

    def step(self, rng: RowRng) -> None:
        """Test the children of each row's node, and step to the one that is accepted."""
        draft = self.draft
        # A row that has stopped has rejected all children of its node: it tests none again.
        untried = (draft.parents == self.node.unsqueeze(1)) & self.alive.unsqueeze(1)  # [B, n]
        taken = torch.full_like(self.node, -1)
        for _ in range(min(draft.width, draft.nodes)):
            found, child = untried.max(dim=1)  # of several the first: the order in which they were drawn
            accepted = self._test(found, child, rng)
            taken = torch.where(accepted, child, taken)
            untried = untried.scatter(1, child.unsqueeze(1), False) & ~accepted.unsqueeze(1)
        self.alive = taken >= 0
        self.node = torch.where(self.alive, taken, self.node)
        fresh = self.p.at(self.node + 1).probs.squeeze(1)
        self.left = torch.where(self.alive.unsqueeze(1), fresh, self.left)
        self.path.append(taken)

    def _test(self, found: Tensor, child: Tensor, rng: RowRng) -> Tensor:
        """Test a child of each row, where there is one: bool [B]; a rejected one leaves its mark on p."""
        q = proposal(self.draft, child, self.left)
        token = self.draft.tokens.gather(1, child.unsqueeze(1)).squeeze(1)
        chance = ratio(token_probs(self.left, token), token_probs(q, token)).clamp(max=1.0)
        accepted = rng.bernoulli(chance * found, torch.where(found, child, -1), 0)
        rejected = (found & ~accepted).unsqueeze(1)
        self.left = torch.where(rejected, residual(self.left, q), self.left)
        return accepted
