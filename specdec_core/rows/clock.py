"""Where the time of a session goes, without making the device wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Clock:
    """Times parts of a round: by the host's clock on a CPU, by CUDA events on a GPU.

    It goes while somebody decodes, and stands still in between.

    Events are read in `collect`, after the round's one host transfer. Those behind it may not have passed
    yet: they are left for the next call.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._cuda = device, device.type == "cuda"
        self._open: list[tuple[str, Any, Any]] = []
        self._before = 0.0  # seconds it has gone, up to when it stood still last
        self._since: float | None = None  # when it began to go

    @property
    def now(self) -> float:
        """Seconds it has gone."""
        since = self._since  # another thread may stop it meanwhile
        return self._before + (0.0 if since is None else time.perf_counter() - since)

    def read(self) -> float:
        """Give `now`, for who keeps a way to look."""
        return self.now

    @contextmanager
    def going(self) -> Iterator[None]:
        """Let it go."""
        self._since = time.perf_counter()
        try:
            yield
        finally:
            self._before, self._since = self.now, None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time a part of the round."""
        start = self._mark()
        try:
            yield
        finally:
            self._open.append((name, start, self._mark()))

    def collect(self) -> dict[str, float]:
        """Give the seconds of each part that has ended since the last call."""
        seconds: dict[str, float] = {}
        waiting = []
        for name, start, end in self._open:
            if self._cuda and not end.query():
                waiting.append((name, start, end))
                continue
            took = start.elapsed_time(end) / 1000 if self._cuda else end - start
            seconds[name] = seconds.get(name, 0.0) + took
        self._open = waiting
        return seconds

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
