"""Verifier `match`: the target draws its own token at each node; a child that carries it is accepted."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_core import Draft, DraftLaw, RowRng, TargetDistributions, Verdict, VerifierConfig
from specdec_verifiers._descent import Choose, follow, follow_all


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
        if draft.width > 1:
            return follow(draft, _draw_visited(p, rng))
        return follow_all(draft, _draw_all(p, draft, rng))


def _draw_visited(p: TargetDistributions, rng: RowRng) -> Choose:
    """Draw where the descent comes by: most nodes of a tree are never visited."""
    return lambda node, depth: rng.target_draw(p.at(node + 1).noise_logits.squeeze(1), depth)


def _draw_all(p: TargetDistributions, draft: Draft, rng: RowRng) -> Tensor:
    """Draw at every node at once, int64 [B, 1 + n]: fewer, larger steps for a chain."""
    return rng.target_draw(p.noise_logits, _depths(draft))


def _depths(draft: Draft) -> Tensor:
    """Depth of the last pending token (0) and of every node of a chain, holes 0: int64 [B, 1 + n]."""
    real = draft.parents >= -1
    depths = torch.where(real, real.cumsum(dim=1), 0)
    return torch.nn.functional.pad(depths, (1, 0))
