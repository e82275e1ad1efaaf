"""Requests that share the rounds of one decoder: they join, leave and wait at any round, from any thread.

Nobody owns the rounds. Whoever waits for something to happen to a request of its own plays the next round if
no other thread is playing one, and waits for that thread's if one is. So a single caller decodes in its own
thread, at the pace at which it asks; several share every round.
"""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from types import FrameType
from typing import Any

import torch

from specdec_core.checks.guard import GuardedDrafter
from specdec_core.contract.blame import copied
from specdec_core.contract.errors import DecoderBusy, DrafterError, InvalidParameter, UnsupportedModel
from specdec_core.engine.handles import Event, Handle, Inbox, Request, Step
from specdec_core.engine.loop import Round, play
from specdec_core.engine.memory import Memory
from specdec_core.engine.requests import RowMaker
from specdec_core.engine.scheduler import Scheduler, Turn
from specdec_core.engine.target import Target
from specdec_core.length.policy import LengthPolicy
from specdec_core.rows.batch import Batch
from specdec_core.rows.clock import Clock
from specdec_core.rows.results import result_of
from specdec_core.rows.row import Row, unprintable
from specdec_core.rows.text import RowText

_RETRY_ROUNDS = 64  # before a drafter that failed is tried again; doubled each time that it fails once more
_MOST_RETRY_ROUNDS = 4096


class Session:
    """Plays rounds for whoever asks; see the module.

    Args:
        length: how much is drafted.
        maker: makes the rows of a request.
        max_batch: most rows at once.
        memory: bytes for caches and distributions; None: what is free.
    """

    def __init__(
        self,
        target: Target,
        drafter: GuardedDrafter,
        length: LengthPolicy,
        clock: Clock,
        maker: RowMaker,
        *,
        max_batch: int,
        memory: int | None = None,
    ) -> None:
        self._target, self._drafter, self._length, self._clock = target, drafter, length, clock
        self._maker = maker
        budget = Memory(target, drafter.capabilities, length.nodes, memory)
        self._scheduler = Scheduler(target, drafter, max_batch, length.nodes, budget, clock)
        self.changed = threading.Condition()  # guards inboxes and all below, and tells of every change
        self._player: int | None = None  # the thread that plays a step
        self._arrived: deque[Row] = deque()
        self._left: deque[Row] = deque()  # cancelled, as long as somebody plays
        self._handles: dict[int, Handle] = {}  # of rows under way
        self._ended: list[Row] = []  # that nobody was told of yet
        self._events: deque[Event] = deque()  # of requests without an inbox, until somebody asks
        self._awake = False  # whether anybody decodes
        self._closed = False
        self._rounds_out, self._retry = 0, _RETRY_ROUNDS  # rounds without the drafter, and how many to wait

    # --- what callers do

    def submit(self, request: Request) -> Handle:
        """Let a request join at the next step; from any thread.

        Raises:
            UsageError: the prompt or a parameter is wrong, or the session is closed.
        """
        rows, many = self._maker.rows(request.prompt, request.params)
        if many and request.params.n == 1:
            raise InvalidParameter("a request is one prompt; submit each of a list for itself")
        return self.enter(rows, stream=request.stream)

    def enter(self, rows: Sequence[Row], *, inbox: Inbox | None = None, stream: bool = False) -> Handle:
        """Let rows join at the next step; from any thread."""
        handle = Handle(tuple(rows), stream, inbox)
        with self.changed:
            if self._closed:
                raise InvalidParameter("this session is closed; make another decoder")
            if stream and self._target.tokenizer is not None:
                for row in rows:
                    row.text = row.text or RowText(self._target.tokenizer)
            self._handles.update((row.id, handle) for row in rows)
            self._arrived.extend(rows)
            if inbox is not None:
                inbox.left += len(rows)
                inbox.began = self._clock.now if inbox.began is None else inbox.began
            self.changed.notify_all()
        return handle

    def cancel(self, handle: Handle) -> None:
        """End a request after the round under way, at once if there is none; from any thread."""
        with uninterrupted():
            with self.changed:
                self._left.extend(row for row in handle.rows if row.id in self._handles)
                if not self._left or self._player is not None:
                    return  # whoever plays sees to it
                self._player = get_ident()
            with self._given_back():
                self._sweep()

    def step(self) -> list[Event]:
        """Play a round, or read a chunk of a long prompt.

        It waits for a step that another thread plays, and does nothing where nothing is to do: see `wait`.

        Returns:
            What has happened to requests that were submitted by hand since the last call, whoever played.

        Raises:
            DecoderBusy: it was called from within a step.
        """
        while not self._played(lambda: self._player is None):
            pass
        with self.changed:
            events = list(self._events)
            self._events.clear()
        return events

    def _played(self, ready: Callable[[], object]) -> bool:
        """Wait until something is so, and play a step, if no other thread was quicker."""
        with self.changed:
            self._check_reentry()
            self.changed.wait_for(ready)
        with uninterrupted():
            with self.changed:
                if self._player is not None:
                    return False
                self._player = get_ident()
            with self._given_back():
                self._step()
        return True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until there is something to do; whether there is."""
        with self.changed:
            return self.changed.wait_for(lambda: not self._idle or self._closed, timeout) and not self._closed

    def close(self) -> None:
        """Cancel every request, and take no more."""
        with self.changed:
            self._closed = True
            handles = list(dict.fromkeys(list(self._handles.values())))
            self.changed.notify_all()
        for handle in handles:
            self.cancel(handle)

    # --- what the decoder's own calls are made of

    def follow(
        self, rows: Sequence[Row], inbox: Inbox, *, stream: bool = False
    ) -> Generator[Step, None, None]:
        """Let rows join, and give each step that concerns them; who closes this cancels them."""
        handle = self.enter(rows, inbox=inbox, stream=stream)
        try:
            yield from self.steps(inbox)
        except GeneratorExit:
            sound = [row for row in handle.rows if row.error is None]
            self.cancel(handle)
            # Of a strict run: a drafter that cannot let go.
            failure = next((row.error for row in sound if isinstance(row.error, DrafterError)), None)
            if failure is None:
                raise
            raise failure from failure.__cause__
        finally:
            self.cancel(handle)

    def steps(self, inbox: Inbox) -> Iterator[Step]:
        """Play, or wait for who plays, and give each step that brought something for this inbox."""
        while (step := self.next(inbox)) is not None:
            yield step

    def leave(self, inbox: Inbox) -> None:
        """Cancel all that an inbox is waited for."""
        with self.changed:
            handles = [handle for handle in list(self._handles.values()) if handle.inbox is inbox]
        for handle in handles:
            self.cancel(handle)

    @property
    def vacant(self) -> int:
        """How many more rows could be served at once; below 0: how many wait."""
        return self._scheduler.vacant - len(self._arrived)

    def next(self, inbox: Inbox) -> Step | None:
        """Play, or wait for who plays, until something has happened for this inbox; None: it is over.

        Raises:
            DecoderBusy: it was called from within a step.
        """
        while True:
            with self.changed:
                self._check_reentry()
                self.changed.wait_for(lambda: inbox.steps or inbox.over or self._may_play)
                if inbox.steps:
                    return inbox.steps.popleft()
                if inbox.over:
                    return None
            self._played(lambda: True)

    @property
    def _idle(self) -> bool:
        return self._scheduler.idle and not (self._arrived or self._left or self._ended)

    @property
    def _may_play(self) -> bool:
        return self._player is None and not self._idle

    def _check_reentry(self) -> None:
        if self._player == get_ident():
            raise DecoderBusy(
                "this decoder was called from within a round of its own; call it when the round is over, or "
                "use another decoder"
            )

    @contextmanager
    def _given_back(self) -> Iterator[None]:
        """Let others play when this is over; what was cancelled meanwhile leaves first."""
        try:
            yield
        finally:
            try:
                while not self._give_back(only_if_clean=True):
                    self._sweep()
            except BaseException:
                self._give_back()
                raise

    def _give_back(self, *, only_if_clean: bool = False) -> bool:
        with self.changed:
            if only_if_clean and self._left:
                return False
            self._player = None
            self.changed.notify_all()
            return True

    # --- a step, which one thread at a time plays

    def _step(self) -> None:
        with plain_mode(), self._clock.going():
            self._take()
            self._wake()
            self._ended += self._scheduler.admit()
            turn = self._turn()
            played = None
            if turn.reading is not None:
                self._tried(turn.reading, self._read)
            if turn.batch is not None:
                played = self._tried(turn.batch, self._play)
            self._over(played)

    def _turn(self) -> Turn:
        """Choose what to do; who cannot begin ends."""
        try:
            return self._scheduler.next()
        except Exception as error:  # of a plugin or a model, as a row begins
            self._fail([row for row in self._scheduler.active if not row.read], error)
            return Turn(None, None)

    def _take(self) -> None:
        """Let those in who have come, and those out who want no more."""
        with self.changed:
            self._scheduler.enter(self._arrived)
            self._arrived.clear()
            while self._left:
                self._left.popleft().cancel()
        self._ended += self._scheduler.retire()

    def _sweep(self) -> None:
        """Let what was cancelled leave, outside of any round."""
        with plain_mode(), self._clock.going():
            self._take()
            self._over(None)

    def _over(self, played: Round | None) -> None:
        """Let who has ended leave, and tell whom it concerns."""
        self._ended += self._scheduler.retire()
        self._awake = not self._scheduler.idle
        ended, self._ended = self._ended, []
        if ended:
            self._length.forget(row.id for row in ended)
        self._tell(ended, played)

    def _wake(self) -> None:
        """Begin to decode, after a time in which nobody did."""
        if self._awake or self._scheduler.idle:
            return
        self._awake = True
        self._rounds_out, self._retry = 0, _RETRY_ROUNDS
        self._drafter.renew()
        self._length.begin()
        try:
            self._target.check_copies()
        except UnsupportedModel as error:
            self._ended += self._scheduler.refuse(error)

    def _tried(self, batch: Batch, do: Callable[[Batch], Round | None]) -> Round | None:
        """Do something with rows; if it fails they end with the error, and the other rows go on."""
        try:
            return do(batch)
        except DrafterError as error:  # a strict run ends by it; the next one tries the drafter again
            self._fail(self._scheduler.active, error)
            self._drafter.renew()
            return None
        except Exception as error:  # of a plugin, a constraint or a model
            self._fail([row for row in batch.rows if row.finished is None], error)
            return None
        except BaseException:  # somebody wants to leave, in the midst of a round that others share
            self._scheduler.restart(batch.rows)
            raise

    def _fail(self, rows: Sequence[Row], error: Exception) -> None:
        """End rows with an error; each request has one of its own: no caller writes into another's."""
        errors: dict[int, Exception] = {}
        for row in rows:
            handle = id(self._handles.get(row.id))
            errors.setdefault(handle, error if not errors else copied(error))
            row.fail(errors[handle])

    def _read(self, batch: Batch) -> None:
        with self._clock.part("prefill"):
            outcome = self._target.read(batch)
        with self._clock.part("draft"):
            self._drafter.observe(outcome)

    def _play(self, batch: Batch) -> Round:
        self._invite()
        return play(batch, self._target, self._drafter, self._length, self._clock)

    def _invite(self) -> None:
        """Try a drafter again that failed some rounds ago."""
        if not self._drafter.dropped:
            return
        self._rounds_out += 1
        if self._rounds_out >= self._retry:
            self._rounds_out, self._retry = 0, min(2 * self._retry, _MOST_RETRY_ROUNDS)
            self._drafter.renew()
            self._scheduler.invite()

    def _tell(self, ended: list[Row], played: Round | None) -> None:
        """Make events of what a step brought, and put them where they are waited for."""
        rows = ended if played is None else [*dict.fromkeys([*played.batch.rows, *ended])]
        events = [self._event(row) for row in rows]
        steps: dict[int, tuple[Inbox, list[Event]]] = {}
        with self.changed:
            for event in events:
                if (inbox := event.handle.inbox) is None:
                    self._events.append(event)
                else:
                    steps.setdefault(id(inbox), (inbox, []))[1].append(event)
                    inbox.left -= event.last
            for inbox, own in steps.values():
                if played is not None:
                    inbox.timed.add_seconds(played.seconds)
                inbox.timed.total_seconds = self._clock.now - (inbox.began or 0.0)
                inbox.steps.append(Step(own, played))

    def _event(self, row: Row) -> Event:
        """Say what is new of a row."""
        tokens = tuple(row.tokens[len(row.prompt) + row.told :])
        row.told += len(tokens)
        handle = self._handles[row.id]
        shown = row.text if handle.stream else None
        if row.finished is None:
            return Event(handle, row, tokens, "" if shown is None else shown.take())
        del self._handles[row.id]
        if row.error is None:
            try:
                text = "" if shown is None else shown.finish()
                return Event(handle, row, tokens, text, result_of(row, self._target.tokenizer))
            except Exception as error:  # of a tokenizer
                row.fail(unprintable(error))
        return Event(handle, row, tokens, error=row.error)


@contextmanager
def plain_mode() -> Iterator[None]:
    """Leave a caller's inference mode, whose tensors later calls could not write to; record no gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait for the end of a step: in its midst it would leave rows of others half committed.

    Then the signal's own handler has it; a second one is not held back. Signals come to the main thread only.
    """
    handler: Any = signal.getsignal(signal.SIGINT)
    held: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(frame)
        if len(held) > 1 and callable(handler):
            handler(number, frame)

    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield  # it does not come here; it is ignored, or not Python's
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(held) == 1:
            handler(signal.SIGINT, held[0])
