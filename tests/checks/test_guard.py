"""A drafter that raises: the run goes on without it, or with `strict` it raises.

In all of these the output is that of plain decoding, one warning names the drafter and what it did, and the
next call tries it again.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from caught import warnings_of
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
    Budget,
    Context,
    Draft,
    DrafterError,
    InvalidParameter,
    Outcome,
    PluginError,
    Rows,
    SpecDecoder,
    TargetInfo,
    UsageError,
)

PROMPT = ids(7, 31)


class Breaking(ScriptedDrafter):
    """Raises in one of its calls, from the n-th on."""

    name = "breaking"

    def __init__(self, call: str, error: BaseException, at: int = 0, k: int = 3) -> None:
        self.call, self.error, self.at = call, error, at
        self.counts: dict[str, int] = {}
        super().__init__(accepting(oracle(tiny_llama(), PROMPT, [1], [2, 3]), [2], k), depth=k)

    def _maybe(self, call: str) -> None:
        self.counts[call] = self.counts.get(call, 0) + 1
        if call == self.call and self.counts[call] > self.at:
            raise self.error

    def bind(self, target: TargetInfo) -> None:
        super().bind(target)
        self._maybe("bind")

    def admit(self, rows: Rows) -> None:
        super().admit(rows)
        self._maybe("admit")

    def propose(self, context: Context, budget: Budget) -> Draft:
        draft = super().propose(context, budget)
        self._maybe("propose")
        return draft

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        self._maybe("observe")

    def release(self, rows: Any) -> None:
        super().release(rows)
        self._maybe("release")


CALLS = [(call, at) for call in ("admit", "propose", "observe", "release") for at in (0, 1, 2)]
ERRORS = [
    ValueError("the reason\nof it"),
    AssertionError(),
    DrafterError("nobody is named"),
    UsageError("no"),
]


@pytest.mark.parametrize(
    ("call", "at", "error"),
    [*((call, at, ERRORS[0]) for call, at in CALLS), *(("propose", 1, error) for error in ERRORS[1:])],
)
def test_a_drafter_that_raises_is_dropped_with_one_warning(
    call: str, at: int, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """B101: in any call, early or late, with rows that are still to be admitted."""
    model = tiny_llama()
    drafter = Breaking(call, error, at)
    decoder = SpecDecoder(model, drafter=drafter, max_batch=1, draft_tokens=None)
    prompts = [PROMPT, [1], [2, 3]]
    for _ in range(2):
        caplog.clear()
        drafter.counts = {}
        results = decoder.generate(prompts, greedy(12))
        assert [one.token_ids for one in results] == [base(model, prompt, 12) for prompt in prompts]
        [warning] = warnings_of(caplog)
        assert "'breaking'" in warning
        assert f"{call} raised {type(error).__name__}" in warning
        assert str(error).splitlines()[:1] == [] or str(error).splitlines()[0] in warning
        assert "\n" not in warning
        assert drafter.counts[call] >= at + 1
        assert not drafter.now


@pytest.mark.parametrize(("call", "at"), CALLS)
def test_a_drafter_that_raises_raises_when_strict(call: str, at: int) -> None:
    """B101: named, chained to what was raised, and the decoder can be used again."""
    model = tiny_llama()
    error = ValueError("the reason")
    drafter = Breaking(call, error, at)
    decoder = SpecDecoder(model, drafter=drafter, max_batch=1, strict=True, draft_tokens=None)
    prompts = [PROMPT, [1], [2, 3]]
    for _ in range(2):
        drafter.counts, drafter.call = {}, call
        with pytest.raises(DrafterError, match=f"'breaking': {call} raised ValueError: the reason") as caught:
            decoder.generate(prompts, greedy(12))
        assert caught.value.__cause__ is error
        assert caught.value.drafter == "breaking"
        assert not drafter.now
        drafter.call = "nothing"
        results = decoder.generate(prompts, greedy(12))
        assert [one.token_ids for one in results] == [base(model, prompt, 12) for prompt in prompts]


def test_a_drafter_whose_error_cannot_be_shown_is_dropped_like_any(caplog: pytest.LogCaptureFixture) -> None:
    """B101: the fence does not fall over what it caught."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    model = tiny_llama()
    decoder = SpecDecoder(model, drafter=Breaking("propose", Mute(), 1))
    assert decoder.generate(PROMPT, greedy(12)).token_ids == base(model, PROMPT, 12)
    [warning] = warnings_of(caplog)
    assert "propose raised Mute: (its text cannot be shown)" in warning


def test_a_dropped_drafter_hears_nothing_more() -> None:
    """B101: but the release of its rows; others are not even admitted."""
    drafter = Breaking("propose", ValueError("no"), at=1)
    decoder = SpecDecoder(tiny_llama(), drafter=drafter, max_batch=2, draft_tokens=None)
    decoder.generate([PROMPT, [1], [2, 3]], greedy(12))
    last = max(i for i, (call, _) in enumerate(drafter.calls) if call == "propose")
    [(call, rows)] = drafter.calls[last + 1 :]
    assert call == "release"
    assert len(rows) == 2


def test_a_failed_release_does_not_hide_the_first_error() -> None:
    """B101: with `strict`, the error that ended the run is the one that is raised."""

    class Twice(Breaking):
        def release(self, rows: Any) -> None:
            super().release(rows)
            raise RuntimeError("second")

    decoder = SpecDecoder(
        tiny_llama(), drafter=Twice("propose", ValueError("first"), 1), strict=True, draft_tokens=None
    )
    with pytest.raises(DrafterError, match="first"):
        decoder.generate(PROMPT, greedy(12))


@pytest.mark.parametrize("error", [UsageError("not this model"), InvalidParameter("layer=9 is wrong")])
def test_a_drafter_may_refuse_a_target_with_a_reason(error: UsageError) -> None:
    """B101: its own error comes through as it is."""
    with pytest.raises(type(error)) as caught:
        SpecDecoder(tiny_llama(), drafter=Breaking("bind", error), draft_tokens=None)
    assert caught.value is error


@pytest.mark.parametrize("error", [KeyError("weights"), RuntimeError("two\nlines"), NotImplementedError()])
def test_a_drafter_that_breaks_while_it_is_bound_is_named(error: Exception) -> None:
    """B101: as one that breaks while it is built."""
    with pytest.raises(PluginError, match="drafter 'breaking'") as caught:
        SpecDecoder(tiny_llama(), drafter=Breaking("bind", error), draft_tokens=None)
    assert caught.value.__cause__ is error
    assert type(error).__name__ in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), SystemExit(3), MemoryError(), torch.OutOfMemoryError("CUDA out of memory")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("call", ["admit", "propose", "observe"])
def test_an_interrupt_or_a_lack_of_memory_is_no_fault_of_the_drafter(
    call: str, error: BaseException, strict: bool
) -> None:
    """B101: it ends the run, and the decoder can be used again."""
    model = tiny_llama()
    drafter = Breaking(call, error, 1)
    decoder = SpecDecoder(model, drafter=drafter, max_batch=1, strict=strict, draft_tokens=None)
    with pytest.raises(type(error)):
        decoder.generate([PROMPT, [1]], greedy(12))
    assert not drafter.now
    drafter.call = "nothing"
    assert decoder.generate(PROMPT, greedy(12)).token_ids == base(model, PROMPT, 12)
