"""The target's processed next-token distributions, as verifiers read them."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


class TargetDistributions:
    """p at the last pending token (index 0) and after every node j (index 1 + j).

    At temperature 0, p is the point mass on the argmax.

    Args:
        logits: [B, 1 + n, V] after all logits processing, -inf where p = 0; float32 (float64 for proofs),
            or any float dtype where every row is greedy.
        greedy: bool [B], which rows have temperature 0; None: all of them.
    """

    def __init__(self, logits: Tensor, greedy: Tensor | None = None) -> None:
        self.logits = logits
        self.greedy = greedy

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.logits.shape[-1]

    @cached_property
    def argmax(self) -> Tensor:
        """The likeliest token at each index: int64 [B, 1 + n]; the smallest id among equals."""
        return self.logits.argmax(dim=-1)

    @cached_property
    def probs(self) -> Tensor:
        """p itself: [B, 1 + n, V], float32 or wider."""
        point = torch.zeros_like(self.logits, dtype=_wide(self.logits.dtype))
        point.scatter_(-1, self.argmax.unsqueeze(-1), 1.0)
        if self.greedy is None:
            return point
        soft = torch.softmax(self.logits.to(point.dtype), dim=-1)
        return torch.where(self.greedy.view(-1, 1, 1), point, soft)

    @cached_property
    def noise_logits(self) -> Tensor:
        """log p up to a constant, for draws with Gumbel noise: -inf wherever p = 0, also in greedy rows."""
        if self.greedy is None:
            return self.probs.log()
        return torch.where(self.greedy.view(-1, 1, 1), self.probs.log(), self.logits)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
