"""Running estimates of whether a drafted token is accepted.

The chance that a node is accepted once its parent is has a guess to start from: the drafter's own, from its
scores, or one by rule. Three shifts of its logit are learned beside it: of the run, of the row, and of what
was known of the node before it was checked, its clue (how sure the drafter was, or its depth). So a clue that
was never seen is estimated from all others, and a row that has just begun from the other rows.

This is a logistic regression, filtered: each outcome moves the shifts by an extended Kalman step, and their
variances grow a little with every step, which forgets what is old.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from specdec_core.contract.draft import HostNodes

Kind: TypeAlias = Literal["score", "depth"]

# Variances of the shifts: a drafter's scores are off by less than a guess by rule.
_OF_RUN: dict[Kind, float] = {"score": 0.1, "depth": 0.3}
_OF_ROW: dict[Kind, float] = {"score": 0.2, "depth": 0.8}
_OF_CLUE: dict[Kind, float] = {"score": 0.2, "depth": 0.3}
_DRIFT = 0.005  # variance gained by each outcome: some thirty outcomes are remembered
_FADING = 0.005  # share of a shift that is forgotten in a round that shows nothing
_CERTAIN = 0.97  # an accepted node that was surer than this teaches nothing
_GUESS_ON_HOST, _GUESS_OF_MODEL = 0.4, 0.7  # where there are no scores
_DEEP = 6  # from here on depths are alike
_STEPS = 5  # scores that are learned apart
_SURE = 0.995  # no guess is taken to be surer than this, nor less sure than 1 minus this


class Clue(NamedTuple):
    """What is known of a node before it is checked; nodes of one key are learned together."""

    key: tuple[str, Kind, int]
    logit: float  # of the guessed chance that the node is accepted, its parent being so

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, source: str, kind: Kind, at: int, guess: float) -> Clue:
        """Make one: who drafted the node, what `at` counts, its value, and the guess."""
        return cls((source, kind, at), _logit(guess))


def clue_of_score(source: str, score: float) -> Clue:
    """Make the clue of a node whose drafter guesses its chance itself."""
    guess = round(max(0.0, score), 2)  # in this order NaN is 0
    return Clue.of(source, "score", round(_STEPS * guess), guess)


def clue_of_depth(source: str, depth: int) -> Clue:
    """Make the clue of a node that a model drafts, of which nothing is known but its depth."""
    return Clue.of(source, "depth", min(depth, _DEEP), _GUESS_OF_MODEL)


def clues_of(source: str, nodes: HostNodes) -> Callable[[int], Clue]:
    """Tell what is known of each node made on the host: its score, or else its depth and its rank."""
    parents, scores = nodes.parents, nodes.scores
    if scores:

        def scored(node: int) -> Clue:
            above = scores[parents[node]] if parents[node] >= 0 else 1.0
            return clue_of_score(source, min(scores[node] / above, 1.0) if above > 0 else 0.0)

        return scored
    clues: list[Clue] = []
    depths: list[int] = []
    ranks: dict[int, int] = {}  # parent -> its children so far
    for parent in parents:
        depths.append(1 + depths[parent] if parent >= 0 else 1)
        rank = ranks[parent] = ranks.get(parent, -1) + 1
        at = 100 * min(rank, 2) + min(depths[-1], _DEEP)
        clues.append(Clue.of(source, "depth", at, _GUESS_ON_HOST / (1 + rank)))
    return clues.__getitem__


class Shift:
    """A shift of a logit: what is believed of it, and how well it is known."""

    __slots__ = ("mean", "prior", "variance")

    def __init__(self, prior: float) -> None:
        self.mean, self.variance, self.prior = 0.0, prior, prior

    def relax(self) -> None:
        """Become less sure, but never less than at the start."""
        self.variance = min(self.variance + _DRIFT, self.prior)

    def fade(self) -> None:
        """Become less sure, and return to what was believed at the start."""
        self.mean *= 1.0 - _FADING
        self.relax()


Shifts: TypeAlias = dict[Kind, Shift]


def new_row() -> Shifts:
    """Make the shifts of a row that begins."""
    return {kind: Shift(variance) for kind, variance in _OF_ROW.items()}


class Acceptance:
    """Estimates of one run. A row's own shifts are held by whoever knows the row: `new_row`."""

    def __init__(self) -> None:
        self._run: Shifts = {kind: Shift(variance) for kind, variance in _OF_RUN.items()}
        self._clues: dict[tuple[str, Kind, int], Shift] = {}

    def chance(self, row: Shifts, clue: Clue, optimism: float = 0.0) -> float:
        """Give the chance that a node is accepted, its parent being so.

        optimism: standard deviations to add, to ask what may well be true.
        """
        run, own, of_clue = self._shifts(row, clue)
        at = clue.logit + run.mean + own.mean + of_clue.mean
        if optimism:
            at += optimism * math.sqrt(run.variance + own.variance + of_clue.variance)
        return 1.0 / (1.0 + math.exp(-at))

    def learn(self, row: Shifts, clue: Clue, *, accepted: bool) -> None:
        """Learn from a node whose parent was accepted."""
        chance = self.chance(row, clue)
        if accepted and chance > _CERTAIN:
            return
        shifts = self._shifts(row, clue)
        for shift in shifts:
            shift.relax()
        spread = chance * (1.0 - chance)
        gain = 1.0 / (1.0 + spread * sum(shift.variance for shift in shifts))
        for shift in shifts:
            shift.mean += gain * shift.variance * (accepted - chance)
            shift.variance -= gain * spread * shift.variance**2

    def _shifts(self, row: Shifts, clue: Clue) -> tuple[Shift, Shift, Shift]:
        kind, shift = clue.key[1], self._clues.get(clue.key)
        if shift is None:
            shift = self._clues[clue.key] = Shift(_OF_CLUE[kind])
        return self._run[kind], row[kind], shift

    def fade(self) -> None:
        """Forget a little, in a round that showed nothing."""
        for shift in (*self._run.values(), *self._clues.values()):
            shift.fade()


def _logit(chance: float) -> float:
    chance = min(max(chance, 1.0 - _SURE), _SURE)
    return math.log(chance / (1.0 - chance))
