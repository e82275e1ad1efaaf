"""Ctrl-C waits for the end of a step: in its midst it would leave rows of others half committed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold SIGINT back while this lasts, and then let its own handler have it; a second one is not held.

    Only in the main thread, where Python delivers signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler: Any = signal.getsignal(signal.SIGINT)
    held: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(frame)
        if len(held) > 1 and callable(handler):
            handler(number, frame)

    if not callable(handler):  # ignored, or not Python's
        yield
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(held) == 1:
            handler(signal.SIGINT, held[0])
