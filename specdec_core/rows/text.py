"""A row's text as it grows: complete characters only, cut where the first stop string completes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec_core.rows.detokenizer import Detokenizer


class RowText:
    """Follows one row token by token, so that a stop string is found wherever a block puts it.

    Of several stop strings the one that completes first in the text wins; of those that complete together,
    the longest. It is left out of the text unless `include_stop`. One that completes before `least` tokens
    are there is not a stop.
    """

    def __init__(
        self, tokenizer: Any, stops: Sequence[str] = (), *, include_stop: bool = False, least: int = 0
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops, self._include, self._least = stops, include_stop, least
        self._tokens = 0
        self._shown = 0
        self.text = ""
        self.stopped = False

    def add(self, tokens: Sequence[int]) -> int:
        """Take committed tokens; return how many, fewer than given where a stop string completes."""
        if not self._stops:
            self._tokens += len(tokens)
            self.text += self._detokenizer.add(tokens)
            return len(tokens)
        for i, token in enumerate(tokens):
            self._tokens += 1
            known = len(self.text)
            self.text += self._detokenizer.add([token])
            if self._tokens >= self._least and self._ends(known):
                return i + 1
        return len(tokens)

    def take(self) -> str:
        """Give the text that may be shown by now: what may yet become a stop string is held back."""
        held = 0 if self.stopped else max((_overlap(self.text, stop) for stop in self._stops), default=0)
        return self._show(len(self.text) - held)

    def finish(self) -> str:
        """Give all that is left to show; the row has ended."""
        if not self.stopped:
            self.text += self._detokenizer.finish()
        return self._show(len(self.text))

    def _show(self, end: int) -> str:
        chunk = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return chunk

    def _ends(self, known: int) -> bool:
        """Find the first stop string that completes behind `known` characters, and cut the text there."""
        found = []
        for stop in self._stops:
            start = self.text.find(stop, max(known - len(stop) + 1, 0))
            if start >= 0:
                found.append((start + len(stop), start))
        if found:
            end, start = min(found)
            self.text = self.text[: end if self._include else start]
            self.stopped = True
        return self.stopped


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters are the beginning of a stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
