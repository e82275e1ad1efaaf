"""Single rounds by hand: a draft of a few nodes, the same in every row or each row its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from specdec_core import HOLE, Draft, DraftLaw, TargetDistributions, Verdict, Verifier, VerifierConfig
from specdec_core.contract.rng import KeyedRng, Purpose
from specdec_verifiers import Block, Greedy, Match, Rejection, TreeMask, Typical
from specdec_verifiers.typical import TypicalConfig

ONE_HOT, SAMPLED, WITHOUT = DraftLaw.ONE_HOT, DraftLaw.SAMPLED, DraftLaw.WITHOUT_REPLACEMENT
CPU = torch.device("cpu")
plain = VerifierConfig()
greedy, match = Greedy(plain), Match(plain)
rejection, block, tree_mask = Rejection(plain), Block(plain), TreeMask(plain)
typical = Typical(TypicalConfig())
EVERY: tuple[Verifier, ...] = (greedy, match, rejection, block, tree_mask, typical)
SAMPLING: tuple[Verifier, ...] = (match, rejection, block, tree_mask)


def keyed(rows: int, purpose: Purpose = Purpose.VERIFY, length: int = 5, seed: int = 0) -> KeyedRng:
    """Make a generator of rows with seeds of their own."""
    return KeyedRng([seed + 7919 * i for i in range(rows)], [length] * rows, purpose, "", CPU)


def target(probs: Any, rows: int = 1, at_zero: bool | Tensor = False) -> TargetDistributions:
    """Make p from probabilities [1 + n, V], the same in every row, or [B, 1 + n, V]."""
    p = torch.as_tensor(probs, dtype=torch.float32)
    p = p.expand(rows, -1, -1) if p.dim() == 2 else p
    mask = torch.full((len(p),), at_zero) if isinstance(at_zero, bool) else at_zero
    return TargetDistributions(p.log(), mask)


def drafted(
    tokens: Any, parents: Sequence[int], law: DraftLaw, q: Any = None, rows: int | None = None
) -> Draft:
    """Make a draft: tokens [n] or [B, n], parents [n], q [n, V] or [B, n, V]."""
    tokens = torch.as_tensor(tokens)
    rows = rows or (len(tokens) if tokens.dim() == 2 else 1)
    tokens = tokens.expand(rows, -1)
    probs = None
    if q is not None:
        probs = torch.as_tensor(q, dtype=torch.float32)
        probs = probs.expand(rows, -1, -1) if probs.dim() == 2 else probs
    depth: list[int] = []
    for parent in parents:
        depth.append(0 if parent == HOLE else 1 if parent < 0 else depth[parent] + 1)
    width = max((list(parents).count(parent) for parent in parents if parent != HOLE), default=0)
    ups = torch.tensor(list(parents), dtype=torch.int64).expand(rows, -1)
    return Draft.of(tokens, ups, law, depth=max(depth, default=0), width=width, probs=probs)


def said(draft: Draft, verdict: Verdict) -> list[list[int]]:
    """List what each row commits."""
    return [
        [*(int(draft.tokens[b, node]) for node in path if node >= 0), int(verdict.next_token[b])]
        for b, path in enumerate(verdict.path.tolist())
    ]


def first_tokens(draft: Draft, verdict: Verdict) -> Tensor:
    """The first token that each row commits: int64 [B]."""
    if not verdict.path.shape[1]:
        return verdict.next_token
    head = verdict.path[:, 0]
    return torch.where(
        head >= 0, draft.tokens.gather(1, head.clamp(min=0)[:, None]).squeeze(1), verdict.next_token
    )


def fits(drawn: Tensor, probs: Sequence[float]) -> bool:
    """Whether draws look like a law; none may have probability 0."""
    counts = torch.bincount(drawn, minlength=len(probs)).double()
    expected = torch.tensor(probs, dtype=torch.float64) * len(drawn) / sum(probs)
    if counts[expected == 0].any():
        return False
    live = expected > 0
    if live.sum() == 1:
        return True
    return bool(stats.chisquare(counts[live], expected[live]).pvalue > 1e-4)


class Forced:
    """A `RowRng` whose tests fail (or pass) wherever they can, and whose draws are keyed."""

    def __init__(self, rows: int, passes: bool = False) -> None:
        self.keyed, self.passes = keyed(rows), passes

    def bernoulli(self, p: Tensor, node: Tensor | int, draw: int) -> Tensor:
        return p > 0 if self.passes else torch.zeros_like(p, dtype=torch.bool)

    def categorical(self, weights: Tensor, node: Tensor | int, draw: int) -> Tensor:
        assert weights.isfinite().all(), "nothing can be drawn from NaN"
        return self.keyed.categorical(weights, node, draw)

    def target_draw(self, logits: Tensor, depth: Tensor | int) -> Tensor:
        return self.keyed.target_draw(logits, depth)

    def child(self, name: str) -> KeyedRng:
        return self.keyed.child(name)
