"""Who takes part in the next step: the ended leave, the waiting take their places, turns are fair."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

from specdec_core.checks.guard import GuardedDrafter
from specdec_core.contract.errors import DrafterError
from specdec_core.contract.interfaces import Rows
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.engine.memory import Memory
from specdec_core.engine.target import Target
from specdec_core.rows.batch import Batch
from specdec_core.rows.clock import Clock
from specdec_core.rows.context import TokenBuffer
from specdec_core.rows.row import Row

logger = logging.getLogger("specdec")

_MOST_CHUNKS = 4  # of prompts that end in one step, where they need not be alike


@dataclass(frozen=True, eq=False)
class Turn:
    """What one step does."""

    reading: Batch | None  # one row, of whose long prompt a chunk is read
    batch: Batch | None  # rows that play a round


class Scheduler:
    """Serves rows in order, at most `max_batch` at once, as far as memory goes.

    Rows in their first round go by themselves, those of like length together where blocks have padding: a
    prompt's many columns would pad every other row's block. They take turns with rows that decode: each of
    these moves on at every second step at least, whatever arrives. A prompt that is longer than a chunk is
    read chunk by chunk, one a step, beside them.
    """

    def __init__(
        self,
        target: Target,
        drafter: GuardedDrafter,
        max_batch: int,
        nodes: int,
        memory: Memory,
        clock: Clock,
    ) -> None:
        self._target, self._drafter, self._memory, self._clock = target, drafter, memory, clock
        self._nodes = max(nodes, drafter.capabilities.nodes)  # the guard lets drafts be that wide
        self._waiting: deque[Row] = deque()
        self.active: list[Row] = []  # in the order of their places
        self._free = list(range(max_batch))
        self._decoded = False  # whether rows behind their first round took the last turn
        self._buffer = TokenBuffer(target.device)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.active and not self._waiting

    @property
    def vacant(self) -> int:
        """How many more rows could be served at once, if memory allows."""
        return len(self._free) - len(self._waiting)

    def enter(self, rows: Iterable[Row]) -> None:
        """Let rows wait for their places."""
        self._waiting.extend(rows)

    def next(self) -> Turn:
        """Choose what the next step does."""
        # The oldest first, whatever its place: so none is passed over for ever.
        new = self._unlike(sorted((row for row in self.active if not row.read), key=attrgetter("id")))
        pending = self._begun(new) if new else {}
        long = next((row for row in new if pending[row.id] > self._target.chunk), None)
        ready = [row for row in new if pending[row.id] <= self._target.chunk]
        decoding = [row for row in self.active if row.read]
        rows = self._alike(ready, pending) if ready and (self._decoded or not decoding) else decoding
        self._decoded = rows is decoding
        return Turn(self._batch([long]) if long else None, self._batch(rows) if rows else None)

    def _batch(self, rows: list[Row]) -> Batch:
        return Batch(rows, self._buffer, self._drafter.name, others_wait=bool(self._waiting))

    def _alike(self, rows: list[Row], pending: Mapping[int, int]) -> list[Row]:
        """Choose rows whose prompts are read together, the first one among them."""
        if not self._target.runner.ragged:
            size = _bucket(pending[rows[0].id])
            return self._placed(row for row in rows if _bucket(pending[row.id]) == size)
        sums = accumulate(pending[row.id] for row in rows)
        most = _MOST_CHUNKS * self._target.chunk
        pairs = zip(rows, sums, strict=True)
        return self._placed(row for row, tokens in pairs if row is rows[0] or tokens <= most)

    def _begun(self, rows: list[Row]) -> dict[int, int]:
        """Count what is left to read of rows that have not been read: id -> tokens."""
        self._target.begin(self._batch(rows))
        return {row.id: self._target.pending(row) for row in rows}

    @staticmethod
    def _placed(rows: Iterable[Row]) -> list[Row]:
        return sorted(rows, key=attrgetter("place"))

    def _unlike(self, rows: list[Row]) -> list[Row]:
        """Leave out rows of a prompt that another one is to read first: they will share what it fed."""
        firsts: dict[tuple[int, ...], Row] = {}
        return [
            row
            for row in rows
            if not self._target.shares(len(row.prompt))
            or firsts.setdefault(row.prompt, row) is row
            or self._target.knows(row.prompt)
        ]

    def admit(self) -> list[Row]:
        """Give places to waiting rows, in their order; return those that end without one.

        A row for which memory has no room waits until others have left; it is refused if there are none.
        """
        rows: list[Row] = []
        ended: list[Row] = []
        while self._waiting and (self._free or self._waiting[0].finished):
            row = self._waiting[0]
            if row.finished is None and not self._memory.fits([*self.active, *rows, row]):
                if self.active or rows:
                    break
                row.fail(self._memory.refusal(row))
            self._waiting.popleft()
            if row.finished:
                ended.append(row)
                continue
            row.place, row.began = self._free.pop(0), self._clock.now
            rows.append(row)
        return ended + self._seat(rows)

    def _seat(self, rows: list[Row]) -> list[Row]:
        """Let target and drafter begin rows that have places; give back those that could not begin."""
        if not rows:
            return []
        self.active = self._placed([*self.active, *rows])
        try:
            self._target.admit(_beginning(rows), self._nodes)
            self._drafter.admit(_beginning(rows))
        except Exception as error:  # of a plugin, or of a model that lacks memory
            for row in rows:
                row.fail(error)
            return self.retire()
        return []

    def invite(self) -> None:
        """Let a drafter that was left out begin the rows that are under way."""
        if self.active:
            self._drafter.admit(_beginning(self.active))

    def restart(self, rows: Sequence[Row]) -> None:
        """Let rows begin again behind what they have committed: a round with them was broken off."""
        rows = [row for row in rows if row.finished is None]
        self._leave(rows)
        for row in rows:
            row.read = False
        self._seat(rows)

    def refuse(self, error: Exception) -> list[Row]:
        """Let all who wait end with an error."""
        for row in self._waiting:
            row.fail(error)
        return self.retire()

    def retire(self) -> list[Row]:
        """Let rows that have ended leave; return them."""
        ended = [row for row in self.active if row.finished]
        if ended:
            self._leave(ended)
            self._free = sorted([*self._free, *(row.place for row in ended)])
        waiting = [row for row in self._waiting if row.finished]  # cancelled
        if waiting:
            self._waiting = deque(row for row in self._waiting if not row.finished)
        return ended + waiting

    def _leave(self, rows: Sequence[Row]) -> None:
        gone = set(map(id, rows))
        self.active = [row for row in self.active if id(row) not in gone]
        for row in rows:
            self._buffer.release(row.place)
        self._target.release([row.place for row in rows])
        try:
            self._drafter.release([row.id for row in rows])
        except DrafterError as error:  # of a strict run; it does not mask what went wrong before
            logger.warning("%s", error)
            for row in rows:
                row.fail(error)


def _beginning(rows: Sequence[Row]) -> Rows:
    """Give rows as those that begin: with all that was committed as their prompts."""
    return Rows(
        ids=tuple(row.id for row in rows),
        places=tuple(row.place for row in rows),
        prompts=tuple(tuple(row.tokens) for row in rows),
        params=tuple(_left(row) for row in rows),
    )


def _left(row: Row) -> SamplingParams:
    """Give a row's params, with as many new tokens as it may still say behind that prompt."""
    said = len(row.tokens) - len(row.prompt)
    return row.params.replace(max_new_tokens=row.params.max_new_tokens - said) if said else row.params


def _bucket(pending: int) -> int:
    """Columns that so many tokens take, rounded up to a power of two."""
    return (pending - 1).bit_length()
