"""What a drafter sees of the rows: `Context`, over the rows' tokens on the host and on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from specdec_core.rng import KeyedRng
from specdec_core.sampling_params import SamplingParams


class TokenBuffer:
    """Committed tokens of every place on the device, brought up to date only when somebody looks."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._ids = torch.zeros((0, 0), dtype=torch.int64, device=device)
        self._synced: dict[int, int] = {}  # place -> tokens on the device

    def release(self, place: int) -> None:
        """Forget a place."""
        self._synced.pop(place, None)

    def rows(self, places: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Give the tokens of these places: int64 [B, longest], right-padded with 0."""
        width = max(map(len, tokens))
        self._grow(max(places) + 1, width)
        for place, row in zip(places, tokens, strict=True):
            start = self._synced.get(place, 0)
            if start < len(row):
                self._ids[place, start : len(row)] = torch.tensor(row[start:], device=self.device)
            if start == 0:
                self._ids[place, len(row) :] = 0
            self._synced[place] = len(row)
        return self._ids[list(places), :width]

    def _grow(self, places: int, width: int) -> None:
        old = self._ids
        if places > old.shape[0] or width > old.shape[1]:
            size = (max(places, old.shape[0]), max(2 * width, old.shape[1]))
            self._ids = torch.zeros(size, dtype=torch.int64, device=self.device)
            self._ids[: old.shape[0], : old.shape[1]] = old


class RoundContext:
    """`Context` of the rows of one round."""

    def __init__(
        self,
        rows: tuple[int, ...],
        places: tuple[int, ...],
        params: tuple[SamplingParams, ...],
        tokens: Sequence[Sequence[int]],
        buffer: TokenBuffer,
        rng: KeyedRng,
        process: Callable[[Tensor, Sequence[SamplingParams]], Tensor],
    ) -> None:
        self.rows, self.places, self.params, self.rng = rows, places, params, rng
        self.host_lengths = tuple(map(len, tokens))
        self._tokens, self._buffer, self._process = tokens, buffer, process

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    def row_tokens(self, i: int) -> Sequence[int]:
        return self._tokens[i]

    @cached_property
    def tokens(self) -> Tensor:
        return self._buffer.rows(self.places, self._tokens)

    @cached_property
    def lengths(self) -> Tensor:
        return torch.tensor(self.host_lengths, dtype=torch.int64, device=self.device)

    def distributions(self, logits: Tensor, paths: Tensor | None = None) -> Tensor:
        return self._process(logits, self.params)

    def for_rows(self, index: Sequence[int]) -> RoundContext:
        def pick(values: Sequence[object]) -> tuple[object, ...]:
            return tuple(values[i] for i in index)

        return RoundContext(
            pick(self.rows),  # type: ignore[arg-type]
            pick(self.places),  # type: ignore[arg-type]
            pick(self.params),  # type: ignore[arg-type]
            [self._tokens[i] for i in index],
            self._buffer,
            self.rng.for_rows(index),
            self._process,
        )
