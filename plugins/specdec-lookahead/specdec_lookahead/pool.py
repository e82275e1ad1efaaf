"""The pool of n-grams of every row: a ring of the latest ones, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_EMPTY = -1


class Pool:
    """Holds `size` n-grams of N tokens for each place. Nothing here waits for the device."""

    def __init__(self, places: int, size: int, n: int, device: torch.device) -> None:
        self._size = size
        self._grams = torch.full((places, size, n), _EMPTY, dtype=torch.int64, device=device)
        self._written = [0] * places  # n-grams that each place was given

    def begin(self, place: int, prompt: Sequence[int]) -> None:
        """Empty a place, and put a prompt's latest n-grams in."""
        n = self._grams.shape[2]
        first = max(len(prompt) - n + 1 - self._size // 2, 0)
        grams = [list(prompt[i : i + n]) for i in range(first, len(prompt) - n + 1)]
        self._grams[place] = _EMPTY
        self._written[place] = len(grams)
        if grams:
            self._grams[place, : len(grams)] = torch.tensor(grams).to(self._grams.device, non_blocking=True)

    def add(self, places: Sequence[int], grams: Tensor, valid: Tensor) -> None:
        """Add n-grams: int64 [B, w, N], of which those count that are marked in bool [B, w]."""
        device, w = self._grams.device, grams.shape[1]
        slots = [[(self._written[place] + i) % self._size for i in range(w)] for place in places]
        for place in places:
            self._written[place] += w
        at = torch.tensor(slots).to(device, non_blocking=True)
        row = torch.tensor(places).to(device, non_blocking=True).unsqueeze(1)
        self._grams[row, at] = grams.masked_fill(~valid.unsqueeze(-1), _EMPTY)

    def find(self, places: Sequence[int], keys: Tensor, most: int) -> Tensor:
        """Give what followed a token in the latest n-grams: keys int64 [B] -> [B, most, N - 1], -1: nothing.

        No continuation is there twice; the most recent comes first.
        """
        device = self._grams.device
        row = torch.tensor(places).to(device, non_blocking=True)
        grams = self._grams[row]
        behind = torch.tensor([self._written[place] for place in places]).to(device, non_blocking=True)
        slot = torch.arange(self._size, device=device)
        age = (behind.unsqueeze(1) - 1 - slot) % self._size
        rank = (self._size - age).masked_fill(grams[:, :, 0] != keys.unsqueeze(1), 0)
        rank, at = rank.topk(min(4 * most, self._size), dim=-1)
        found = grams.gather(1, at.unsqueeze(-1).expand(-1, -1, grams.shape[2]))[:, :, 1:]
        known = rank > 0
        same = (found.unsqueeze(2) == found.unsqueeze(1)).all(dim=-1)  # [B, c, c]
        known &= ~(same & known.unsqueeze(1)).tril(-1).any(dim=-1)
        order = known.to(torch.int8).argsort(dim=-1, descending=True, stable=True)[:, :most]
        found = found.gather(1, order.unsqueeze(-1).expand(-1, -1, found.shape[2]))
        return found.masked_fill(~known.gather(1, order).unsqueeze(-1), _EMPTY)
