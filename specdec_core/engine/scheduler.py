"""Which rows take part in the next round: finished rows leave, waiting ones take their places."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from operator import length_hint
from typing import TYPE_CHECKING, Any

from specdec_core.checks.guard import GuardedDrafter
from specdec_core.contract.errors import DrafterError
from specdec_core.contract.interfaces import Rows
from specdec_core.rows.batch import Batch
from specdec_core.rows.context import TokenBuffer
from specdec_core.rows.row import Row

if TYPE_CHECKING:
    from specdec_core.engine.target import Target
    from specdec_core.rows.clock import Clock

logger = logging.getLogger("specdec")


class Scheduler:
    """Serves rows in order, at most `max_batch` at once; the next one is taken when a place is free."""

    def __init__(
        self,
        rows: Iterable[Row],
        target: Target,
        drafter: GuardedDrafter,
        max_batch: int,
        nodes: int,
        clock: Clock,
    ) -> None:
        self._waiting = iter(rows)
        self._target, self._drafter, self._clock = target, drafter, clock
        self._nodes = max(nodes, drafter.capabilities.nodes)  # the guard lets drafts be that wide
        self._active: list[Row] = []
        self._free = list(range(max_batch))
        self._fed: set[int] = set()  # hashes of prompts that were fed: at worst a row goes a round early
        self._buffer = TokenBuffer(target.device)

    def next(self) -> Batch | None:
        """Give the rows of the next round; None when all have ended.

        Rows in their first round go by themselves, those of like length together: a prompt's many columns
        would pad every other row's block.
        """
        self._release([row for row in self._active if row.finished])
        self._admit()
        if not self._active:
            return None
        new = [row for row in self._active if not row.stats.rounds]
        if new:
            size = _bucket(len(new[0].prompt), self._target.chunk)
            rows = self._unlike([row for row in new if _bucket(len(row.prompt), self._target.chunk) == size])
        else:
            rows = list(self._active)
        return Batch(rows, self._buffer, self._drafter.name, others_wait=length_hint(self._waiting, 1) > 0)

    def _unlike(self, rows: list[Row]) -> list[Row]:
        """Leave out all but one row of a prompt that was not fed yet: the others will share what it fed."""
        firsts: dict[tuple[int, ...], Row] = {}
        chosen = [
            row
            for row in rows
            if not self._target.shares(len(row.prompt))
            or hash(row.prompt) in self._fed
            or firsts.setdefault(row.prompt, row) is row
        ]
        self._fed.update(map(hash, firsts))
        return chosen

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Release every row; a drafter that fails at that does not mask what went wrong before."""
        try:
            self._release(list(self._active))
        except DrafterError as failure:
            if error is None or isinstance(error, GeneratorExit):
                raise
            logger.warning("%s", failure)

    def _admit(self) -> None:
        rows = []
        while self._free and (row := next(self._waiting, None)) is not None:
            if row.finished:  # nothing to generate
                continue
            row.place = self._free.pop(0)
            row.began = self._clock.now
            rows.append(row)
        if self._free:
            self._waiting = iter(())  # a generator tells only so that it has ended
        if rows:
            self._active += rows
            self._active.sort(key=lambda row: row.place)
            admitted = Rows(
                ids=tuple(row.id for row in rows),
                places=tuple(row.place for row in rows),
                prompts=tuple(row.prompt for row in rows),
                params=tuple(row.params for row in rows),
            )
            self._target.admit(admitted, self._nodes)
            self._drafter.admit(admitted)

    def _release(self, rows: list[Row]) -> None:
        if not rows:
            return
        self._active = [row for row in self._active if row not in rows]
        for row in rows:
            row.stats.total_seconds = self._clock.now - row.began
            self._buffer.release(row.place)
        self._free = sorted([*self._free, *(row.place for row in rows)])
        self._target.release([row.place for row in rows])
        self._drafter.release([row.id for row in rows])


def _bucket(prompt: int, chunk: int) -> int:
    """Columns that a prompt's last chunk takes, rounded up to a power of two."""
    return (min(prompt, chunk) - 1).bit_length()
