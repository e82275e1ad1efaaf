"""Turns are fair: whatever arrives, a row that decodes moves on, and who waits gets its place."""

from __future__ import annotations

from typing import Any

import pytest
from support import base, greedy, ids, tiny_llama

from specdec_core import SpecDecoder
from specdec_core.engine.handles import Event, Handle, Request


def steps_until(decoder: SpecDecoder, done: Any, most: int = 5000) -> list[list[Event]]:
    seen = []
    for _ in range(most):
        if done():
            return seen
        seen.append(decoder.session.step())
    raise AssertionError("it never ended")


@pytest.mark.parametrize("ragged", [True, False])
def test_a_row_that_decodes_moves_on_at_every_second_step(
    ragged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row of many tokens beside 400 later requests of one token each, of all lengths."""
    model = tiny_llama()
    decoder = SpecDecoder(model, drafter="none", strict=True, max_batch=4)
    if not ragged:
        monkeypatch.setattr(type(decoder.target.runner), "ragged", False)
    session, prompt = decoder.session, ids(9)
    slow = session.submit(Request(prompt, greedy(12)))
    later: list[Handle] = []
    waited, since = [], 0

    def arrive() -> None:
        while len(later) < 400 and session.vacant > 0:
            later.append(session.submit(Request(ids(1 + len(later) % 30, len(later)), greedy(1))))

    while not slow.done:
        arrive()
        events = session.step()
        since += 1
        if any(event.handle is slow and event.token_ids for event in events):
            waited.append(since)
            since = 0
    assert max(waited[1:]) <= 2  # steps between two tokens of its own
    assert sum(handle.done for handle in later) >= 10  # and the others moved, too
    assert slow.rows[0].output == base(model, prompt, 12)
    while len(later) < 400 or not all(handle.done for handle in later):
        arrive()
        session.step()


def test_a_long_prompt_is_read_a_chunk_a_step_beside_the_others() -> None:
    """Whoever decodes does not wait for the whole of it."""
    model = tiny_llama()
    decoder = SpecDecoder(model, drafter="none", strict=True, prefill_chunk=16)
    session = decoder.session
    slow = session.submit(Request(ids(5), greedy(30)))
    session.step()
    long = session.submit(Request(ids(200, 1), greedy(3)))
    before = len(slow.rows[0].output)
    chunks = []
    while not long.rows[0].output:
        session.step()
        chunks.append(long.rows[0].stats.prefill_calls)
    assert chunks[:12] == list(range(1, 13))  # one a step
    assert len(slow.rows[0].output) - before >= 12  # and a token of the other in each
    steps_until(decoder, lambda: slow.done and long.done)
    assert slow.rows[0].output == base(model, ids(5), 30)
    assert long.rows[0].output == base(model, ids(200, 1), 3)


def test_rows_of_one_prompt_wait_for_the_first_to_read_it() -> None:
    """Whatever ended before, and without a memory that grows."""
    model, prompt = tiny_llama(), ids(60)
    decoder = SpecDecoder(model, drafter="none", strict=True)
    for _ in range(2):
        results = decoder.generate([prompt] * 4, greedy(6))
        assert [one.token_ids for one in results] == [base(model, prompt, 6)] * 4
        assert sorted(one.stats.reused_tokens for one in results)[1:] == [59, 59, 59]


def test_what_waits_is_served_in_its_order() -> None:
    model = tiny_llama()
    decoder = SpecDecoder(model, drafter="none", strict=True, max_batch=1)
    handles = [decoder.session.submit(Request(ids(3 + i, i), greedy(2))) for i in range(5)]
    ended: list[Handle] = []
    for events in steps_until(decoder, lambda: all(handle.done for handle in handles)):
        ended += [event.handle for event in events if event.last]
    assert ended == handles
