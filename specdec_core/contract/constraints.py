"""Constraints on what may be said, such as a grammar, followed along every drafted path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specdec_core.contract.errors import ConstraintError

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Constraint(Protocol):
    """What a row's generated text must be: `SamplingParams(constraint=...)`.

    It does not change, so rows and calls may share one. Its `repr` names it in errors.
    """

    def matcher(self) -> Matcher:
        """Start before the first generated token; the prompt is not constrained."""


class Matcher(Protocol):
    """How far one text has come. It is never given an EOS; the core allows those where `complete` says so."""

    def consume(self, tokens: list[int]) -> int:
        """Go on with the leading tokens that may be said; return how many those were."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens that were consumed."""

    def allowed(self) -> Tensor:
        """Which tokens may come next: bool [V] on the CPU; ids that it is too short for may not."""

    def complete(self) -> bool:
        """Whether the text may end here."""

    def forced(self) -> list[int]:
        """Tokens sure to come next, as far as is known at little cost; they are drafted, so [] is fine.

        Where `allowed` leaves a single token, it is drafted without being named here.
        """


class Walk:
    """One row's matcher, moved among the paths behind the row's committed tokens.

    Args:
        eos: ids that end the row. They may be said where the text may end, whatever `allowed` says of them.
        vocab_size: V of the target.

    Raises:
        ConstraintError: the constraint allows nothing at all.
    """

    def __init__(self, constraint: Constraint, eos: Iterable[int], vocab_size: int) -> None:
        self._constraint, self._vocab_size = constraint, vocab_size
        self._eos = sorted(token for token in eos if token < vocab_size)
        self._matcher = constraint.matcher()
        self._path: list[int] = []  # what the matcher consumed behind the committed tokens
        self._masks: dict[tuple[int, ...], Tensor | None] = {}  # by path; q and p ask for the same ones
        self._said = 0
        self.ended = self._ends_after([])
        if not self.ended and self.allowed([]) is None:
            raise self._stuck()
        self._masks.clear()  # the row may wait for long

    def legal(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may be said, one after another; nothing may behind an EOS."""
        before_eos = list(takewhile(lambda token: token not in self._eos, tokens))
        taken = self._go(before_eos)
        if taken < len(before_eos) or taken == len(tokens):
            return taken
        return taken + self._matcher.complete()

    def allowed(self, path: Sequence[int]) -> Tensor | None:
        """What may be said after a path: bool [V].

        None where nobody will ask: nothing may be said, or the path itself may not.
        """
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._mask(path)
        return self._masks[key]

    def forced(self, limit: int) -> list[int]:
        """At most `limit` tokens that must come next; of several EOS ids that may, the largest."""
        self._go([])
        path = self._matcher.forced()[:limit]
        path = path[: self.legal(path)]
        while len(path) < limit:
            mask = self.allowed(path)
            choices = [] if mask is None else mask.nonzero().flatten().tolist()
            if len(choices) != 1 and not set(choices) <= set(self._eos):
                break
            path += choices[-1:]
            if not choices or path[-1] in self._eos:
                break
        return path

    def commit(self, tokens: Sequence[int]) -> int:
        """Take what became output; return how much: less where the constraint ends and no EOS can say so.

        Raises:
            ConstraintError: a token may not be said; then there was none that may.
        """
        kept = self.legal(tokens)
        if not self._eos:
            ends = (i for i in range(1, kept + 1) if self._ends_after(tokens[:i]))
            end = next(ends, None)
            self.ended, kept = end is not None, end or kept
        self._said += kept
        if kept < len(tokens) and not self.ended:
            raise self._stuck()
        self._go([token for token in tokens[:kept] if token not in self._eos])
        self._path = []
        self._masks.clear()
        return kept

    def _go(self, path: Sequence[int]) -> int:
        """Stand behind the leading tokens of a path that may be said; return how many those are."""
        pairs = zip(self._path, path, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
            del self._path[shared:]
        rest = list(takewhile(lambda token: 0 <= token < self._vocab_size, path[shared:]))
        taken = self._matcher.consume(rest) if rest else 0
        self._path += rest[:taken]
        return len(self._path)

    def _mask(self, path: Sequence[int]) -> Tensor | None:
        if any(token in self._eos for token in path) or self._go(path) < len(path):
            return None
        own = self._matcher.allowed()[: self._vocab_size]
        mask = own.new_zeros(self._vocab_size)
        mask[: len(own)] = own
        for token in self._eos:
            mask[token] = self._matcher.complete()
        return mask if mask.any() else None

    def _ends_after(self, path: Sequence[int]) -> bool:
        """Whether nothing can follow a path that may be said, and no EOS is there to say so."""
        if self._eos:
            return False
        self._go(path)
        return self._matcher.complete() and not self._matcher.allowed().any()

    def _stuck(self) -> ConstraintError:
        name = repr(self._constraint)
        name = name if len(name) <= 80 else f"{name[:77]}..."
        return ConstraintError(
            f"constraint {name} allows nothing after {self._said} generated tokens, nor to end there; "
            "its grammar needs a way on that the target's vocabulary can say"
        )
