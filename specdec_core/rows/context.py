"""What a drafter sees of the rows: `Context`, over the rows' tokens on the host and on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol, overload

import torch
from torch import Tensor

from specdec_core.contract.constraints import Walk
from specdec_core.contract.draft import on_device
from specdec_core.contract.rng import KeyedRng
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.sampling.history import History, RowFacts
from specdec_core.sampling.pipeline import processed
from specdec_core.sampling.processors import constrained


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
                self._ids[place, start : len(row)] = on_device(row[start:], self.device)
            if start == 0:
                self._ids[place, len(row) :] = 0
            self._synced[place] = len(row)
        if list(places) == list(range(len(places))):
            return self._ids[: len(places), :width].clone()  # a round keeps what it was given
        return self._ids.index_select(0, on_device(places, self.device))[:, :width]

    def _grow(self, places: int, width: int) -> None:
        old = self._ids
        if places > old.shape[0] or width > old.shape[1]:
            size = (max(places, old.shape[0]), max(2 * width, old.shape[1]))
            self._ids = torch.zeros(size, dtype=torch.int64, device=self.device)
            self._ids[: old.shape[0], : old.shape[1]] = old


class ReadOnly(Sequence[int]):
    """A list that only its owner may change; slices and sums are copies."""

    __slots__ = ("_items",)

    def __init__(self, items: list[int]) -> None:
        self._items = items

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        return self._items[at]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __eq__(self, other: object) -> bool:
        return self._items == (other._items if isinstance(other, ReadOnly) else other)

    def __add__(self, other: Iterable[int]) -> list[int]:
        return [*self._items, *other]

    def __repr__(self) -> str:
        return repr(self._items)


class ContextRow(Protocol):
    """What a context reads of a row."""

    id: int
    place: int
    prompt: tuple[int, ...]
    tokens: list[int]  # committed, prompt included
    params: SamplingParams
    eos: frozenset[int]
    walk: Walk | None  # of its constraint

    def fail(self, error: Exception) -> None:
        """End this row, and no other, with an error."""


class LaterRng:
    """A generator that is made when something is drawn: most greedy rounds draw nothing."""

    def __init__(self, make: Callable[[], KeyedRng]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Any:
        made = self._make()
        for method in ("bernoulli", "categorical", "target_draw", "child", "for_rows"):
            setattr(self, method, getattr(made, method))
        return getattr(made, name)


class RoundContext:
    """`Context` of the rows of one round; valid until they commit."""

    def __init__(
        self, members: Sequence[ContextRow], buffer: TokenBuffer, rng: Callable[[], KeyedRng]
    ) -> None:
        self._members, self._buffer, self._make_rng = members, buffer, rng
        self.rows = tuple(row.id for row in members)
        self.places = tuple(row.place for row in members)
        self.params = tuple(row.params for row in members)
        self.host_lengths = tuple(len(row.tokens) for row in members)

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    @cached_property
    def rng(self) -> KeyedRng:
        return self._make_rng()

    def row_tokens(self, i: int) -> Sequence[int]:
        return ReadOnly(self._members[i].tokens)

    @cached_property
    def tokens(self) -> Tensor:
        return self._buffer.rows(self.places, [row.tokens for row in self._members])

    @cached_property
    def lengths(self) -> Tensor:
        return on_device(self.host_lengths, self.device)

    def history(self, paths: Callable[[], Tensor] | None = None) -> History:
        """Give what was said before each index that is scored; see `History` for `paths`."""
        facts = [RowFacts(len(row.prompt), row.eos, row.walk, row.fail) for row in self._members]
        return History(facts, lambda: (self.tokens, self.lengths), paths)

    def legal(self, i: int, tokens: Sequence[int]) -> int:
        walk = self._members[i].walk
        return len(tokens) if walk is None else walk.legal(tokens)

    def forced(self, i: int, limit: int) -> list[int]:
        walk = self._members[i].walk
        return [] if walk is None else walk.forced(limit)

    def distributions(self, logits: Tensor, paths: Tensor | None = None) -> Tensor:
        history = self.history(None if paths is None else lambda: paths.unsqueeze(1))
        return processed(logits.unsqueeze(1), self.params, history).squeeze(1)

    def masked(self, scores: Tensor, paths: Tensor | None = None) -> Tensor:
        if all(row.walk is None for row in self._members):
            return scores
        history = self.history(None if paths is None else lambda: paths.unsqueeze(1))
        each = scores.unsqueeze(1)
        return constrained(each, each, history).squeeze(1)

    def for_rows(self, index: Sequence[int]) -> RoundContext:
        return RoundContext([self._members[i] for i in index], self._buffer, lambda: self.rng.for_rows(index))

    def for_member(self, name: str) -> RoundContext:
        return RoundContext(self._members, self._buffer, lambda: self.rng.child(name))
