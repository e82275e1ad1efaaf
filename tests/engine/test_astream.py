"""The asynchronous stream gives what `stream` gives and leaves the event loop free."""

from __future__ import annotations

import asyncio
import threading
from contextlib import nullcontext
from typing import Any

import pytest
from support import base, decoder_for, greedy, tiny_llama

PROMPT = [3, 4, 5, 6] * 3


def test_chunks_are_those_of_the_plain_stream() -> None:
    decoder = decoder_for(tiny_llama())

    async def collect() -> list[Any]:
        return [chunk async for chunk in decoder.astream(PROMPT, greedy(20))]

    chunks = asyncio.run(collect())
    assert [chunk.token_ids for chunk in chunks] == [c.token_ids for c in decoder.stream(PROMPT, greedy(20))]
    assert chunks[-1].result.token_ids == base(tiny_llama(), PROMPT, 20)


def test_the_event_loop_runs_while_a_round_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_for(tiny_llama(), "none")
    score, loop_thread = decoder.target.score, threading.get_ident()
    ticked, waited = threading.Event(), []

    def waiting(*args: Any) -> Any:
        assert threading.get_ident() != loop_thread
        ticked.clear()
        waited.append(ticked.wait(timeout=60))
        return score(*args)

    monkeypatch.setattr(decoder.target, "score", waiting)

    async def run() -> None:
        async def tick() -> None:
            while True:
                ticked.set()
                await asyncio.sleep(0.005)

        ticking = asyncio.create_task(tick())
        async for _ in decoder.astream(PROMPT, greedy(5)):
            pass
        ticking.cancel()

    asyncio.run(run())
    assert waited == [True] * 5


@pytest.mark.parametrize("how", ["break", "cancel"])
def test_leaving_early_frees_the_decoder(how: str) -> None:
    decoder = decoder_for(tiny_llama())

    async def leave() -> None:
        async def read() -> None:
            stream = decoder.astream(PROMPT, greedy(200))
            async for _ in stream:
                if how == "break":
                    break
            await stream.aclose()  # type: ignore[attr-defined]

        task = asyncio.create_task(read())
        if how == "cancel":
            await asyncio.sleep(0.02)
            task.cancel()
        with pytest.raises(asyncio.CancelledError) if how == "cancel" else nullcontext():
            await task

    asyncio.run(leave())
    assert decoder.generate(PROMPT, greedy(9)).token_ids == base(tiny_llama(), PROMPT, 9)
