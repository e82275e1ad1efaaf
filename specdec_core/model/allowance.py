"""How much memory the caches of a target and of its drafters' models may take together."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet


class Sized(Protocol):
    """A cache that can be told to take no more than its rows need."""

    @property
    def bytes_now(self) -> int:
        """Bytes that it takes."""

    def tighten(self) -> None:
        """Take what the rows that are there need, and no more."""


class Allowance:
    """A limit for caches that each take more than they need, as long as all of them have it.

    Spare slots save moving buffers, and what ended rows have left there saves feeding it again. Where these
    would make the caches outgrow the limit, all of them give up what is spare. What rows need is theirs,
    whatever the limit: whoever admits them has asked before (`Target.bytes_after`).
    """

    def __init__(self) -> None:
        self.most: int | None = None  # bytes; None: there is no limit
        # Weak: buffers go with their runner, not when somebody looks for cycles.
        self._caches: WeakSet[Sized] = WeakSet()

    def join(self, cache: Sized) -> None:
        """Let one more cache share the limit."""
        self._caches.add(cache)

    @property
    def bytes_now(self) -> int:
        """Bytes that all of them take."""
        return sum(cache.bytes_now for cache in self._caches)

    def lacks(self, more: int) -> bool:
        """Whether so many bytes more would be beyond the limit."""
        return self.most is not None and self.bytes_now + more > self.most

    def tighten(self) -> None:
        """Let no cache keep more than its rows need."""
        for cache in list(self._caches):
            cache.tighten()
