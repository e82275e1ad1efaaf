"""What a round costs: measured as rounds go by, and guessed where nothing was measured yet.

The cost of a round that checks m columns of drafts, those of all rows together, is t(rows, m) = t(rows, 0)
(1 + e(rows, m)). The excess e starts from a curve of the device and the dtype, over the tokens of the whole
block; one factor fits that curve to all that was measured, and what was measured at a size counts there more
than the curve.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import itemgetter

_KEPT = 9  # latest timings of each shape
_PAST = 2  # timings that an earlier call counts for
_FADING = 0.95  # of what the factor remembers, with each timing
_NOISE = 0.05  # of a timing, relative
_OFF = 0.4  # how far off the fitted curve a size may be, as a share of its excess
_OFF_AT_LEAST = 0.01  # and of a round
_UNEVEN = 0.03  # of a round, what a block takes in which rows differ
_DRAFT_STEP = 0.15  # of a drafting step, in rounds without a draft, before one was timed


@dataclass(frozen=True)
class CostCurve:
    """Cost of a forward over so many tokens, relative to one; straight between points, and behind them."""

    points: tuple[tuple[int, float], ...]
    slope: float  # behind the last point, for each token

    def __call__(self, tokens: int) -> float:
        """Give the cost of a block of so many tokens, all rows together."""
        last, cost = self.points[-1]
        if tokens >= last:
            return cost + self.slope * (tokens - last)
        at = bisect_right([count for count, _ in self.points], tokens)
        (low, below), (high, above) = self.points[at - 1], self.points[at]
        return below + (above - below) * (tokens - low) / (high - low)

    @classmethod
    def of(cls, device: str, *, wide: bool, packed: bool) -> CostCurve:
        """Guess by the device's type, and whether the weights are `wide`: float32 or wider; or packed."""
        if device != "cpu":
            return GPU
        if packed:
            return CPU_PACKED
        return CPU_FLOAT32 if wide else CPU_HALF


# SmolLM2-135M-Instruct on a CPU (packed: one thread), and Qwen3 shapes on one H200: docs/decisions/0012.
CPU_PACKED = CostCurve(((1, 1.0), (5, 1.02), (7, 1.15), (12, 1.4), (20, 1.88)), slope=0.056)
CPU_FLOAT32 = CostCurve(((1, 1.0), (4, 1.67), (8, 2.0)), slope=0.08)
CPU_HALF = CostCurve(((1, 1.0), (4, 1.08), (8, 1.13)), slope=0.02)
GPU = CostCurve(((1, 1.0), (4, 1.08), (64, 1.18)), slope=0.003)


class RoundCosts:
    """Timings of rounds by rows and drafted columns, and of drafting by rows and depth.

    They tell of the machine and of the models, and of nothing that was said: a decoder keeps them between
    calls. Of an earlier call only proportions count, for its contexts may have been of another length.

    Args:
        curve: what is believed before anything was timed.
        warm_up: timings of each new shape to leave out: captured shapes cost much more at first.
        ragged: whether rows of a block may differ in width; else it is the rectangle around them.
    """

    def __init__(self, curve: CostCurve, warm_up: int = 0, *, ragged: bool = False) -> None:
        self.curve, self.warm_up, self.ragged = curve, warm_up, ragged
        self._rounds: dict[int, dict[int, deque[float]]] = {}  # rows -> drafted -> seconds
        self._past: dict[int, dict[int, float]] = {}  # rows -> drafted -> seconds, of earlier calls
        self._seen: dict[tuple[int, int], int] = {}
        self._most = 0  # drafted columns, in units of `_unit`, of the largest round that was ever timed
        self._steps: dict[int, deque[float]] = {}  # rows -> seconds of a drafting step
        self._fits: dict[int, _Fit] = {}
        self._above = self._below = 0.0  # least squares: measured over guessed excess, whatever the rows

    def begin(self) -> None:
        """Begin a call."""
        for rows, times in self._rounds.items():
            typical = {size: seconds for size, (seconds, _) in _rising(times).items()}
            fit = self._fit(rows)
            typical[0] = fit.plain
            known = self._past.get(rows, {})
            scale = fit.plain / known[0] if known else 1.0
            self._past[rows] = {size: seconds * scale for size, seconds in known.items()} | typical
        self._rounds.clear()
        self._fits.clear()

    def add(self, rows: int, drafted: int, seconds: float) -> None:
        """Note the seconds of a round without its drafting; drafted: columns of nodes, all rows together."""
        seen = self._seen[rows, drafted] = self._seen.get((rows, drafted), 0) + 1
        if seen <= self.warm_up or seconds <= 0:
            return
        if drafted:
            guess, excess = self._excess(rows, drafted), max(seconds / self._fit(rows).plain - 1.0, 0.0)
            weight = _weight(guess)
            self._above = _FADING * self._above + weight * guess * min(excess, 3.0)
            self._below = _FADING * self._below + weight * guess**2
        self._most = max(self._most, drafted // self._unit(rows))
        of_rows = self._rounds.setdefault(rows, {})
        of_rows.setdefault(drafted, deque(maxlen=_KEPT)).append(seconds)
        self._fits.clear()

    def add_draft(self, rows: int, depth: int, seconds: float) -> None:
        """Note the seconds that drafting to a depth took."""
        self._steps.setdefault(rows, deque(maxlen=_KEPT)).append(seconds / depth)

    def round(self, rows: int, drafted: int) -> float:
        """Expect the seconds of a round without its drafting."""
        return self._fit(rows).seconds(drafted)

    def timed(self, rows: int) -> int:
        """Give the columns of the largest draft that was ever timed, in a block of so many rows."""
        return self._most * self._unit(rows)

    def _unit(self, rows: int) -> int:
        return 1 if self.ragged else rows

    def beside_prompts(self, rows: int, drafted: int) -> float:
        """Expect what a draft adds to a round in which prompts are read, in place of what it adds to others.

        Such a block is large already: every token of it costs what one behind the curve's last point does.
        """
        return self.round(rows, 0) * (1.0 + drafted * self.curve.slope / self.curve(rows))

    def hoped(self, rows: int, drafted: int) -> float:
        """Expect the seconds of such a round if a block cost but a fifth of what is believed."""
        plain = self.round(rows, 0)
        return plain + 0.2 * (self.round(rows, drafted) - plain)

    def draft(self, rows: int, depth: int) -> float:
        """Expect the seconds of drafting to a depth."""
        known = self._nearest(self._steps, rows)
        if known is None:
            return _DRAFT_STEP * self.round(rows, 0) * depth
        return _typical(self._steps[known]) * depth

    def _fit(self, rows: int) -> _Fit:
        if rows not in self._fits:
            self._fits[rows] = self._fitted(rows)
        return self._fits[rows]

    def _fitted(self, rows: int) -> _Fit:
        times, past = _rising(self._rounds.get(rows, {})), self._past.get(rows, {})
        known = self._nearest({**self._past, **self._rounds}, rows)
        others = (self._above + _NOISE**2) / (self._below + _NOISE**2)
        if 0 in times:
            plain = times[0][0]
        elif times:
            size, (seconds, _) = min(times.items())
            believed = past[size] / past[0] if size in past else 1.0 + others * self._excess(rows, size)
            plain = seconds / believed
        elif past:
            plain = past[0]
        elif known is not None:
            plain = self._fit(known).plain * self.curve(rows) / self.curve(known)
        else:
            plain = self.curve(rows)
        found = {size: (seconds / past[0] - 1.0, _PAST) for size, seconds in past.items()}
        found |= {size: (max(seconds / plain - 1.0, 0.0), count) for size, (seconds, count) in times.items()}
        found.pop(0, None)
        return _Fit(self, rows, plain, others, found)

    def _excess(self, rows: int, drafted: int) -> float:
        uneven = _UNEVEN if self.ragged and rows > 1 and drafted else 0.0
        return self.curve(rows + drafted) / self.curve(rows) - 1.0 + uneven

    @staticmethod
    def _nearest(of: Iterable[int], rows: int) -> int | None:
        """Give the measured number of rows that is nearest in proportion."""
        return min(of, key=lambda known: max(known / rows, rows / known), default=None)


class _Fit:
    """The costs of one number of rows, as far as they are known.

    found: drafted -> measured excess, and timings. others: the factor that other numbers of rows suggest.
    """

    def __init__(
        self, costs: RoundCosts, rows: int, plain: float, others: float, found: dict[int, tuple[float, int]]
    ) -> None:
        self._guess, self.plain = partial(costs._excess, rows), plain
        self._known: dict[int, float] = {0: plain}
        points = [(m, self._guess(m), excess, count) for m, (excess, count) in sorted(found.items())]
        weighed = [(n * _weight(guess) * guess, guess, excess) for _, guess, excess, n in points]
        above = sum(weight * excess for weight, _, excess in weighed) + _NOISE**2 * others
        self.factor = above / (sum(weight * guess for weight, guess, _ in weighed) + _NOISE**2)
        # What a measured size is off the curve by; how sure that is depends on how often it was timed.
        self._off: list[tuple[int, float]] = [(0, 0.0)]
        for size, guess, excess, count in points:
            believed = (_OFF * guess) ** 2 + _OFF_AT_LEAST**2
            trust = believed / (believed + _NOISE**2 / count)
            self._off.append((size, trust * (excess - self.factor * guess)))

        # Straight lines in between: only there may a larger block seem to cost less.
        bends = {m for point, _ in costs.curve.points if (m := point - rows) > 0}
        self._bends = sorted(bends | {size for size, _ in self._off if size})
        self._highest = list(accumulate(map(self._excess, self._bends), max, initial=0.0))

    def seconds(self, drafted: int) -> float:
        """Expect the seconds of a round of this size; a larger one never costs less."""
        if drafted not in self._known:
            least = self._highest[bisect_right(self._bends, drafted)]
            self._known[drafted] = self.plain * (1.0 + max(self._excess(drafted), least))
        return self._known[drafted]

    def _excess(self, drafted: int) -> float:
        return self.factor * self._guess(drafted) + self._off_by(drafted)

    def _off_by(self, drafted: int) -> float:
        """Give what the curve is off by: between measured sizes in between, beyond them as at the last."""
        at = bisect_right(self._off, drafted, key=itemgetter(0))
        (low, below), (high, above) = self._off[at - 1], self._off[min(at, len(self._off) - 1)]
        return below + (above - below) * (drafted - low) / max(high - low, 1)


def _weight(guess: float) -> float:
    """Say how much an excess tells of the factor: one that the curve holds for none tells little."""
    return guess**2 / (guess**2 + _OFF_AT_LEAST**2)


def _typical(times: Sequence[float]) -> float:
    """Give the lower quartile: what disturbs a timing makes it longer, first uses of a shape most of all."""
    return sorted(times)[(len(times) - 1) // 4]


def _rising(times: dict[int, deque[float]]) -> dict[int, tuple[float, int]]:
    """Give typical seconds and counts by size, neighbours pooled until larger ones do not cost less."""
    pools: list[tuple[float, int, list[int]]] = []  # seconds, count, sizes
    for size in sorted(times):
        seconds, count, sizes = _typical(times[size]), len(times[size]), [size]
        while pools and pools[-1][0] > seconds:
            before, n, their = pools.pop()
            seconds, count = (seconds * count + before * n) / (count + n), count + n
            sizes = their + sizes
        pools.append((seconds, count, sizes))
    return {size: (seconds, count) for seconds, count, sizes in pools for size in sizes}
