"""Ids to text as they come: chunks are valid text, and joined they are the final text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"  # what a tokenizer prints for bytes of a character that is not complete
_OVERLAP = 8  # tokens decoded again, so that spaces between tokens come out as in the whole text


class Detokenizer:
    """Decodes one row; holds back bytes of a character until it is complete."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # where decoding begins: a few tokens before what is not shown yet
        self._shown_ids = 0
        self._ahead = 0  # characters shown beyond those of `_shown_ids`: before half a character

    def add(self, ids: Sequence[int]) -> str:
        """Take committed ids; return the text that is complete with them."""
        self._ids += ids
        shown = len(self._decode(self._ids[self._start : self._shown_ids])) + self._ahead
        text = self._decode(self._ids[self._start :])
        if text.endswith(_UNFINISHED):
            chunk = text.rstrip(_UNFINISHED)[shown:]
            self._ahead += len(chunk)
            return chunk
        return self._advance(text[shown:]) if len(text) > shown else ""

    def finish(self) -> str:
        """Return what was held back, complete or not."""
        shown = len(self._decode(self._ids[self._start : self._shown_ids])) + self._ahead
        return self._advance(self._decode(self._ids[self._start :])[shown:])

    def _advance(self, chunk: str) -> str:
        self._shown_ids, self._ahead = len(self._ids), 0
        self._start = max(self._shown_ids - _OVERLAP, 0)
        while self._start and self._decode(self._ids[self._start : self._shown_ids]).startswith(_UNFINISHED):
            self._start -= 1
        return chunk

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
