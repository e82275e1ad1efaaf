"""What a forward says of a block: raw logits, and the distributions that verifiers read.

The likeliest tokens of a large vocabulary are found by functions of our own: argmax and topk of torch are not
vectorised on a CPU. Over 49,152 float32 scores they took 3 to 7 times as long as finding, first, the blocks
of columns with the largest maxima, and then the tokens within them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdec_core.contract.draft import on_device

_BLOCK = 256
_LEAST = 8 * _BLOCK  # columns; below, two steps do not pay
_LEAST_WORK = 32_768  # float32 scores; fewer are read by argmax before the two steps have begun
_HALVES = 4  # argmax takes so much longer for one of 16 bits


class TargetDistributions:
    """p at the last pending token (index 0) and after every node j (index 1 + j).

    At temperature 0, p is the point mass on the argmax.

    Args:
        logits: [B, 1 + n, V] after all logits processing, -inf where p = 0; float32 (float64 for proofs),
            or any float dtype where every row is greedy. As `BlockLogits` they are made whole when asked for.
        greedy: bool [B], which rows have temperature 0; None: all of them.
    """

    def __init__(self, logits: Tensor | BlockLogits, greedy: Tensor | None = None) -> None:
        self._block = BlockLogits.of(logits)
        self.greedy = greedy

    @property
    def logits(self) -> Tensor:
        """log p up to a constant, but for greedy rows: [B, 1 + n, V]."""
        return self._block.whole

    @property
    def vocab_size(self) -> int:
        """V."""
        return self._block.vocab_size

    def at(self, index: Tensor) -> TargetDistributions:
        """Select one index of each row: int64 [B] -> distributions [B, 1, V].

        What a verifier computes from them costs nothing for the nodes it does not visit.
        """
        return TargetDistributions(self._block.at(index).unsqueeze(1), self.greedy)

    def for_rows(self, index: Sequence[int]) -> TargetDistributions:
        """Select rows by their index."""
        at = on_device(index, self._block.held.device)
        return TargetDistributions(
            self._block.for_rows(at), None if self.greedy is None else self.greedy.index_select(0, at)
        )

    @cached_property
    def argmax(self) -> Tensor:
        """The likeliest token at each index: int64 [B, 1 + n]; the smallest id among equals."""
        return self._block.argmax

    @cached_property
    def probs(self) -> Tensor:
        """p itself: [B, 1 + n, V], float32 or wider."""
        dtype = torch.float64 if self.logits.dtype == torch.float64 else torch.float32
        best = self.argmax.unsqueeze(-1)
        if self.greedy is None:
            return torch.zeros_like(self.logits, dtype=dtype).scatter_(-1, best, 1.0)
        soft = torch.softmax(self.logits, dim=-1, dtype=dtype)
        greedy = self.greedy.view(-1, 1, 1)
        top = soft.gather(-1, best).masked_fill_(greedy, 1.0)
        return soft.masked_fill_(greedy, 0.0).scatter_(-1, best, top)

    @cached_property
    def noise_logits(self) -> Tensor:
        """log p up to a constant, for draws with Gumbel noise: -inf wherever p = 0, also in greedy rows."""
        point = torch.full_like(self.logits, -torch.inf).scatter_(-1, self.argmax.unsqueeze(-1), 0.0)
        if self.greedy is None:
            return point
        return torch.where(self.greedy.view(-1, 1, 1), point, self.logits)


@dataclass(frozen=True, eq=False)
class BlockLogits:
    """Logits at the last pending token and at every node of B rows.

    A vocabulary is large: what a row without nodes would have to say at the nodes of others is neither
    computed nor copied. Where it is asked for, it is that of some other token, and means nothing.
    """

    held: Tensor  # [B, 1 + n, V], or [K, V] where `index` tells which of them stands where
    index: Tensor | None = None  # int64 [B, 1 + n]

    @classmethod
    def of(cls, logits: Tensor | BlockLogits) -> BlockLogits:
        """Take logits in either form."""
        return logits if isinstance(logits, BlockLogits) else cls(logits)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.held.shape[-1]

    @cached_property
    def whole(self) -> Tensor:
        """All of them, [B, 1 + n, V]."""
        if self.index is None:
            return self.held
        return self.held.index_select(0, self.index.flatten()).view(*self.index.shape, -1)

    @cached_property
    def argmax(self) -> Tensor:
        """The likeliest token at each index: int64 [B, 1 + n]; the smallest id among equals."""
        best = top_token(self.held)
        return best if self.index is None else best[self.index]

    def top(self, k: int) -> tuple[Tensor, Tensor]:
        """The k likeliest tokens at each index: values [B, 1 + n, k], descending, and ids int64."""
        values, ids = top_tokens(self.held, k)
        return (values, ids) if self.index is None else (values[self.index], ids[self.index])

    def for_rows(self, index: Tensor) -> BlockLogits:
        """Select rows: int64 [R]."""
        if self.index is None:
            return BlockLogits(self.held.index_select(0, index))
        return BlockLogits(self.held, self.index.index_select(0, index))

    def at(self, index: Tensor) -> Tensor:
        """Select one index of each row: int64 [B] -> [B, V]."""
        rows = torch.arange(index.shape[0], device=index.device)
        return self.held[rows, index] if self.index is None else self.held[self.index[rows, index]]


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
