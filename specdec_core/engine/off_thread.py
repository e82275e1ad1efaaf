"""Drain an ordinary iterator from an event loop without blocking it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_END = object()


async def off_thread(source: Generator[T, None, None]) -> AsyncIterator[T]:
    """Yield what `source` yields, each step made in one worker thread.

    Closing this iterator, or cancelling who awaits it, closes the source after the step under way.
    """
    loop = asyncio.get_running_loop()
    worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="specdec-stream")
    try:
        while (item := await loop.run_in_executor(worker, next, source, _END)) is not _END:
            yield item  # type: ignore[misc]
    finally:
        # The one worker takes this behind a step that was abandoned while it ran.
        await asyncio.shield(loop.run_in_executor(worker, source.close))
        worker.shutdown(wait=False)
