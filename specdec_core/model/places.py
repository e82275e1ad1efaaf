"""Where the row of each place lies in a cache, and how large that cache is.

A row keeps its place for life, and plugins index tensors of their own by it. In the buffers it lies at an
index: the lowest that is free when it comes. A forward reads a range of indices, so rows that have left cost
as much as those between or above them; such a row is moved down then. It trades places with what an ended
row has left, which later rows may begin with.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from specdec_core.model.allowance import Allowance
from specdec_core.model.cache import SlotCache, rounded
from specdec_core.model.prefixes import Prefixes
from specdec_core.model.shapes import rows_up

# Moving buffers is a copy of them all, and drops captured graphs. What one admission in this many needs is
# kept ready, and buffers up to this many times as large are left as they are.
_REMEMBERED, _SPARE = 16, 2


class Places:
    """The places of one cache: of a runner, and of those that borrow it.

    Args:
        fixed: rows are fed in numbers from a short list; buffers have a place for each.
        max_rows: places are fewer than this; None: no limit is known.
    """

    def __init__(
        self, prefixes: Prefixes, allowance: Allowance, *, fixed: bool, max_rows: int | None
    ) -> None:
        self.cache, self.prefixes = SlotCache(), prefixes
        self._allowance, self._fixed, self._max_rows = allowance, fixed, max_rows
        allowance.join(self)
        self._index: dict[int, int] = {}  # place -> where in the buffers
        self._needs: dict[int, int] = {}  # place -> slots that its row may fill
        self._filled: dict[int, int] = {}  # place -> slots that were written since its row came, at most
        self._recent: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)  # places, slots

    def at(self, places: Sequence[int]) -> list[int]:
        """Give the index of each place."""
        return [self._index[place] for place in places]

    def admit(self, needs: Mapping[int, int], most: int | None) -> None:
        """Begin rows that may fill so many slots, by place; see `SlotCache.grown` for `most`."""
        for place, slots in needs.items():
            if place not in self._index:
                self._index[place] = self._free()
            self._needs[place], self._filled[place] = slots, 0
        self._recent.append((len(self._index), max(needs.values(), default=0)))
        self._fit(most)

    def widen(self, needs: Mapping[int, int], most: int | None) -> None:
        """Let rows that were admitted fill more slots."""
        for place, slots in needs.items():
            self._needs[place] = max(self._needs[place], slots)
        if self._recent:
            places, slots = self._recent[-1]
            self._recent[-1] = places, max(slots, *needs.values(), 0)
        self._fit(most)

    def release(self, places: Sequence[int]) -> None:
        """Free the indices of these places; what lies there stays."""
        for place in places:
            for known in (self._index, self._needs, self._filled):
                known.pop(place, None)
        if not self._index:
            self._fit(None)

    def wrote(self, place: int, end: int) -> None:
        """Note that slots below `end` may be written."""
        self._filled[place] = max(self._filled[place], end)

    def gather(self, members: Sequence[int], fixed: bool) -> None:
        """Move rows down to indices that are free, if fewer rows are fed then for these members."""
        if self._end() == len(self._index):
            return
        moved = self._gathered()
        if self._fed([moved[place] for place in members], fixed) < self._fed(self.at(members), fixed):
            self._move(moved)

    @property
    def bytes_now(self) -> int:
        """Bytes that the buffers take, or will once something is fed."""
        return self.cache.slot_bytes * self.cache.places * self.cache.slots

    def bytes_for(self, rows: int, slots: int) -> int:
        """Bytes that so many rows need, each of which may fill so many slots; 0 where nobody knows."""
        return self.cache.slot_bytes * self._rows(rows) * rounded(slots)

    def tighten(self) -> None:
        """Take what the rows that are there need, and no more."""
        self._resize(self._rows(len(self._index)), rounded(max(self._needs.values(), default=0)))

    def _fit(self, most: int | None) -> None:
        """Grow where rows need it; shrink where neither they nor those before them do, by far."""
        slots = max(self._needs.values(), default=0)
        places, wide = self.cache.grown(self._rows(self._end()), slots, most)
        fewer = min(places, self._rows(max([len(self._index), *(count for count, _ in self._recent)])))
        narrow = min(wide, rounded(max([slots, *(need for _, need in self._recent)])))
        if places * wide > _SPARE * fewer * narrow:
            places, wide = fewer, narrow
        if self._allowance.lacks(self.cache.slot_bytes * places * wide - self.bytes_now):
            self._allowance.tighten()  # of this cache too
        else:
            self._resize(places, wide)

    def _resize(self, places: int, slots: int) -> None:
        if places < self._end():
            self._move(self._gathered())
        if places < self.cache.places or slots < self.cache.slots:
            self.prefixes.cut(places, slots - 1)
        self.cache.resize(places, slots)

    def _end(self) -> int:
        """Give the highest index that is taken, and one."""
        return max(self._index.values(), default=-1) + 1

    def _free(self) -> int:
        taken = set(self._index.values())
        return next(index for index in itertools.count() if index not in taken)

    def _rows(self, rows: int) -> int:
        return rows_up(rows, self._max_rows) if self._fixed else rows

    def _fed(self, index: Sequence[int], fixed: bool) -> int:
        """Count the rows of a forward over the rows at these indices."""
        return rows_up(max(index) + 1, self._max_rows) if fixed else max(index) + 1 - min(index)

    def _gathered(self) -> dict[int, int]:
        """Say where the row of each place lies once there is no gap."""
        rows = len(self._index)
        free = iter(sorted({*range(rows)}.difference(self._index.values())))
        by_index = sorted(self._index.items(), key=lambda item: item[1])
        return {place: index if index < rows else next(free) for place, index in by_index}

    @torch.no_grad()
    def _move(self, target: Mapping[int, int]) -> None:
        """Let rows trade places with what lies at free indices."""
        for place, to in target.items():
            at = self._index[place]
            if at == to:
                continue
            count = max(self._filled[place], self.prefixes.length(at), self.prefixes.length(to))
            self.cache.swap(at, to, count)
            self.prefixes.swap(at, to)
            self._index[place] = to
