"""The tree of a round: G guesses from the pool, and behind them the window, W columns of N - 1 tokens.

The first tokens of the columns are a chain below the last pending token; the rest of a column hangs on its
first token. So each token of the window sees what Jacobi iteration lets it see, by the mask of a tree alone
(arXiv 2402.02057, figure 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdec_core import HOLE, ROOT


@dataclass(frozen=True)
class Layout:
    """Sizes of the tree, and the shape that follows from them."""

    window: int  # W
    n: int  # N, tokens of an n-gram
    guesses: int  # G

    @property
    def levels(self) -> int:
        """N - 1, tokens of a guess and of a column."""
        return self.n - 1

    @property
    def first(self) -> int:
        """The index of the window's first node: level 0 of column 0; level 0 of column 1 follows."""
        return self.guesses * self.levels

    @property
    def nodes(self) -> int:
        """All nodes."""
        return self.first + self.window * self.levels

    @property
    def depth(self) -> int:
        """Of the deepest node: the end of the last column."""
        return self.window + self.levels - 1

    @property
    def width(self) -> int:
        """Most children of a node: all guesses and the window hang on the root."""
        return self.guesses + 1

    @cached_property
    def window_parents(self) -> Tensor:
        """int64 [W * (N - 1)], level by level."""
        first, w = self.first, self.window
        top = [ROOT, *range(first, first + w - 1)]
        return torch.tensor(top + [first + i for i in range((self.levels - 1) * w)])

    @cached_property
    def depths(self) -> Tensor:
        """int64 [n] of all nodes."""
        guesses = [level + 1 for _ in range(self.guesses) for level in range(self.levels)]
        window = [1 + level + column for level in range(self.levels) for column in range(self.window)]
        return torch.tensor(guesses + window)

    def guess_parents(self, found: Tensor) -> Tensor:
        """Merge guesses that begin alike: found [B, G, N - 1], -1 for none -> parents int64 [B, G * (N - 1)].

        A node that an earlier guess has too is a hole, and what follows hangs on that one.
        """
        same = (found.unsqueeze(2) == found.unsqueeze(1)).long().cumprod(dim=-1)  # [B, G, G, N - 1]
        owner = same.argmax(dim=2)  # [B, G, N - 1]: the first guess with this beginning
        level = torch.arange(self.levels, device=found.device)
        index = owner * self.levels + level  # node of each token
        parents = torch.cat([torch.full_like(index[..., :1], ROOT), index[..., :-1]], dim=-1)
        guess = torch.arange(self.guesses, device=found.device).unsqueeze(-1)
        return parents.where((found >= 0) & (owner == guess), HOLE).flatten(1)
