"""Verifier `match`: the target draws its own token at each node; a child that carries it is accepted."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_core import Draft, DraftLaw, RowRng, TargetDistributions, Verdict, VerifierConfig
from specdec_verifiers._walk import follow


class Match:
    """Draw y = argmax(log p + g) with noise that depends on (seed, position, token) alone.

    The text is what plain sampling with that seed gives, whatever drafts. Needs no q; for ONE_HOT drafts
    it accepts with p(x), which is optimal.
    """

    name = "match"
    Config = VerifierConfig
    laws = frozenset(DraftLaw)
    handles_trees = True
    lossless = True
    samples = True
    drafter_invariant = True
    preference = 40

    def __init__(self, config: VerifierConfig) -> None:
        self.config = config

    def verify(self, p: TargetDistributions, draft: Draft, rng: RowRng) -> Verdict:
        """Judge a draft; see `Verifier.verify`."""
        return follow(draft, rng.target_draw(p.noise_logits, _depths(draft)))


def _depths(draft: Draft) -> Tensor:
    """Depth of the last pending token (0) and of every node, holes 0: int64 [B, 1 + n]."""
    depths = torch.zeros((draft.rows, 1 + draft.nodes), dtype=torch.int64, device=draft.parents.device)
    up = (draft.parents + 1).clamp(min=0)  # where the parent stands in `depths`
    real = draft.parents >= -1
    for _ in range(draft.depth):
        depths[:, 1:] = torch.where(real, depths.gather(1, up) + 1, 0)
    return depths
