"""The logits pipeline: from a model's raw logits to p, in the order and meaning of transformers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_core.contract.distributions import BlockLogits, TargetDistributions
from specdec_core.contract.draft import on_device
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.sampling.history import History
from specdec_core.sampling.processors import process, wanted

_FLOAT32 = torch.finfo(torch.float32)


def distributions(
    logits: Tensor | BlockLogits, params: Sequence[SamplingParams], history: History | None = None
) -> TargetDistributions:
    """Make p at every index; logits: raw, [B, c, V]; history: what was said before each of them."""
    block = BlockLogits.of(logits)
    if all(p.greedy for p in params):
        plain = not any(wanted(p) for p in params)  # then the argmax needs no float32 copy
        return TargetDistributions(block if plain else processed(block.whole, params, history))
    greedy = on_device([p.greedy for p in params], block.held.device, torch.bool)
    return TargetDistributions(processed(block.whole, params, history), greedy)


def processed(logits: Tensor, params: Sequence[SamplingParams], history: History | None) -> Tensor:
    """Apply the whole pipeline: [B, c, V] -> float32 [B, c, V]; rows at temperature 0 are not warped."""
    scores = logits.float()
    if any(wanted(p) for p in params):
        assert history is not None, "processors need to know what was said"
        scores = process(scores, params, history)
    return scores if all(p.greedy for p in params) else warp(scores, params)


def warp(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply temperature, top-k, top-p and min-p row by row: [B, ..., V] -> float32 of that shape.

    Rows at temperature 0 keep their order; scores are relative to the row's largest.
    """
    scores = logits.float()

    def column(values: list[float]) -> Tensor:
        shape = (-1, *([1] * (scores.dim() - 1)))
        return on_device(values, scores.device, torch.float32).view(shape)

    # Relative to the largest, so that a tiny temperature overflows to -inf at worst.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / column(
        [1.0 if p.greedy else min(max(p.temperature, _FLOAT32.tiny), _FLOAT32.max) for p in params]
    )
    vocab = scores.shape[-1]
    if any(p.top_k and not p.greedy for p in params):
        keep = (
            column([p.top_k if p.top_k and not p.greedy else vocab for p in params]).long().clamp_(max=vocab)
        )
        scores = _top_k(scores, keep)
    if any(p.top_p < 1 and not p.greedy for p in params):
        scores = _top_p(scores, column([0.0 if p.greedy else 1 - p.top_p for p in params]))
    if any(p.min_p and not p.greedy for p in params):
        scores = _min_p(scores, column([0.0 if p.greedy else p.min_p for p in params]))
    return scores


def _top_k(scores: Tensor, keep: Tensor) -> Tensor:
    """Drop what is below the k-th largest score; equals of it stay."""
    ranked = scores.sort(dim=-1, descending=True).values
    threshold = ranked.gather(-1, (keep - 1).expand(*scores.shape[:-1], 1))
    return scores.masked_fill(scores < threshold, -torch.inf)


def _top_p(scores: Tensor, tail: Tensor) -> Tensor:
    """Keep the smallest set of likeliest tokens whose mass reaches p, at least one (Holtzman et al. 2020)."""
    ranked, order = scores.sort(dim=-1)
    drop = ranked.softmax(dim=-1).cumsum(dim=-1) <= tail  # 1 - p
    drop &= tail > 0
    drop[..., -1] = False
    return scores.masked_fill(drop.scatter(-1, order, drop), -torch.inf)


def _min_p(scores: Tensor, share: Tensor) -> Tensor:
    """Drop what is less likely than a share of the likeliest token (Nguyen et al. 2024)."""
    probs = scores.softmax(dim=-1)
    return scores.masked_fill(probs < share * probs.amax(dim=-1, keepdim=True), -torch.inf)
