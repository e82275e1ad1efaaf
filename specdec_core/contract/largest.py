"""The likeliest tokens of a large vocabulary, found fast on a CPU.

torch's own argmax and topk are not vectorised there: over 49,152 float32 scores they took 3 to 7 times as
long as finding, first, the blocks of columns with the largest maxima, and then the tokens within them.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 256
_LEAST = 8 * _BLOCK  # columns; below, two steps do not pay
_LEAST_WORK = 32_768  # float32 scores; fewer are read by argmax before the two steps have begun
_HALVES = 4  # argmax takes so much longer for one of 16 bits


def top_token(scores: Tensor) -> Tensor:
    """Find the largest score: [..., V] -> int64 [...]; the smallest id among equals."""
    work = scores.numel() * (1 if scores.element_size() >= 4 else _HALVES)
    if work < _LEAST_WORK or not _pays(scores, 1):
        return scores.argmax(dim=-1)
    # equals lie in the first of their blocks, and there the first of them is found
    block = _largest_of_blocks(scores).argmax(dim=-1, keepdim=True)
    columns = _columns(block).clamp_(max=scores.shape[-1] - 1)  # the last column once more: it comes first
    found = scores.gather(-1, columns).argmax(dim=-1, keepdim=True)
    return columns.gather(-1, found).squeeze(-1)


def top_tokens(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Find the k largest scores, in descending order: [..., V] -> (values [..., k], ids int64 [..., k]).

    Which of equal scores are found, and their order, is not fixed.
    """
    if not _pays(scores, k):
        values, ids = scores.topk(k, dim=-1)
        return values, ids
    blocks = _largest_of_blocks(scores).topk(k, dim=-1).indices  # the k largest lie in k blocks at most
    columns = _columns(blocks)
    beyond = columns >= scores.shape[-1]
    columns = columns.clamp_(max=scores.shape[-1] - 1)
    values, found = scores.gather(-1, columns).masked_fill_(beyond, -torch.inf).topk(k, dim=-1)
    return values, columns.gather(-1, found)


def _pays(scores: Tensor, k: int) -> bool:
    return scores.device.type == "cpu" and scores.shape[-1] >= _LEAST * k


def _largest_of_blocks(scores: Tensor) -> Tensor:
    """[..., V] -> [..., ceil(V / _BLOCK)]."""
    width = scores.shape[-1]
    whole = width // _BLOCK * _BLOCK
    largest = scores[..., :whole].reshape(*scores.shape[:-1], -1, _BLOCK).amax(dim=-1)
    if whole == width:
        return largest
    return torch.cat([largest, scores[..., whole:].amax(dim=-1, keepdim=True)], dim=-1)


def _columns(blocks: Tensor) -> Tensor:
    """The columns of these blocks: int64 [..., k] -> [..., k * _BLOCK]."""
    index = torch.arange(_BLOCK, device=blocks.device)
    return (blocks.unsqueeze(-1) * _BLOCK + index).flatten(-2)
