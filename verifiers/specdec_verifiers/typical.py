"""Verifier `typical`: accept what the target finds likely enough. Lossy."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from specdec_core import HOLE, Draft, DraftLaw, RowRng, TargetDistributions, Verdict, VerifierConfig


class TypicalConfig(VerifierConfig):
    """Options of `typical`."""

    epsilon: float = Field(default=0.09, gt=0, le=1, description="accept any token likelier than this")
    delta: float = Field(
        default=0.3, gt=0, description="share of exp(-entropy) that is enough where p is flat"
    )


class Typical:
    """Accept a drafted token x if p(x) > min(epsilon, delta exp(-H(p))). LOSSY: it changes what is said.

    Medusa's typical acceptance (Cai et al. 2024, arXiv 2401.10774, section 3.3.1): of a tree's accepted
    paths the longest is kept, the likeliest of equally long ones; the token after it is drawn from p. q is
    not looked at. At temperature 0 only the argmax is likely enough, and nothing is lost.
    """

    name = "typical"
    Config = TypicalConfig
    laws = frozenset({DraftLaw.ONE_HOT, DraftLaw.SAMPLED, DraftLaw.WITHOUT_REPLACEMENT})
    handles_trees = True
    lossless = False
    samples = True
    drafter_invariant = False
    preference = 0

    def __init__(self, config: TypicalConfig) -> None:
        self.config = config

    def verify(self, p: TargetDistributions, draft: Draft, rng: RowRng) -> Verdict:
        """Judge a draft; see `Verifier.verify`. Of the last accepted node, draw 1 is the token after it."""
        root = draft.laws.new_full((draft.rows,), -1, dtype=torch.int64)
        if not draft.nodes:
            return Verdict(root.new_empty((draft.rows, 0)), _draw(p, root, rng))
        path, last = _longest(draft, *self._likely(p, draft))
        return Verdict(path, _draw(p, last, rng))

    def _likely(self, p: TargetDistributions, draft: Draft) -> tuple[Tensor, Tensor]:
        """Test each node against p at its parent: (accepted, log p(x)), [B, n] each."""
        entropy = torch.special.entr(p.probs).sum(dim=-1)  # [B, 1 + n]
        threshold = (self.config.delta * torch.exp(-entropy)).clamp(max=self.config.epsilon)
        rows = torch.arange(draft.rows, device=draft.parents.device).unsqueeze(1)
        parent = (draft.parents + 1).clamp(min=0)
        token = draft.tokens.clamp(0, p.vocab_size - 1)
        p_x = p.probs[rows, parent, token]
        likely = (p_x > threshold.gather(1, parent)) & (token == draft.tokens) & (draft.parents != HOLE)
        return likely, p_x.log()


def _longest(draft: Draft, likely: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Find the longest path of likely nodes, the likeliest among equals: (path [B, d], its end [B])."""
    up = (draft.parents + 1).clamp(min=0)  # where the parent stands behind a column for the root
    root = torch.zeros_like(log_p[:, :1])
    reached, score, length = likely, log_p, torch.zeros_like(draft.parents)
    for _ in range(min(draft.depth, draft.nodes)):
        reached = likely & torch.cat([root == 0, reached], dim=1).gather(1, up)
        score = log_p + torch.cat([root, score], dim=1).gather(1, up)
        length = torch.where(reached, torch.cat([root.long(), length], dim=1).gather(1, up) + 1, 0)
    longest = length.amax(dim=1, keepdim=True)
    best = score.masked_fill(~reached | (length < longest), -torch.inf).argmax(dim=1)
    last = torch.where(longest.squeeze(1) > 0, best, -1)
    return _climb(draft, last, longest), last


def _climb(draft: Draft, last: Tensor, length: Tensor) -> Tensor:
    """List the nodes from the root down to `last`: int64 [B] -> [B, d], -1 padded."""
    parents = torch.cat([torch.full_like(length, -1), draft.parents], dim=1)
    depth = min(draft.depth, draft.nodes)
    path = last.new_full((draft.rows, 1 + depth), -1)
    node = last.unsqueeze(1)
    for step in range(depth):
        path = path.scatter(1, (length - step).clamp(min=0), node)  # what is above the root goes to slot 0
        node = parents.gather(1, node + 1)
    return path[:, 1:]


def _draw(p: TargetDistributions, node: Tensor, rng: RowRng) -> Tensor:
    """Draw the token after a node of each row: int64 [B]."""
    return rng.categorical(p.at(node + 1).probs.squeeze(1), node, 1)
