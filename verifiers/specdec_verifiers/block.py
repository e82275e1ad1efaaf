"""Verifier `block`: a chain is verified as a whole, which never accepts less than token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_core import Draft, DraftLaw, RowRng, TargetDistributions, Verdict, VerifierConfig
from specdec_verifiers._chain import Chain
from specdec_verifiers._residual import proposal, ratio, residual


class Block:
    """Accept the longest prefix of a chain that passes its own test.

    Sun et al. 2024 (arXiv 2403.10444, algorithm 2). With p_0 = 1 and p_i = min(p_{i-1} p(x_i)/q(x_i), 1),
    prefix i of the row's own k passes with h_i = Z_i / (Z_i + 1 - p_i), where
    Z_i = sum_x (p_i p(x | x_1..x_i) - q(x | x_1..x_i))+, and the whole with h_k = p_k; tau is the largest i
    that passes. The next token has the law norm((p_tau p - q)+), or p behind a whole chain. In float64:
    with a near-perfect drafter Z_i and 1 - p_i are what rounding leaves of them.
    """

    name = "block"
    Config = VerifierConfig
    laws = frozenset({DraftLaw.ONE_HOT, DraftLaw.SAMPLED})
    handles_trees = False
    lossless = True
    samples = True
    drafter_invariant = False
    preference = 70

    def __init__(self, config: VerifierConfig) -> None:
        self.config = config

    def verify(self, p: TargetDistributions, draft: Draft, rng: RowRng) -> Verdict:
        """Judge a draft; see `Verifier.verify`.

        Of each node, draw 0 is the test of the prefix that it ends and draw 1 the token that follows it.
        """
        chain = Chain.of(draft)
        reach = _reach(chain, p)
        accepted = torch.zeros_like(chain.count)
        for i in range(1, chain.depth + 1):  # the prefix of i tokens
            whole = chain.count == i
            passes = reach[:, i] if i == chain.depth else _pass(chain, p, i, reach[:, i], whole)
            passed = rng.bernoulli(passes.masked_fill(chain.count < i, 0.0), chain.node(i - 1), 0)
            accepted = torch.where(passed, i, accepted)
        last, rejected = chain.stop(accepted)
        weights = chain.after(p, last).double()  # [B, V]
        if chain.depth:
            scaled = weights * reach.gather(1, accepted.unsqueeze(1))
            left = residual(scaled, proposal(draft, rejected.clamp(min=0), weights))
            weights = torch.where((rejected >= 0).unsqueeze(1), left, weights)
        return chain.verdict(accepted, rng.categorical(weights, last, 1))


def _reach(chain: Chain, p: TargetDistributions) -> Tensor:
    """p_0 .. p_d of each row: float64 [B, 1 + d]."""
    p_x, q_x = chain.probs(p)
    ratios = ratio(p_x.double(), q_x.double())
    reach = [torch.ones_like(chain.count, dtype=torch.float64)]
    for i in range(chain.depth):
        reach.append((reach[-1] * ratios[:, i]).clamp(max=1.0))
    return torch.stack(reach, dim=1)


def _pass(chain: Chain, p: TargetDistributions, i: int, p_i: Tensor, whole: Tensor) -> Tensor:
    """h_i, the chance that the prefix of i tokens passes: float64 [B]."""
    after = chain.after(p, chain.node(i - 1)).double()  # [B, V]
    q = proposal(chain.draft, chain.node(i).clamp(min=0), after)
    z = (p_i.unsqueeze(1) * after - q).clamp_(min=0.0).sum(dim=-1)
    h = torch.nan_to_num(z / (z + (1.0 - p_i)), nan=1.0).clamp(0.0, 1.0)
    return torch.where(whole, p_i, h)
