"""Medusa-1 heads, all of them in one set of tensors, so that a draft takes the same few operations for any
number of heads.

K heads of L residual blocks read the state x [H] that the target's own head reads (after the final norm):
x <- x + SiLU(W x + b) for each block, then the head's vocabulary projection (arXiv 2401.10774, 2.1.1).
Head k, counted from 0, guesses the token k + 2 places behind the one whose state it reads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

Projection = Callable[[Tensor], Tensor]


class Heads(nn.Module):
    """K heads over states of width H; V' is the vocabulary they draft from.

    Args:
        weight: [K, L, H, H] of the residual blocks.
        bias: [K, L, H].
        projection: [K, V', H]; None: the heads share the target's own head.
        ids: int64 [V'], the target's id of each draft id; None: they are the same.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor, projection: Tensor | None = None, ids: Tensor | None = None
    ) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.projection = None if projection is None else nn.Parameter(projection)
        self.ids: Tensor | None
        self.register_buffer("ids", ids)

    @classmethod
    def fresh(cls, count: int, layers: int, hidden_size: int, projection: Tensor | None = None) -> Heads:
        """Make untrained heads, which say what the target's head does; projection: [V, H] to begin with."""
        weight, bias = (
            torch.zeros(count, layers, hidden_size, hidden_size),
            torch.zeros(count, layers, hidden_size),
        )
        each = None if projection is None else projection.detach().float().repeat(count, 1, 1)
        return cls(weight, bias, each)

    @property
    def count(self) -> int:
        """K, the number of heads."""
        return self.weight.shape[0]

    @property
    def layers(self) -> int:
        """L, the residual blocks of a head."""
        return self.weight.shape[1]

    @property
    def hidden_size(self) -> int:
        """H, the width of the states they read."""
        return self.weight.shape[-1]

    @property
    def vocab_size(self) -> int | None:
        """V', the tokens they draft from; None: the target's."""
        return None if self.projection is None else self.projection.shape[1]

    def forward(self, states: Tensor, shared: Projection, count: int | None = None) -> Tensor:
        """Guess: states [N, H] -> logits [count, N, V'] of the first `count` heads.

        shared: the target's own head, for heads without a projection.
        """
        k = self.count if count is None else count
        x = states.to(self.weight.dtype).expand(k, -1, -1)
        for layer in range(self.layers):
            bias, weight = self.bias[:k, layer].unsqueeze(1), self.weight[:k, layer].transpose(1, 2)
            x = x + silu(torch.baddbmm(bias, x, weight))
        if self.projection is None:
            return shared(x)
        return torch.bmm(x, self.projection[:k].transpose(1, 2))

    def named(self, ids: Tensor) -> Tensor:
        """Turn draft ids into the target's: int64 of any shape."""
        return ids if self.ids is None else self.ids[ids]
