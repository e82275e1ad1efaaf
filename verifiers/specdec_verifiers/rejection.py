"""Verifier `rejection`: the acceptance test of speculative sampling, token by token along a chain."""

from __future__ import annotations

import torch

from specdec_core import Draft, DraftLaw, RowRng, TargetDistributions, Verdict, VerifierConfig
from specdec_verifiers._chain import Chain
from specdec_verifiers._residual import proposal, ratio, residual


class Rejection:
    """Accept a drafted token x with min(1, p(x)/q(x)); where it is rejected, draw from norm((p - q)+).

    Leviathan, Kalman and Matias 2023 (arXiv 2211.17192, algorithm 1); Chen et al. 2023 (arXiv 2302.01318).
    For a fixed draft q is the point mass: accepted with p(x), else drawn from p without x. Where a node has
    one child, drawing without replacement is the same as drawing.
    """

    name = "rejection"
    Config = VerifierConfig
    laws = frozenset({DraftLaw.ONE_HOT, DraftLaw.SAMPLED, DraftLaw.WITHOUT_REPLACEMENT})
    handles_trees = False
    lossless = True
    samples = True
    drafter_invariant = False
    preference = 60

    def __init__(self, config: VerifierConfig) -> None:
        self.config = config

    def verify(self, p: TargetDistributions, draft: Draft, rng: RowRng) -> Verdict:
        """Judge a draft; see `Verifier.verify`.

        Of each node, draw 0 is its acceptance test and draw 1 the token that follows it.
        """
        chain = Chain.of(draft)
        accept = ratio(*chain.probs(p)).clamp(max=1.0)  # [B, d]
        alive = torch.ones_like(chain.count, dtype=torch.bool)
        accepted = torch.zeros_like(chain.count)
        for i in range(chain.depth):
            alive = rng.bernoulli(accept[:, i] * alive, chain.node(i), 0)
            accepted = accepted + alive
        last, rejected = chain.stop(accepted)
        weights = chain.after(p, last)  # [B, V]
        if chain.depth:
            left = residual(weights, proposal(draft, rejected.clamp(min=0), weights))
            weights = torch.where((rejected >= 0).unsqueeze(1), left, weights)
        return chain.verdict(accepted, rng.categorical(weights, last, 1))
