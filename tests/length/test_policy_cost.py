"""What `auto` costs a round: Python calls, counted, and state, bounded."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from simulation import Batch, Row
from support import greedy, tiny_llama

from specdec_core import Capabilities, SpecDecoder
from specdec_core.length.adaptive import AdaptiveLength
from specdec_core.length.costs import RoundCosts


def calls(draft_tokens: Any) -> float:
    """Python calls of this project's code in a round of `prompt_lookup` that drafts; the mean of some."""
    run = SpecDecoder(tiny_llama(), draft_tokens=draft_tokens, strict=True).rounds(
        [3, 4, 5, 6] * 5, greedy(200)
    )
    counted, count = [], 0

    def profile(frame: Any, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call" and "specdec" in frame.f_code.co_filename

    for turn in range(40):
        count = 0
        sys.setprofile(profile)
        try:
            done = next(run)
        finally:
            sys.setprofile(None)
        if turn >= 8 and done.draft.nodes:
            counted.append(count)
    run.close()
    assert counted
    return sum(counted) / len(counted)


def test_a_round_costs_hardly_more_calls_than_at_a_fixed_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert calls("auto") <= 1.3 * calls(20)


def test_rows_that_vanish_and_rounds_that_fail_leave_nothing() -> None:
    policy = AdaptiveLength(Capabilities(frozenset(), 5, on_host=True), RoundCosts("cpu"), lambda: 0.0)
    for i in range(3000):
        policy.plan(Batch([Row(i, [1], [0] * 50)]))  # type: ignore[arg-type]
    assert len(policy._rows) <= 1024
    policy.forget(range(3000))
    assert not policy._rows


def test_costs_are_bounded_in_kinds() -> None:
    costs = RoundCosts("cpu")
    for i in range(100):
        costs.add(str(i), 1, 0, 1.0)
    assert len(costs._kinds) <= 8


def test_a_line_is_learned_and_the_first_tokens_may_be_free() -> None:
    costs = RoundCosts("cpu", ragged=True)
    for _ in range(100):
        for m in (0, 2, 6, 12, 20):
            costs.add("", 1, m, max(1.0, 0.85 + 0.03 * m))
    line = costs.line("", 1)
    assert line(0) == pytest.approx(1.0, rel=0.05)
    assert line(2) < 1.05
    assert line(20) == pytest.approx(1.45, rel=0.05)
