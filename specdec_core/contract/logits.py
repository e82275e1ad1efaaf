"""What a forward says of a block: raw logits, held for the columns that hold a token and for no others."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdec_core.contract.largest import top_token, top_tokens


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
