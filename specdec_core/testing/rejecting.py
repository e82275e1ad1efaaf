"""A verifier that rejects on command: what is said stays the same, more of each draft is thrown away."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec_core.contract.distributions import TargetDistributions
from specdec_core.contract.draft import Draft, Verdict
from specdec_core.contract.interfaces import RowRng, Verifier


class Rejecting:
    """Another verifier of which some rounds accept no more than so many nodes.

    The token behind them is the one that was accepted there, so the text is the same with any drafts
    if it is with the other verifier.

    Args:
        most: nodes to accept in each round, in turn; None: all.
    """

    def __init__(self, inner: Verifier, most: Sequence[int | None]) -> None:
        self.inner, self.most, self.calls = inner, most, 0
        self.name, self.Config, self.config = f"rejecting {inner.name}", inner.Config, inner.config
        self.laws, self.handles_trees, self.lossless = inner.laws, inner.handles_trees, inner.lossless
        self.samples, self.drafter_invariant = inner.samples, inner.drafter_invariant
        self.preference = 0

    def verify(self, p: TargetDistributions, draft: Draft, rng: RowRng) -> Verdict:
        """Judge a draft; see `Verifier.verify`."""
        verdict = self.inner.verify(p, draft, rng)
        most = self.most[self.calls % len(self.most)]
        self.calls += 1
        if most is None or most >= verdict.path.shape[1]:
            return verdict
        first = verdict.path[:, most]
        instead = draft.tokens.gather(1, first.clamp(min=0).unsqueeze(1)).squeeze(1)
        return Verdict(verdict.path[:, :most], torch.where(first >= 0, instead, verdict.next_token))
