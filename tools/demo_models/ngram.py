"""An interpolated Kneser-Ney n-gram model over token ids: what the demo target must beat.

Chen and Goodman 1999, "An empirical study of smoothing techniques for language modeling", section 4.1.6: one
discount an order, D = n1 / (n1 + 2 n2); lower orders count the distinct tokens that an n-gram follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Reals = NDArray[np.float64]
BITS = 12  # a token's; five of them fit into 60


class KneserNey:
    """Trained on documents; each is read behind n - 1 padding tokens of id 0."""

    def __init__(self, documents: Sequence[Sequence[int]], vocabulary: int, n: int = 5) -> None:
        if vocabulary > 1 << BITS or n * BITS > 63:
            raise ValueError(f"a vocabulary of {vocabulary} or n={n} does not fit into 63 bits")
        self.n, self.vocabulary = n, vocabulary
        grams, counts = np.unique(np.concatenate([self._grams(ids) for ids in documents]), return_counts=True)
        self._orders = {n: _Order(grams, counts.astype(np.int64))}
        for order in range(n - 1, 0, -1):
            grams, counts = np.unique(grams & ((1 << order * BITS) - 1), return_counts=True)
            self._orders[order] = _Order(grams, counts.astype(np.int64))

    def bits(self, ids: Sequence[int]) -> Reals:
        """Give -log2 p of every token of a document."""
        grams = self._grams(ids)
        p = np.full(len(grams), 1 / self.vocabulary)
        for order in range(1, self.n + 1):
            p = self._orders[order].interpolated(grams & ((1 << order * BITS) - 1), p)
        bits: Reals = -np.log2(p)
        return bits

    def _grams(self, ids: Sequence[int]) -> Ids:
        padded = np.concatenate([np.zeros(self.n - 1, np.int64), np.asarray(ids, np.int64)])
        grams = np.zeros(len(ids), np.int64)
        for i in range(self.n):
            grams = (grams << BITS) | padded[i : i + len(ids)]
        return grams


class _Order:
    """The n-grams of one length, sorted, with their counts and those of their contexts."""

    def __init__(self, grams: Ids, counts: Ids) -> None:
        self.grams, self.counts = grams, counts
        once, twice = (counts == 1).sum(), (counts == 2).sum()
        self.discount = once / (once + 2 * twice)
        self.contexts, first, self.followers = np.unique(grams >> BITS, return_index=True, return_counts=True)
        self.totals = np.add.reduceat(counts, first)

    def interpolated(self, grams: Ids, lower: Reals) -> Reals:
        """Mix in the next shorter order's p."""
        count = _look_up(self.grams, self.counts, grams)
        total = _look_up(self.contexts, self.totals, grams >> BITS)
        followers = _look_up(self.contexts, self.followers, grams >> BITS)
        own = np.maximum(count - self.discount, 0) + self.discount * followers * lower
        return np.where(total > 0, own / np.maximum(total, 1), lower)


def _look_up(keys: Ids, values: Ids, wanted: Ids) -> Ids:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    found: Ids = np.where(keys[at] == wanted, values[at], 0)
    return found
