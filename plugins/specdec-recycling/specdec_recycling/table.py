"""The adjacency matrix: what the target last thought of as following each token, on its device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specdec_recycling.template import Template


class Table:
    """For every token its k likeliest successors, as the target had them when it last read that token.

    Row V is that of no token, its candidates are V, and it is never written: a path that leaves what is known
    stays at V. Row V + 1 takes what is to be thrown away. So nothing here waits for the device.

    Args:
        slots: tables that know nothing of each other: one that all share, or one for each place.
        vocab_size: V.
        candidates: k.
    """

    def __init__(self, slots: int, vocab_size: int, candidates: int, device: torch.device) -> None:
        self.unknown, self._trash = vocab_size, vocab_size + 1
        self._stride = vocab_size + 2
        self.candidates = torch.full(
            (slots, self._stride, candidates), self.unknown, dtype=torch.int32, device=device
        )  # [slots, V + 2, k]
        self._stamps = torch.full((slots * self._stride,), -1, dtype=torch.int64, device=device)
        self._clock = 0  # stamps grow: of two writes to one row in one call, the later one stays

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.candidates.nbytes + self._stamps.nbytes

    def clear(self, slot: int) -> None:
        """Forget what a slot holds."""
        self.candidates[slot] = self.unknown

    def write(self, slots: Tensor, tokens: Tensor, ids: Tensor) -> None:
        """Store what follows tokens; those that are no token of the vocabulary are left out.

        slots: int64 [B]; tokens: int64 [B, m]; ids: int64 [B, m, k or fewer], the likeliest first.
        """
        known = (tokens >= 0) & (tokens < self.unknown)
        at = slots.unsqueeze(-1) * self._stride + torch.where(known, tokens, self._trash)
        stamps = torch.arange(self._clock, self._clock + at.numel(), device=at.device).view_as(at)
        self._clock += at.numel()
        self._stamps.scatter_reduce_(0, at.flatten(), stamps.flatten(), "amax")
        at = torch.where(self._stamps[at] == stamps, at, self._trash)
        self.candidates.view(-1, self.candidates.shape[-1])[at, : ids.shape[-1]] = ids.to(torch.int32)

    def suggest(self, slot: int, pairs: Mapping[int, int]) -> None:
        """Make `pairs[a]` the first candidate after a, where nothing is known of a."""
        if not pairs:
            return
        given = torch.tensor([list(pairs), list(pairs.values())], device=self.candidates.device)
        first = self.candidates[slot, :, 0]
        held = first[given[0]]
        first[given[0]] = torch.where(held == self.unknown, given[1].to(torch.int32), held)

    def tree(self, slots: Tensor, last: Tensor, template: Template, ranks: Tensor, up: Tensor) -> Tensor:
        """Fill a template, level by level: int64 [B, n], V where nothing is known.

        slots, last: int64 [B], the tables and the last committed tokens; ranks, up: int64 [n], the template's
        ranks and, for each node, its parent's index in its own level (of the first level: 0).
        """
        rows = self.candidates.view(-1, self.candidates.shape[-1])
        offset = slots.unsqueeze(-1) * self._stride
        above, levels = last.unsqueeze(-1), []
        for start, stop in template.levels:
            above = rows[offset + above[:, up[start:stop]], ranks[start:stop]].to(torch.int64)
            levels.append(above)
        return torch.cat(levels, dim=1)
