"""What a round costs, measured as rounds go by: t = max(plain, a + b m) with m drafted tokens.

Each number of rows has a line of its own, and so has each kind of round: least squares over the latest
rounds with drafts, beside the mean of those without. What was never measured follows from the nearest number
of rows, by the tokens of the block, and at first from a guess of b.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

_ON_CPU, _ON_GPU = 0.15, 0.005  # of a drafted token, over a round of one token, before any was timed
_FADING = 0.98  # of what is remembered, with each timing: some fifty rounds
_JOINT = 1.0  # timings that what is known of rounds with a draft counts for in those without, and so back
_DISTURBED = 0.3  # weight of a timing that is longer than expected: what disturbs one makes it longer
_LATE = 1.3  # a timing counts for no more than this many times what was expected: others use the machine
_SPREAD = 16.0  # weight of the guessed slope: what a handful of timings four tokens apart weigh
_KINDS = 8  # of rounds that are kept
_DRAFT_STEP = 0.15  # of a drafting step, in rounds without a draft, before one was timed


class Line(NamedTuple):
    """Seconds of a round: what one without a draft takes, and at most the line over drafted tokens.

    The line may begin below: the first tokens of a draft are free where the weights are what takes long.
    """

    plain: float
    draft: float
    token: float

    def __call__(self, drafted: int) -> float:
        """Expect the seconds of a round with so many drafted tokens."""
        return max(self.plain, self.draft + self.token * drafted) if drafted else self.plain


@dataclass
class _Sums:
    """Fading least squares over the drafted tokens, and the mean of rounds without any."""

    n: float = 0.0
    m: float = 0.0  # means
    t: float = 0.0
    mm: float = 0.0  # sums of squares about them
    mt: float = 0.0
    plain: float = 0.0  # mean
    plains: float = 0.0
    seen: int = 0

    def add(self, m: int, t: float, weight: float) -> None:
        """Add a timing, the others fading."""
        self.n *= _FADING
        self.mm *= _FADING
        self.mt *= _FADING
        self.plains *= _FADING
        if not m:
            self.plains += weight
            self.plain += weight * (t - self.plain) / self.plains
            return
        self.n += weight
        dm, dt = weight * (m - self.m), t - self.t
        self.m += dm / self.n
        self.t += weight * dt / self.n
        self.mm += dm * (m - self.m)
        self.mt += dm * (t - self.t)

    def line(self, guess: float) -> Line:
        """Fit; guess: what a drafted token takes over what a round takes without."""
        base = self.plain if self.plains else self.t / (1.0 + guess * self.m)
        token = max((self.mt + _SPREAD * guess * base) / (self.mm + _SPREAD), 0.0)
        if not self.n:
            return Line(base, base, token)
        draft = self.t - token * self.m  # where the line begins
        plain = (self.plains * self.plain + _JOINT * max(draft, 0.1 * self.t)) / (self.plains + _JOINT)
        draft = (self.n * draft + _JOINT * plain) / (self.n + _JOINT)
        return Line(plain, draft, token)


class RoundCosts:
    """Timings of rounds by kind and rows, and of drafting steps.

    They tell of the machine and of the models, and of nothing that was said.

    Args:
        device: its type, for a first guess.
        warm_up: timings of each number of rows to leave out: captured shapes cost much more at first.
        ragged: whether rows of a block may differ in width; else it is the rectangle around them.
    """

    def __init__(self, device: str, warm_up: int = 0, *, ragged: bool = False) -> None:
        self.guess = _ON_CPU if device == "cpu" else _ON_GPU
        self.warm_up, self.ragged = warm_up, ragged
        self._kinds: dict[str, dict[int, _Sums]] = {}
        self._lines: dict[tuple[str, int], Line] = {}
        self._step = 0.0  # seconds of a drafting step, over those of a round without a draft

    def add(self, kind: str, rows: int, drafted: int, seconds: float) -> None:
        """Note the seconds of a round without a model's drafting; drafted: tokens of all rows together."""
        if seconds <= 0:
            return
        if kind not in self._kinds and len(self._kinds) == _KINDS:
            del self._kinds[next(iter(self._kinds))]
        sums = self._kinds.setdefault(kind, {}).setdefault(rows, _Sums())
        sums.seen += 1
        if sums.seen <= self.warm_up:
            return
        weight = 1.0
        if sums.n + sums.plains > 3.0:
            expected = self.line(kind, rows)(drafted)
            seconds = min(seconds, _LATE * expected)
            weight = _DISTURBED if seconds > expected else 1.0
        sums.add(drafted, seconds, weight)
        self._lines.clear()

    def add_draft(self, kind: str, rows: int, depth: int, seconds: float) -> None:
        """Note the seconds that a model took to draft to a depth."""
        step = seconds / depth / self.line(kind, rows).plain
        self._step += 0.2 * (min(step, 2.0 * self._step) - self._step) if self._step else step

    def step(self, kind: str, rows: int) -> float:
        """Expect the seconds of a drafting step."""
        return (self._step or _DRAFT_STEP) * self.line(kind, rows).plain

    def line(self, kind: str, rows: int) -> Line:
        """Expect the seconds of a round."""
        known = self._lines.get((kind, rows))
        if known is None:
            known = self._lines[kind, rows] = self._fitted(kind, rows)
        return known

    def _fitted(self, kind: str, rows: int) -> Line:
        timed = {n: sums for n, sums in self._kinds.get(kind, {}).items() if sums.n or sums.plains}
        if rows in timed:
            return timed[rows].line(self._guess(rows))
        if not timed:
            return Line(1.0, 1.0, self._guess(rows))
        near = min(timed, key=lambda n: max(n / rows, rows / n))
        plain, first, token = timed[near].line(self._guess(near))
        more = max((rows - near) * token, -0.9 * plain)
        return Line(plain + more, first + more, token)

    def _guess(self, rows: int) -> float:
        return self.guess / (1.0 + self.guess * (rows - 1))
