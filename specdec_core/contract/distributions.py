"""The target's processed next-token distributions, as verifiers read them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from specdec_core.contract.logits import BlockLogits
from specdec_core.contract.transfer import on_device


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
