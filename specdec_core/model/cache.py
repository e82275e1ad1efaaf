"""A key-value cache of fixed slots: written in place, forgotten by length, never concatenated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from specdec_core.contract.draft import on_device

_ROUND_TO = 64  # slots are reserved in these steps


class SlotCache(Cache):
    """One buffer a layer and side, [places, heads, slots, width].

    A row's committed tokens lie contiguous from slot 0 of its place. The last slot of every place takes
    what padding writes; nothing ever attends to it. `aim` says where the next forward writes and how far
    it sees. Places here are indices of the buffers; which row lies at which one, `Places` knows.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.places = 0
        self.slots = 1
        self.moves = 0  # how often buffers were replaced
        self.likely_bytes = 0  # `slot_bytes` of a model that has fed nothing, where a probe has found it
        self._measured = 0, 0  # layers, and what a slot of theirs takes
        self._first, self._rows = 0, 1  # places of the forward
        self._slots: Tensor | None = None  # int64 [B, T]: where each column writes
        self._row: Tensor | None = None  # int64 [B, 1] or [B, T]: in which of those places
        self._view = 0  # how many slots attention sees
        self._span: tuple[int, int] | None = None  # one row without padding: columns lie in this range

    def __len__(self) -> int:
        return len(self.keys)

    def __bool__(self) -> bool:
        return True  # an empty cache must not look like no cache

    @property
    def trash(self) -> int:
        """The slot that takes what padding writes."""
        return self.slots - 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot of one place, in all layers; 0 as long as nobody knows."""
        if self._measured[0] != len(self):
            sizes = (x.shape[1] * x.shape[3] * x.element_size() for x in (*self.keys, *self.values))
            self._measured = len(self), sum(sizes)
        return max(self._measured[1], self.likely_bytes)

    def grown(self, places: int, slots: int, most: int | None = None) -> tuple[int, int]:
        """Give sizes that have room for this many places and slots, and for all that there is.

        Slots grow by half at least, so that ever longer rows move them a few times only; never beyond
        `most`, if nobody will ask for more than that.
        """
        places, needed = max(places, self.places), rounded(slots)
        if needed > self.slots and self.places:
            ample = rounded(self.slots + self.slots // 2)
            needed = max(needed, ample if most is None else min(ample, rounded(most)))
        return places, max(needed, self.slots)

    def resize(self, places: int, slots: int) -> None:
        """Make the buffers this large; what lies beyond is lost."""
        if (places, slots) == (self.places, self.slots):
            return
        self.moves += 1
        for buffers in (self.keys, self.values):
            for i, buffer in enumerate(buffers):  # one by one: each old one is freed before the next is made
                buffers[i] = self._resized(buffer, places, slots)
        self.places, self.slots = places, slots

    def aim(
        self,
        first: int,
        rows: int,
        view: int,
        slots: Tensor | None = None,
        row: Tensor | None = None,
        span: tuple[int, int] | None = None,
    ) -> None:
        """Point the next forward at places first, ..., first + rows - 1, of which it sees `view` slots.

        Args:
            slots: int64 [B, T], where each column writes.
            row: int64 [B, T], and in which of the places; None: B are the rows, and each has its own.
            span: the range of slots that one row without padding fills; then the others are not read.
        """
        self._first, self._rows, self._view = first, rows, view
        self._slots, self._row, self._span = slots, row, span
        if slots is not None and row is None:
            self._row = torch.arange(rows, device=slots.device)[:, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new states [B, heads, T, width]; return views of all it may attend to, by place."""
        while len(self.keys) <= layer_idx:
            # zeros: what was never written is masked, and 0 * garbage could be NaN
            self.keys.append(self._buffer(key_states))
            self.values.append(self._buffer(value_states))
        last = self._first + self._rows
        keys = self.keys[layer_idx][self._first : last]
        values = self.values[layer_idx][self._first : last]
        if self._span is not None:
            keys[:, :, self._span[0] : self._span[1]] = key_states
            values[:, :, self._span[0] : self._span[1]] = value_states
        else:
            assert self._slots is not None
            assert self._row is not None
            slots, row = self._slots.to(keys.device), self._row.to(keys.device)
            keys[row, :, slots] = key_states.transpose(1, 2)
            values[row, :, slots] = value_states.transpose(1, 2)
        return keys[:, :, : self._view], values[:, :, : self._view]

    def move(self, places: list[int], source: list[list[int]], target: list[list[int]]) -> None:
        """Copy slots of each place, all at once: source and target are [rows][moves], of any lengths."""
        width = max(map(len, source))
        pad = [self.trash] * width
        padded = [[*row, *pad][:width] for row in source + target]
        index: dict[torch.device, tuple[Tensor, Tensor]] = {}  # a model may lie on several devices
        for buffer in (*self.keys, *self.values):
            if buffer.device not in index:
                rows = on_device(places, buffer.device).unsqueeze(1)
                index[buffer.device] = rows, on_device(padded, buffer.device)
            row, at = index[buffer.device]
            buffer[row, :, at[len(places) :]] = buffer[row, :, at[: len(places)]]

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first `count` slots of one place to another."""
        for buffer in (*self.keys, *self.values):
            buffer[target, :, :count] = buffer[source, :, :count]

    def swap(self, a: int, b: int, count: int) -> None:
        """Exchange the first `count` slots of two places."""
        for buffer in (*self.keys, *self.values):
            one, other = buffer[a, :, :count], buffer[b, :, :count]
            before = one.clone()
            one.copy_(other)
            other.copy_(before)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tell models that ask; they are always given explicit positions and a 4D mask."""
        return self._view

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._view, 0

    def _buffer(self, states: Tensor) -> Tensor:
        return states.new_zeros((self.places, states.shape[1], self.slots, states.shape[3]))

    @staticmethod
    def _resized(buffer: Tensor, places: int, slots: int) -> Tensor:
        made = buffer.new_zeros((places, buffer.shape[1], slots, buffer.shape[3]))
        both = min(places, buffer.shape[0]), min(slots, buffer.shape[2])
        made[: both[0], :, : both[1]] = buffer[: both[0], :, : both[1]]
        return made


def rounded(slots: int) -> int:
    """Round up to what is reserved, with one more slot for the trash."""
    return -(-(slots + 1) // _ROUND_TO) * _ROUND_TO
