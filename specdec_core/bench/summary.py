"""From units to figures: what each method did in each category, at one batch size and temperature."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from specdec_core.bench.methods import PLAIN, Run
from specdec_core.bench.statistics import Interval, bootstrap, typical_ratio

ALL = "all"

Runs = dict[str, list[Run]]
"""Of each group of prompts, the run of each repeat."""


@dataclass(frozen=True)
class Figures:
    """What one method did with some prompts.

    Counts are those of all repeats together; seconds are each prompt's median times the repeats.
    """

    method: str
    prompts: int
    repeats: int
    new_tokens: int
    seconds: float
    speedup: Interval
    decode_speedup: (
        float | None
    )  # what stands behind the prompts; None: one of the two does not tell it apart
    same_ids: int  # prompts whose ids are the baseline's in every repeat
    forwards: int | None
    rounds: int
    drafted: int
    accepted: int
    acceptance_by_depth: list[float] | None
    decode_by_depth: list[float] | None  # the same behind the prompts' own rounds
    widths: dict[int, int]
    block_rows: int
    first_tokens: int | None
    prefill_seconds: float | None
    draft_seconds: float | None
    target_seconds: float | None

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows over seconds."""
        return self.new_tokens / self.seconds

    @property
    def decode_tokens_per_second(self) -> float | None:
        """The same behind the prompts' own rounds; None where that is not known, or there is nothing."""
        if self.prefill_seconds is None or self.first_tokens in (None, self.new_tokens):
            return None
        return (self.new_tokens - (self.first_tokens or 0)) / (self.seconds - self.prefill_seconds)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted over rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def mean_drafted(self) -> float | None:
        """Drafted tokens a round."""
        return self.drafted / self.rounds if self.rounds else None

    @property
    def decode_forwards(self) -> int:
        """Forwards behind the prompts."""
        return sum(self.widths.values())

    @property
    def other_seconds(self) -> float:
        """What is in no part that was timed."""
        parts = (self.prefill_seconds, self.draft_seconds, self.target_seconds)
        return max(self.seconds - sum(part or 0.0 for part in parts), 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Give what the report says, all figures by name; counts and seconds are those of one repeat."""
        return {
            "method": self.method,
            "prompts": self.prompts,
            "new_tokens": self._each(self.new_tokens),
            "seconds": self.seconds / self.repeats,
            "tokens_per_second": self.tokens_per_second,
            "speedup": self.speedup.value,
            "speedup_low": self.speedup.low,
            "speedup_high": self.speedup.high,
            "decode_tokens_per_second": self.decode_tokens_per_second,
            "decode_speedup": self.decode_speedup,
            "same_ids": self.same_ids,
            "forwards": None if self.forwards is None else self._each(self.forwards),
            "forwards_per_token": None if self.forwards is None else self.forwards / self.new_tokens,
            "rounds": self._each(self.rounds),
            "drafted": self._each(self.drafted),
            "accepted": self._each(self.accepted),
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "mean_drafted": self.mean_drafted,
            "acceptance_by_depth": self.acceptance_by_depth,
            "widths": {str(width): self._each(count) for width, count in sorted(self.widths.items())},
            **{part: None if seconds is None else seconds / self.repeats for part, seconds in self._parts()},
        }

    def _parts(self) -> list[tuple[str, float | None]]:
        names = ("prefill_seconds", "draft_seconds", "target_seconds", "other_seconds")
        return [(name, getattr(self, name)) for name in names]

    def _each(self, count: int) -> float:
        """Give a count of one repeat: a whole number, unless repeats differ, as samples do without a seed."""
        return count // self.repeats if count % self.repeats == 0 else count / self.repeats


def summarize(units: Sequence[dict[str, Any]], method: str, baseline: str) -> Figures:
    """Sum up units of one batch size and temperature: all of them, whatever their categories.

    The speed-up is that of tokens a second over the baseline's, run by run.
    """
    categories: dict[str, list[dict[str, Any]]] = {}
    for unit in units:
        categories.setdefault(unit["category"], []).append(unit)
    strata = [_ratios(own, method, baseline, _rate) for own in categories.values()]
    runs, base = _runs(units, method), _runs(units, baseline)
    every = [run for repeats in runs.values() for run in repeats]
    return Figures(
        method=method,
        prompts=sum(len(repeats[0].token_ids) for repeats in runs.values()),
        repeats=len(every) // len(runs),
        new_tokens=sum(run.new_tokens for run in every),
        seconds=_median_seconds(runs, "seconds") or 0.0,
        speedup=bootstrap(strata),
        same_ids=sum(_same(runs[group], base[group]) for group in runs),
        decode_speedup=_decode_speedup(list(categories.values()), method, baseline),
        forwards=_known_sum(run.forwards for run in every),
        rounds=sum(run.rounds for run in every),
        drafted=sum(run.drafted for run in every),
        accepted=sum(run.accepted for run in every),
        acceptance_by_depth=_by_depth([run.histogram for run in every]),
        decode_by_depth=_by_depth([_decode_histogram(run) for run in every]),
        widths=dict(_added(run.widths for run in every)),
        block_rows=sum(run.block_rows for run in every),
        first_tokens=_known_sum(run.first_tokens for run in every),
        prefill_seconds=_median_seconds(runs, "prefill_seconds"),
        draft_seconds=_median_seconds(runs, "draft_seconds"),
        target_seconds=_median_seconds(runs, "target_seconds"),
    )


def one_token_seconds(figures: Figures) -> float | None:
    """Read t_v(1) off what plain decoding did: seconds of a forward over one token a row."""
    if figures.method != PLAIN or not figures.decode_forwards or figures.target_seconds is None:
        return None
    return figures.target_seconds / figures.decode_forwards


def _runs(units: Iterable[dict[str, Any]], method: str) -> Runs:
    runs: Runs = {}
    for unit in sorted(units, key=lambda unit: int(unit["repeat"])):
        runs.setdefault(unit["group"], []).append(Run.of(unit["runs"][method]))
    return runs


def _ratios(
    units: Iterable[dict[str, Any]], method: str, baseline: str, rate: Callable[[Run], float]
) -> list[list[float]]:
    ratios: dict[str, list[float]] = {}
    for unit in units:
        run, base = (Run.of(unit["runs"][name]) for name in (method, baseline))
        ratios.setdefault(unit["group"], []).append(rate(run) / rate(base))
    return list(ratios.values())


def _rate(run: Run) -> float:
    """Tokens a second."""
    return run.new_tokens / run.seconds


def _decode_rate(run: Run) -> float:
    """Tokens a second behind the prompts' own rounds; 0 where that is not known, or there are none."""
    if run.prefill_seconds is None or run.first_tokens is None:
        return 0.0
    return (run.new_tokens - run.first_tokens) / (run.seconds - run.prefill_seconds)


def _decode_speedup(
    categories: Sequence[Sequence[dict[str, Any]]], method: str, baseline: str
) -> float | None:
    """Compare what stands behind the prompts, where both tell it in every run."""
    runs = [Run.of(unit["runs"][name]) for own in categories for unit in own for name in (method, baseline)]
    if not all(_decode_rate(run) for run in runs):
        return None
    return typical_ratio([_ratios(own, method, baseline, _decode_rate) for own in categories])


def _known_sum(values: Iterable[int | None]) -> int | None:
    """Add up; None where one is not known."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def _median_seconds(runs: Runs, part: str) -> float | None:
    """Add up each group's median times its repeats; None where a part was not timed."""
    total = 0.0
    for repeats in runs.values():
        values = [getattr(run, part) for run in repeats]
        if None in values:
            return None
        total += statistics.median(values) * len(values)
    return total


def _same(runs: Sequence[Run], base: Sequence[Run]) -> int:
    """Count the prompts of a group whose ids agree in every repeat."""
    rows = range(len(base[0].token_ids))
    pairs = list(zip(runs, base, strict=True))
    return sum(all(a.token_ids[row] == b.token_ids[row] for a, b in pairs) for row in rows)


def _by_depth(histograms: Sequence[list[int] | None]) -> list[float] | None:
    """Pool histograms: share of their rounds that accepted a token at depth 1, 2, ..."""
    pooled: list[int] = []
    for histogram in histograms:
        if histogram is None:
            return None
        pooled = [a + b for a, b in zip_longest(pooled, histogram, fillvalue=0)]
    rounds = sum(pooled)
    return [sum(pooled[depth:]) / rounds for depth in range(1, len(pooled))] if rounds else []


def _decode_histogram(run: Run) -> list[int] | None:
    """Give the rounds behind the prompts' own, by tokens accepted."""
    if run.histogram is None:
        return None
    return [a - b for a, b in zip_longest(run.histogram, run.first_histogram or [], fillvalue=0)]


def _added(counts: Iterable[dict[int, int]]) -> Counter[int]:
    total: Counter[int] = Counter()
    for one in counts:
        total.update(one)
    return total
