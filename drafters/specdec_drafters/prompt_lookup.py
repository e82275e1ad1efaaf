"""Drafter `prompt_lookup`: what followed the last time these tokens stood here."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from pydantic import Field, model_validator

from specdec_core import RowDrafter, RowDrafterConfig, Rows, UsageError

# The chance that the token behind a match is right, by the length of the match: greedy output of
# SmolLM2-135M-Instruct for 21 prompts (copying, code, chat, maths, summary), 1,750 tokens.
_RIGHT = (0.16, 0.45, 0.62, 0.70, 0.80, 0.83, 0.88)
_RIGHT_FROM = ((32, 0.985), (16, 0.96), (8, 0.90))


class PromptLookupConfig(RowDrafterConfig):
    """Options of `prompt_lookup`."""

    num_tokens: int = Field(20, ge=0, description="most tokens to draft a round")
    max_ngram: int = Field(3, ge=1, description="longest suffix to look for")
    min_ngram: int = Field(1, ge=1, description="shortest suffix to look for")

    @model_validator(mode="after")
    def _ordered(self) -> PromptLookupConfig:
        if self.min_ngram > self.max_ngram:
            raise UsageError(
                f"min_ngram={self.min_ngram} is larger than max_ngram={self.max_ngram}; lower it"
            )
        return self


class PromptLookup(RowDrafter):
    """Draft the continuation of an earlier occurrence of the row's last tokens (Saxena 2023).

    Prompt and output are searched. The longest matching suffix wins, of max_ngram down to min_ngram tokens;
    among its earlier occurrences the most recent one. A continuation that runs into the end of the context
    goes on periodically. An index of n-grams grows with the row, so a round costs the same at any length.

    Scores follow from how far the match reaches back, beyond max_ngram too: each accepted token makes it
    longer.
    """

    name = "prompt_lookup"
    Config = PromptLookupConfig

    def __init__(self, config: PromptLookupConfig) -> None:
        super().__init__(config)
        self._sizes = range(config.max_ngram, config.min_ngram - 1, -1)
        self._index: dict[int, _NgramIndex] = {}
        self._matched: dict[int, int] = {}  # row -> tokens of its last match

    def admit(self, rows: Rows) -> None:
        """Start an index for each row."""
        for row in rows.ids:
            self._index[row] = _NgramIndex(self._sizes)

    def propose_for(self, row: int, tokens: Sequence[int], budget: int) -> list[int]:
        """Copy what followed the match."""
        start = self._index[row].find(tokens)
        if start is None:
            return []
        self._matched[row] = _match_length(tokens, start)
        period = len(tokens) - start
        return [tokens[start + i % period] for i in range(budget)]

    def scores_for(self, row: int, chain: Sequence[int]) -> Sequence[float]:
        """Guess from the length of the match."""
        return _scores(self._matched[row], len(chain))

    def release(self, rows: Sequence[int]) -> None:
        """Drop the rows' indices."""
        for row in rows:
            self._index.pop(row, None)
            self._matched.pop(row, None)


class _NgramIndex:
    """Where each n-gram of a row last ended, but for the row's own end."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> index behind its latest occurrence
        self._seen = 0  # n-grams that end before this index are in

    def find(self, tokens: Sequence[int]) -> int | None:
        """Give the index behind the latest earlier occurrence of the longest matching suffix."""
        end = len(tokens)
        for stop in range(self._seen + 1, end):  # the suffix itself, which ends at `end`, stays out
            for n in self._sizes:
                if n <= stop:
                    self._ends[tuple(tokens[stop - n : stop])] = stop
        self._seen = max(self._seen, end - 1)
        for n in self._sizes:
            found = self._ends.get(tuple(tokens[end - n : end])) if n <= end else None
            if found is not None:
                return found
        return None


def _match_length(tokens: Sequence[int], start: int) -> int:
    """Count the tokens before `start` that equal the last ones, as far as it matters."""
    most = min(start, _RIGHT_FROM[0][0])
    return next((n for n in range(most) if tokens[start - 1 - n] != tokens[-1 - n]), most)


@functools.cache  # few lengths come up, and each of them in many rounds
def _scores(matched: int, length: int) -> tuple[float, ...]:
    """Guess the chance of all tokens up to each, behind a match of this length."""
    return tuple(accumulate((_right(matched + i) for i in range(length)), mul))


def _right(matched: int) -> float:
    """Guess the chance of the token behind a match of this length."""
    return next((chance for least, chance in _RIGHT_FROM if matched >= least), _RIGHT[min(matched, 7) - 1])
