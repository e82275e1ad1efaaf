"""What ended rows said, for drafts of later ones: the oldest goes when it is full."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence

from specdec_suffix.index import GAP, ContextIndex


class History:
    """Outputs of ended rows, each behind the end of its prompt, and an index of them.

    Args:
        capacity: most tokens it holds, ends of prompts and separators included; more than `longest` + 1.
        window: latest occurrences of a context that count.
        longest: most tokens that a match counts, and that are kept of a prompt.
    """

    def __init__(self, capacity: int, window: int, longest: int) -> None:
        self.index = ContextIndex(window, longest)
        self.changes = 0
        self.next_row = 0  # above the id of every row that it has seen
        self._capacity, self._longest = capacity, longest
        self._spans: deque[tuple[int, int]] = deque()  # positions: first of the output, and behind it

    @property
    def size(self) -> int:
        """Tokens it holds, ends of prompts and separators included."""
        return len(self.index.tokens) - 1

    def learn(self, text: Sequence[int], first: int) -> None:
        """Add the output of a row, which begins at text[first]; one that is too long loses its beginning."""
        first = max(first, len(text) - (self._capacity - self._longest - 1))
        before = text[max(first - self._longest, 0) : first]
        if first >= len(text):
            return
        self._drop_oldest(len(before) + len(text) - first + 1)
        for token in before:
            self.index.append(token)
        begin = self.index.end
        for token in text[first:]:
            self.index.add(token)
        self._spans.append((begin, self.index.end))
        self.index.append(GAP)
        self.changes += 1

    def sequences(self) -> Iterator[tuple[array[int], array[int]]]:
        """Give what stood before each output, and the output, the oldest first."""
        start, at = 1, self.index.at
        for first, stop in self._spans:
            yield self.index.tokens[start : at(first)], self.index.tokens[at(first) : at(stop)]
            start = at(stop) + 1

    def _drop_oldest(self, need: int) -> None:
        stop = None
        kept = self.size
        while self._spans and kept + need > self._capacity:
            first, stop = self._spans.popleft()
            self.index.forget(first, stop)
            kept = self.index.end - 1 - stop
        if stop is not None:
            self.index.drop(stop)
