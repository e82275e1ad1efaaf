"""A run that ends by an exception, is abandoned, or is met by another leaves the decoder usable."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import (
    ScriptedDrafter,
    accepting,
    base,
    greedy,
    ids,
    oracle,
    tiny_llama,
)

from specdec_core import (
    InvalidParameter,
    SpecDecoder,
)

PROMPT = ids(7, 31)


@pytest.fixture
def failing_forward(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Let the model's n-th forward from now on raise; `monkeypatch.undo` ends it."""

    def arm(decoder: SpecDecoder, at: int, error: BaseException) -> None:
        model = decoder.target.model
        forward, calls = model.forward, [0]

        def forward_or_raise(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == at:
                raise error
            return forward(*args, **kwargs)

        monkeypatch.setattr(model, "forward", forward_or_raise)

    yield arm
    monkeypatch.undo()


def perfect(prompts: list[list[int]], k: int = 3, **options: Any) -> SpecDecoder:
    drafter = ScriptedDrafter(accepting(oracle(tiny_llama(), *prompts), [k, 0, 1], k), depth=k)
    return SpecDecoder(
        tiny_llama(), drafter=drafter, strict=True, prefill_chunk=8, **{"draft_tokens": None, **options}
    )


@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("at", [1, 2, 3, 4, 6])
def test_an_exception_in_a_forward_leaves_the_decoder_usable(
    at: int, error: BaseException, failing_forward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B101, invariant 5: in a prefill chunk, the first round, a later one."""
    model, prompts = tiny_llama(), [ids(20, 32), [4], ids(9, 32)]
    decoder = perfect(prompts, max_batch=2)
    failing_forward(decoder, at, error)
    with pytest.raises(type(error)) as caught:
        decoder.generate(prompts, greedy(12))
    assert caught.value is error
    monkeypatch.undo()
    results = decoder.generate(prompts, greedy(12))
    assert [one.token_ids for one in results] == [base(model, prompt, 12) for prompt in prompts]


def raise_after(run: Iterator[Any], rounds: int) -> None:
    for i, _ in enumerate(run):
        if i == rounds:
            raise ZeroDivisionError


@pytest.mark.parametrize("taken", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["close", "forget", "raise"])
@pytest.mark.parametrize("kind", ["stream", "rounds"])
def test_an_abandoned_run_leaves_the_decoder_usable(kind: str, how: str, taken: int) -> None:
    """B101, invariant 5."""
    model = tiny_llama()
    decoder = perfect([PROMPT])
    drafter: Any = decoder.drafter
    run: Any = getattr(decoder, kind)(PROMPT, greedy(12))
    if how == "raise":
        with pytest.raises(ZeroDivisionError):
            raise_after(run, taken)
    else:
        for _ in range(taken):
            next(run)
    if how == "forget":
        del run
    else:
        run.close()
    assert not drafter.now
    assert decoder.generate(PROMPT, greedy(12)).token_ids == base(model, PROMPT, 12)
    assert [token for chunk in decoder.stream(PROMPT, greedy(12)) for token in chunk.token_ids] == base(
        model, PROMPT, 12
    )


def test_a_decoder_may_move_from_thread_to_thread() -> None:
    """B101: one at a time."""
    model = tiny_llama()
    decoder = perfect([PROMPT])
    said: list[list[int]] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: said.append(decoder.generate(PROMPT, greedy(9)).token_ids))
        thread.start()
        thread.join()
    assert said == [base(model, PROMPT, 9)] * 2


def test_a_run_that_was_not_started_does_not_keep_the_decoder() -> None:
    """B101: nothing happens before the first chunk is asked for, but the arguments are checked."""
    decoder = perfect([PROMPT])
    waiting = decoder.stream(PROMPT, greedy(5))
    assert decoder.generate(PROMPT, greedy(5)).token_ids == base(tiny_llama(), PROMPT, 5)
    assert sum(len(chunk.token_ids) for chunk in waiting) == 5
    for call in (decoder.stream, decoder.rounds):
        with pytest.raises(InvalidParameter):
            call([], greedy(5))


def test_a_failed_run_does_not_spoil_the_rows_of_the_next(
    failing_forward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B101: a drafter's index and the target's cache begin anew."""
    model = tiny_llama()
    decoder = SpecDecoder(model, strict=True)
    failing_forward(decoder, 3, ValueError("no"))
    prompts = [[1, 2, 3, 1, 2, 3], [9, 8, 9, 8]]
    with pytest.raises(ValueError, match="no"):
        decoder.generate(prompts, greedy(12))
    monkeypatch.undo()
    for prompt in reversed(prompts):
        assert decoder.generate(prompt, greedy(12)).token_ids == base(model, prompt, 12)
