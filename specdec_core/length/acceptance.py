"""How likely a drafted token is to be accepted: its drafter's guess, and how right guesses were of late.

The chance that a node is accepted once its parent is has a guess to start from: the drafter's own, from its
scores, or one by rule. Its odds are multiplied by one number of the row, the odds of what was accepted of
late over the odds that had been guessed.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from specdec_core.contract.draft import ROOT, HostNodes

GUESS_OF_MODEL = 0.7  # that a token of a model is accepted, of which nothing else is known
_GUESS_ON_HOST = 0.4  # and one made on the host without scores; of later siblings less
_SURE = 0.995  # no guess is taken to be surer than this, nor less sure than 1 minus this
_FADING = 0.95  # of what is remembered, with each outcome: some twenty
_DOUBT = 1.5  # outcomes, right ones and wrong ones each, that speak for the guesses before any was seen
_DOUBT_BY_RULE = 0.5  # and for guesses by rule, which know nothing
_INHERITED = 5.0  # outcomes of all rows that a new one begins with


class Belief:
    """How right the guesses of one drafter were of late, in one row or in all."""

    __slots__ = ("doubt", "hoped", "outcomes", "right")

    def __init__(self, like: Belief | None = None, *, scored: bool = True) -> None:
        self.doubt = _DOUBT if scored else _DOUBT_BY_RULE
        self.outcomes = self.right = self.hoped = 0.0  # fading; `hoped` are those that the guesses promised
        if like is not None and like.outcomes:
            share = min(_INHERITED / like.outcomes, 1.0)
            self.outcomes, self.right = share * like.outcomes, share * like.right
            self.hoped = share * like.hoped

    @property
    def odds(self) -> float:
        """What the odds of a guess are to be multiplied by."""
        right, hoped = self.right + self.doubt, self.hoped + self.doubt
        wrong, doubted = self.outcomes - self.right + self.doubt, self.outcomes - self.hoped + self.doubt
        return right * doubted / (wrong * hoped)

    def chance(self, guess: float) -> float:
        """Give the chance of a node, its parent being accepted."""
        odds = self.odds * guess / (1.0 - guess)
        return odds / (1.0 + odds)

    def learn(self, outcomes: Iterable[tuple[float, bool]]) -> None:
        """Learn from nodes whose parent was accepted: the guess, and whether the node was."""
        n, right, hoped = self.outcomes, self.right, self.hoped
        for guess, accepted in outcomes:
            n, right, hoped = _FADING * n + 1.0, _FADING * right + accepted, _FADING * hoped + guess
        self.outcomes, self.right, self.hoped = n, right, hoped


def bounded(guess: float) -> float:
    """Keep a guess from being certain; NaN is no hope."""
    return min(max(1.0 - _SURE, guess), _SURE)  # in this order


def guesses_of(nodes: HostNodes) -> tuple[float, ...]:
    """Guess of each node made on the host whether it is accepted, its parent being so."""
    return _guesses(nodes.parents, nodes.scores)


@lru_cache(maxsize=1024)  # few shapes and scores come up, each of them in many rounds
def _guesses(parents: tuple[int, ...], scores: tuple[float, ...]) -> tuple[float, ...]:
    guesses: list[float] = []
    ranks: dict[int, int] = {}  # parent -> its children so far
    for node, parent in enumerate(parents):
        if scores:
            above = scores[parent] if parent > ROOT else 1.0
            guess = scores[node] / above if above > 0 else 0.0
        else:
            ranks[parent] = ranks.get(parent, 0) + 1
            guess = _GUESS_ON_HOST / ranks[parent]
        guesses.append(bounded(guess))
    return tuple(guesses)
