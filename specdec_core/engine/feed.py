"""Requests from an iterator, asked for in a thread of its own: an iterator that waits stops nobody."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from specdec_core.engine.handles import Inbox, Step
from specdec_core.engine.session import Session

T = TypeVar("T")
R = TypeVar("R")

_MOST_REFUSED = 64  # that nobody has looked at yet
_PATIENCE = 0.02  # seconds: what comes sooner after another request begins together with it


class Feed(Generic[T, R]):
    """Lets requests join a session, one ahead of those that are served.

    Args:
        enter: lets one join; returns what was refused, if it was.
    """

    def __init__(
        self, session: Session, inbox: Inbox, requests: Iterable[T], enter: Callable[[T], R | None]
    ) -> None:
        self._session, self._inbox, self._enter = session, inbox, enter
        self._requests = iter(requests)
        self._refused: deque[R] = deque()
        self._error: BaseException | None = None  # of what gives the requests
        self._latest = time.monotonic()  # when a request came last
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="specdec-feed", daemon=True)

    def steps(self) -> Iterator[Step]:
        """Give each step that brought something, until all requests have ended.

        Raises:
            Exception: what gives the requests raised it; those before have been finished.
        """
        self._thread.start()
        while True:
            self._gather()
            step = self._session.next(self._inbox)
            if step is None:
                break
            yield step
        if self._error is not None:
            raise self._error

    def refused(self) -> R:
        """Give what was refused, of a step without events."""
        with self._session.changed:
            self._session.changed.notify_all()
            return self._refused.popleft()

    def close(self) -> None:
        """Take no more, and cancel what is under way."""
        with self._session.changed:
            self._closed, self._inbox.open = True, False
            self._session.changed.notify_all()
        self._session.leave(self._inbox)

    def _gather(self) -> None:
        """Wait a little for requests that come at once, as long as there are places for them."""
        with self._session.changed:
            while self._inbox.open and self._session.vacant >= 0 and not self._inbox.steps:
                left = self._latest + _PATIENCE - time.monotonic()
                if left <= 0 or not self._session.changed.wait(left):
                    return

    def _wants_more(self) -> bool:
        return self._closed or (self._session.vacant >= 0 and len(self._refused) < _MOST_REFUSED)

    def _run(self) -> None:
        changed = self._session.changed
        try:
            for request in self._requests:
                if self._closed:
                    return
                refused = self._enter(request)
                with changed:
                    self._latest = time.monotonic()
                    if refused is not None:
                        self._refused.append(refused)
                        self._inbox.steps.append(Step([]))
                    changed.notify_all()
                    changed.wait_for(self._wants_more)
                if not self._inbox.open:  # it was closed; this has joined meanwhile
                    self._session.leave(self._inbox)
        except BaseException as error:  # the caller's: it is raised where the caller looks
            self._error = error
        finally:
            with changed:
                self._inbox.open = False
                changed.notify_all()
