"""Requests join and leave the rounds of one decoder, from any thread, and say what they say alone."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support import (
    ByteTokenizer,
    ScriptedDrafter,
    base,
    greedy,
    ids,
    sampled,
    tiny_llama,
    writer,
)
from toys import Rule, digits, exactly
from toys import reference as constrained

from specdec_core import (
    ConstraintError,
    DecoderBusy,
    FinishReason,
    InvalidParameter,
    SamplingParams,
    SpecdecError,
    SpecDecoder,
    VerifierError,
)
from specdec_core.engine.handles import Request

PROMPT = ids(9)


def in_threads(*calls: Callable[[], object], seconds: float = 120) -> None:
    """Run calls at once, each in a thread; raise what any of them raised."""
    failures: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads), "a call never came back"


def rows_a_round(decoder: SpecDecoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the rows of each round, from now on."""
    seen: list[int] = []
    score = decoder.target.score

    def watched(batch: Any, checked: Any) -> Any:
        seen.append(len(batch.rows))
        time.sleep(0.002)  # let the others come
        return score(batch, checked)

    monkeypatch.setattr(decoder.target, "score", watched)
    return seen


def nothing_is_left(decoder: SpecDecoder) -> None:
    session: Any = decoder.session
    assert session._scheduler.idle
    assert not session._handles
    assert not session._ended
    assert not decoder.target.runner._held
    assert session._scheduler._free == list(range(decoder.max_batch))


# --- joining --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["generate", "stream", "rounds"])
def test_calls_of_two_threads_share_rounds(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    decoder = SpecDecoder(model, strict=True)
    seen = rows_a_round(decoder, monkeypatch)
    said: dict[int, list[int]] = {}

    def call(i: int) -> None:
        prompt = ids(6 + i, i)
        if kind == "generate":
            said[i] = decoder.generate(prompt, greedy(25)).token_ids
        elif kind == "stream":
            said[i] = [token for chunk in decoder.stream(prompt, greedy(25)) for token in chunk.token_ids]
        else:
            *_, last = decoder.rounds(prompt, greedy(25))
            [said[i]] = [row.output for row in last.batch.rows if row.prompt == tuple(prompt)]

    in_threads(*(lambda i=i: call(i) for i in range(3)))
    assert said == {i: base(model, ids(6 + i, i), 25) for i in range(3)}
    assert max(seen) == 3
    nothing_is_left(decoder)


def test_streams_of_one_event_loop_share_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    decoder = SpecDecoder(model, strict=True)
    seen = rows_a_round(decoder, monkeypatch)

    async def read(i: int) -> list[int]:
        stream = decoder.astream(ids(5, i), greedy(20))
        return [token async for chunk in stream for token in chunk.token_ids]

    async def both() -> Any:
        return await asyncio.gather(read(1), read(2))

    assert asyncio.run(both()) == [base(model, ids(5, i), 20) for i in (1, 2)]
    assert max(seen) == 2


def test_a_call_in_the_midst_of_a_stream_joins_it() -> None:
    """In one thread: what a stream has not asked for yet is kept for it."""
    model = tiny_llama()
    decoder = SpecDecoder(model, strict=True)
    stream = decoder.stream(PROMPT, greedy(20))
    said = list(next(stream).token_ids)
    assert decoder.generate(ids(5), greedy(9)).token_ids == base(model, ids(5), 9)
    said += [token for chunk in stream for token in chunk.token_ids]
    assert said == base(model, PROMPT, 20)


def test_rows_of_all_kinds_play_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the verifier that fits it."""
    model = tiny_llama()
    decoder = SpecDecoder(model, drafter="early_exit:layer=1,draft=sampled", strict=True)
    seen = rows_a_round(decoder, monkeypatch)
    kinds = [
        greedy(14),
        SamplingParams(max_new_tokens=14, temperature=0.9, seed=5),
        SamplingParams(max_new_tokens=14, temperature=0.9),
        SamplingParams(max_new_tokens=14, constraint=digits(), ignore_eos=True),
    ]
    results = decoder.generate([PROMPT] * 4, kinds)
    assert [one.verifier for one in results] == ["greedy", "match", "block", "greedy"]
    assert results[0].token_ids == base(model, PROMPT, 14)
    assert results[1].token_ids == sampled(model, PROMPT, kinds[1])
    assert results[3].token_ids == constrained(PROMPT, kinds[3], None)[: len(results[3].token_ids)]
    assert len(results[3].token_ids) >= 2
    assert max(seen) == 4


def test_a_source_that_waits_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows under way end while the next request is waited for; it is not given up either."""
    model = tiny_llama()
    decoder = SpecDecoder(model, drafter="none", strict=True, max_batch=4)
    go_on = threading.Event()

    def requests() -> Iterator[tuple[int, list[int], SamplingParams]]:
        yield 0, ids(5), greedy(9)
        assert go_on.wait(60)
        yield 1, ids(6), greedy(9)

    finished = decoder.finished(requests())
    assert next(finished)[0] == 0  # today it would wait for the second
    go_on.set()
    assert [(key, result.token_ids) for key, result in finished] == [(1, base(model, ids(6), 9))]  # type: ignore[union-attr]


def test_a_source_that_fails_loses_nothing() -> None:
    model = tiny_llama()
    decoder = SpecDecoder(model, drafter="none", strict=True)

    def requests() -> Iterator[tuple[int, list[int], SamplingParams]]:
        yield 0, ids(5), greedy(9)
        raise OSError("the disk is gone")

    finished = decoder.finished(requests())
    assert next(finished)[0] == 0
    with pytest.raises(OSError, match="the disk is gone"):
        next(finished)
    nothing_is_left(decoder)


# --- by hand --------------------------------------------------------------------------------------


def test_submit_step_and_cancel_by_hand() -> None:
    text = "abcdefgh"
    decoder = SpecDecoder(writer(text), ByteTokenizer(), drafter="none", strict=True)
    session = decoder.session
    assert session.step() == []
    assert not session.wait(0)
    one = session.submit(Request("a", greedy(4), stream=True))
    two = session.submit(Request("c", SamplingParams(max_new_tokens=50, n=2)))
    assert session.wait(0)
    seen: dict[Any, str] = {one: "", two: ""}
    for step in itertools.count():
        for event in session.step():
            seen[event.handle] += event.text
            if event.last and event.handle is one:
                assert event.result is not None
                assert (event.result.text, event.result.finish_reason) == ("bcde", "length")
        if step == 5:
            session.cancel(two)
        if one.done and two.done:
            break
    assert seen == {one: "bcde", two: ""}
    assert [row.finished for row in two.rows] == [FinishReason.CANCELLED] * 2
    assert two.rows[0].output == base(decoder.target.model, [ord("c")], 6)
    nothing_is_left(decoder)
    session.close()
    with pytest.raises(InvalidParameter, match="closed"):
        decoder.generate("a", greedy(2))


def test_what_waits_for_a_place_can_be_cancelled() -> None:
    decoder = SpecDecoder(tiny_llama(), drafter="none", strict=True, max_batch=1)
    first = decoder.session.submit(Request(ids(4), greedy(5)))
    second = decoder.session.submit(Request(ids(5), greedy(5)))
    decoder.session.step()
    decoder.session.cancel(second)
    assert second.done
    while not first.done:
        decoder.session.step()
    assert not second.rows[0].output
    nothing_is_left(decoder)


def test_a_request_is_cancelled_after_the_round_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """From another thread, while one plays."""
    model = tiny_llama()
    decoder = SpecDecoder(model, drafter="none", strict=True)
    handle = decoder.session.submit(Request(PROMPT, greedy(400)))
    score = decoder.target.score

    def watched(batch: Any, checked: Any) -> Any:
        if len(handle.rows[0].output) == 3:
            canceller = threading.Thread(target=decoder.session.cancel, args=(handle,))
            canceller.start()
            canceller.join(60)
        return score(batch, checked)

    monkeypatch.setattr(decoder.target, "score", watched)
    while not handle.done:
        decoder.session.step()
    assert handle.rows[0].finished is FinishReason.CANCELLED
    assert handle.rows[0].output == base(model, PROMPT, 4)
    nothing_is_left(decoder)


def test_a_decoder_is_not_called_from_within_its_own_round() -> None:
    """It would wait for itself."""
    caught: list[BaseException] = []

    def script(ask: Any) -> list[Any]:
        for call in (lambda: decoder.generate([1], greedy(1)), decoder.session.step):
            try:
                call()
            except DecoderBusy as error:
                caught.append(error)
        return []

    decoder = SpecDecoder(tiny_llama(), drafter=ScriptedDrafter(script, depth=2), draft_tokens=2, strict=True)
    assert decoder.generate(PROMPT, greedy(4)).token_ids == base(tiny_llama(), PROMPT, 4)
    assert len(caught) >= 2
    assert "from within a round" in str(caught[0])


# --- faults ---------------------------------------------------------------------------------------


def test_a_stuck_constraint_ends_its_row_alone() -> None:
    """What the others of the call have said comes with the error."""
    model = tiny_llama()
    decoder = SpecDecoder(model, drafter="none", strict=True)
    stuck = Rule("stuck", lambda text: {7} if len(text) < 3 else set(), lambda text: False)
    params = [greedy(9), SamplingParams(max_new_tokens=9, constraint=stuck, ignore_eos=True), greedy(5)]
    with pytest.raises(ConstraintError, match="stuck") as caught:
        decoder.generate([PROMPT, ids(4), ids(5)], params)
    results: Any = caught.value.results
    assert [one and one.token_ids for one in results] == [
        base(model, PROMPT, 9),
        None,
        base(model, ids(5), 5),
    ]
    nothing_is_left(decoder)


def test_a_logits_processor_that_raises_ends_its_row_alone() -> None:
    model = tiny_llama()

    def broken(seen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if seen.shape[1] > len(PROMPT) + 2:
            raise ZeroDivisionError("no")
        return scores

    decoder = SpecDecoder(model, strict=True)
    params = [greedy(9, logits_processors=(broken,)), greedy(9)]
    with pytest.raises(
        InvalidParameter, match=r"a logits processor .* raised ZeroDivisionError: no"
    ) as caught:
        decoder.generate([PROMPT, ids(5)], params)
    results: Any = caught.value.results
    assert results[1].token_ids == base(model, ids(5), 9)


def test_a_verifier_that_fails_ends_the_rows_that_are_its(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    decoder = SpecDecoder(model, drafter="none", strict=True)
    [match] = [verifier for verifier in decoder._verifiers if verifier.name == "match"]

    def broken(*_: Any) -> Any:
        raise IndexError("9")

    monkeypatch.setattr(match, "verify", broken)
    params = [greedy(9), SamplingParams(max_new_tokens=9, temperature=1.0, seed=3)]
    with pytest.raises(VerifierError, match="verifier 'match': verify raised IndexError") as caught:
        decoder.generate([PROMPT, ids(5)], params)
    results: Any = caught.value.results
    assert results[0].token_ids == base(model, PROMPT, 9)
    nothing_is_left(decoder)


class Halting(ByteTokenizer):
    """Cannot print a d, nor read an x."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        if "x" in text:
            raise ValueError("cannot read x")
        return super().__call__(text)

    def decode(self, token_ids: Any, *args: Any, **options: Any) -> str:
        if ord("d") in list(token_ids):
            raise ValueError("cannot print d")
        return super().decode(token_ids, *args, **options)


def test_a_text_that_cannot_be_printed_costs_its_row_alone() -> None:
    """Whether it is looked at while it grows, for a stop string, or at its end."""
    decoder = SpecDecoder(writer("abcdefgh"), Halting(), drafter="none", strict=True)
    for options in ({"stop": "zz"}, {}):
        with pytest.raises(
            SpecdecError, match="cannot print this request's tokens: it raised ValueError"
        ) as caught:
            decoder.generate(["e", "a", "f"], [greedy(5), greedy(9, **options), greedy(4)])
        results: Any = caught.value.results
        assert [one and one.text for one in results] == ["fghab", None, "ghab"]
        nothing_is_left(decoder)


def test_a_prompt_that_cannot_be_read_costs_its_request_alone() -> None:
    decoder = SpecDecoder(writer("abcdefgh"), Halting(), drafter="none", strict=True)
    found = dict(decoder.finished([(0, "a", greedy(1)), (1, "x", greedy(1)), (2, "f", greedy(2))]))
    assert [getattr(found[key], "text", None) for key in range(3)] == ["b", None, "gh"]
    assert "cannot be encoded: ValueError: cannot read x" in str(found[1])


def test_callers_of_one_failed_round_have_errors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was finished is written into them."""
    model = tiny_llama()
    decoder = SpecDecoder(model, drafter="none", strict=True)
    score, together = decoder.target.score, threading.Barrier(2)
    caught: dict[int, Any] = {}

    def failing(batch: Any, checked: Any) -> Any:
        time.sleep(0.01)
        if len(batch.rows) == 5:
            raise RuntimeError("a forward failed")
        return score(batch, checked)

    monkeypatch.setattr(decoder.target, "score", failing)

    def call(n: int) -> None:
        together.wait(60)
        with pytest.raises(RuntimeError, match="a forward failed") as info:
            decoder.generate([ids(4, i) for i in range(n)], greedy(400))
        caught[n] = info.value

    in_threads(lambda: call(2), lambda: call(3))
    assert caught[2] is not caught[3]
    assert {n: len(error.results) for n, error in caught.items()} == {2: 2, 3: 3}


def test_events_of_requests_by_hand_are_kept_whoever_plays() -> None:
    model = tiny_llama()
    decoder = SpecDecoder(model, drafter="none", strict=True)
    handle = decoder.session.submit(Request(PROMPT, greedy(9)))
    in_threads(lambda: decoder.generate(ids(4), greedy(20)))
    assert handle.done
    events = decoder.session.step()
    assert [token for event in events for token in event.token_ids] == base(model, PROMPT, 9)
    assert events[-1].result is not None
    assert decoder.session.step() == []


def test_what_joins_a_feed_that_is_closed_meanwhile_leaves_too() -> None:
    class Slow(ByteTokenizer):
        reading, go_on = threading.Event(), threading.Event()

        def __call__(self, text: str) -> dict[str, list[int]]:
            if text == "b":
                self.reading.set()
                assert self.go_on.wait(60)
            return super().__call__(text)

    decoder = SpecDecoder(writer("abcdefgh"), Slow(), drafter="none", strict=True)
    finished = decoder.finished([(0, "a", greedy(2)), (1, "b", greedy(500))])
    assert next(finished)[0] == 0
    assert Slow.reading.wait(60)
    finished.close()
    Slow.go_on.set()
    for thread in threading.enumerate():
        if thread.name == "specdec-feed":
            thread.join(60)
    assert not decoder.session.wait(0)
    nothing_is_left(decoder)


def test_a_strict_run_does_not_go_on_without_its_drafter() -> None:
    """Who was in it hears of it, and who comes later is drafted for."""
    model, calls = tiny_llama(), itertools.count()

    def script(ask: Any) -> list[int]:
        if next(calls) == 4:
            raise ValueError("once")
        return [1]

    drafter = ScriptedDrafter(script, depth=2)
    decoder = SpecDecoder(model, drafter=drafter, draft_tokens=2, strict=True)
    both = [decoder.session.submit(Request(ids(5, i), greedy(30))) for i in range(2)]
    while not both[0].done:
        decoder.session.step()
    assert all("once" in str(handle.rows[0].error) for handle in both)
    result = decoder.generate(PROMPT, greedy(9))
    assert result.token_ids == base(model, PROMPT, 9)
    assert result.stats.drafted_tokens > 0


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
def test_ctrl_c_leaves_the_requests_of_others_whole() -> None:
    """At any moment: it waits for the end of a step."""
    model, rng = tiny_llama(), random.Random(3)
    expected = [base(model, ids(6, i), 12) for i in range(3)]
    old = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    interrupted = 0
    try:
        for _ in range(12):
            decoder, said = SpecDecoder(model, strict=True, max_batch=3), list[list[int]]()

            def other(decoder: SpecDecoder = decoder, said: list[list[int]] = said) -> None:
                said += [decoder.generate(ids(6, i), greedy(12)).token_ids for i in range(3)]

            thread = threading.Thread(target=other, daemon=True)
            thread.start()
            for _ in range(3):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.001 + 0.02 * rng.random())
                    decoder.generate(PROMPT, greedy(200))
                except KeyboardInterrupt:
                    interrupted += 1
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            thread.join(60)
            assert said == expected
            nothing_is_left(decoder)
    finally:
        signal.signal(signal.SIGALRM, old)
    assert interrupted > 6


def test_who_leaves_in_mid_round_does_not_take_the_others_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the thread that plays: the rows of other callers begin again where they stood."""
    model = tiny_llama()
    decoder = SpecDecoder(model, strict=True)
    other = decoder.session.submit(Request(ids(7), greedy(30)))
    for name in ("score", "keep"):
        real, calls = getattr(decoder.target, name), itertools.count()

        def broken(*args: Any, real: Any = real, calls: Any = calls) -> Any:
            result = real(*args)
            if next(calls) == 4:
                raise KeyboardInterrupt
            return result

        with monkeypatch.context() as patch:
            patch.setattr(decoder.target, name, broken)
            with pytest.raises(KeyboardInterrupt):
                decoder.generate(PROMPT, greedy(30))
        assert not other.done
    while not other.done:
        decoder.session.step()
    assert other.rows[0].output == base(model, ids(7), 30)
    nothing_is_left(decoder)


def test_a_drafter_that_failed_once_is_tried_again_after_some_rounds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In a session that is never idle."""
    model, calls = tiny_llama(), itertools.count()

    def script(ask: Any) -> list[int]:
        if next(calls) == 3:
            raise ValueError("once")
        return [1]

    drafter = ScriptedDrafter(script, depth=2)
    decoder = SpecDecoder(model, drafter=drafter, draft_tokens=2)
    prompt = ids(9)
    assert decoder.generate(prompt, greedy(120)).token_ids == base(model, prompt, 120)
    assert next(calls) > 10
    assert len([record for record in caplog.records if "once" in record.message]) == 1


# --- all at once ----------------------------------------------------------------------------------


def left_early(stream: Any, taken: int) -> list[int]:
    """Give the tokens of so many chunks, and want no more."""
    said = [token for chunk in itertools.islice(stream, taken) for token in chunk.token_ids]
    stream.close()
    return said


def says_what_it_says_alone(
    decoder: SpecDecoder, plain: Callable[[Any, int], list[int]], rng: random.Random
) -> bool:
    """Make a request of some kind, and compare."""
    model = tiny_llama()
    prompt, n, kind = ids(rng.randrange(1, 40), rng.randrange(9)), rng.randrange(0, 14), rng.randrange(6)
    if kind == 0:
        return decoder.generate(prompt, greedy(n)).token_ids == plain(prompt, n)
    if kind == 1:
        params = SamplingParams(max_new_tokens=n, temperature=0.8, seed=rng.randrange(100))
        return decoder.generate(prompt, params).token_ids == sampled(model, prompt, params)
    if kind == 2:  # a stream that is left
        said = left_early(decoder.stream(prompt, greedy(n + 2)), rng.randrange(1, 3))
        return said == plain(prompt, n + 2)[: len(said)]
    if kind == 3:
        chunks = [token for chunk in decoder.stream(prompt, greedy(n)) for token in chunk.token_ids]
        return chunks == plain(prompt, n)
    if kind == 4:
        params = SamplingParams(max_new_tokens=8, constraint=exactly(11, 12, 13), ignore_eos=True)
        return decoder.generate(prompt, params).token_ids == [11, 12, 13]
    result = decoder.generate(prompt, SamplingParams(max_new_tokens=n, temperature=1.0))
    return len(result.token_ids) == n


def test_twenty_threads_of_twenty_requests_of_all_kinds() -> None:
    """With cancellations and a drafter that fails now and then: each says what it says alone."""
    model, random_ = tiny_llama(), random.Random(7)
    lock = threading.Lock()

    def plain(prompt: list[int], n: int) -> list[int]:
        with lock:  # what is known of a text is shared, and grows
            return base(model, prompt, n)

    def script(ask: Any) -> list[int]:
        with lock:
            chance = random_.random()
        if chance < 0.01:
            raise ValueError("now and then")
        return [] if chance < 0.3 else [ask.tokens[-1], 5][: ask.depth]

    decoder = SpecDecoder(model, drafter=ScriptedDrafter(script, depth=3), draft_tokens=3, max_batch=6)
    done: list[bool] = []

    def many(seed: int) -> None:
        rng = random.Random(seed)
        done.extend(says_what_it_says_alone(decoder, plain, rng) for _ in range(20))

    in_threads(*(lambda seed=seed: many(seed) for seed in range(20)))
    assert len(done) == 400
    assert all(done)
    nothing_is_left(decoder)
    assert not decoder.drafter.now  # type: ignore[attr-defined]
    gc.collect()
