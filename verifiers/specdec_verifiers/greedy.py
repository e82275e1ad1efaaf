"""Verifier `greedy`: follow the target's argmax."""

from __future__ import annotations

from specdec_core import Draft, DraftLaw, RowRng, TargetDistributions, Verdict, VerifierConfig
from specdec_verifiers._descent import follow_all


class Greedy:
    """Accept drafted tokens that are the target's argmax (temperature 0 only).

    Lossless for any law and any tree: the draft is only read.
    """

    name = "greedy"
    Config = VerifierConfig
    laws = frozenset(DraftLaw)
    handles_trees = True
    lossless = True
    samples = False
    drafter_invariant = True
    preference = 100

    def __init__(self, config: VerifierConfig) -> None:
        self.config = config

    def verify(self, p: TargetDistributions, draft: Draft, rng: RowRng) -> Verdict:
        """Judge a draft; see `Verifier.verify`."""
        return follow_all(draft, p.argmax)
