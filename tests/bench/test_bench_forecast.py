"""Cost curves, the formula's prediction and its reasons, against numbers made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support import ids, plugins, tiny_llama

from specdec_core import SpecdecError
from specdec_core.bench.cost import CostCurve, measure_cost, widths_up_to
from specdec_core.bench.forecast import predict
from specdec_core.bench.stand import Stand
from specdec_core.bench.statistics import Interval
from specdec_core.bench.summary import Figures

CURVE = CostCurve(1, 100, {1: 0.01, 5: 0.02}, {1: 1.0, 5: 2.0})


def figures(method: str = "fast", **changes: Any) -> Figures:
    """100 tokens in 50 rounds of 4 drafted tokens, one of them accepted; 49 forwards behind the prompt."""
    values: dict[str, Any] = {
        "prompts": 1,
        "repeats": 1,
        "new_tokens": 100,
        "seconds": 1.0,
        "speedup": Interval(1.0, 1.0, 1.0),
        "decode_speedup": 1.0,
        "same_ids": 1,
        "forwards": 50,
        "rounds": 50,
        "drafted": 200,
        "accepted": 50,
        "acceptance_by_depth": [0.5, 0.5],
        "decode_by_depth": [0.6, 0.4],
        "widths": {5: 49},
        "block_rows": 49,
        "first_tokens": 1,
        "prefill_seconds": 0.0,
        "draft_seconds": 0.098,
        "target_seconds": 0.9,
    }
    return Figures(method=method, **(values | changes))


PLAIN = figures(
    "none",
    forwards=100,
    rounds=100,
    drafted=0,
    accepted=0,
    acceptance_by_depth=[],
    decode_by_depth=[],
    widths={1: 99},
    block_rows=99,
    draft_seconds=0.0,
    target_seconds=0.99,
)


def test_the_curve_is_read_off_between_its_points_and_beyond() -> None:
    assert [CURVE.at(m) for m in (1, 2, 3, 5, 9)] == pytest.approx([1, 1.25, 1.5, 2, 3])
    assert CURVE.mean({1: 1, 5: 3}) == pytest.approx(1.75)
    assert CURVE.mean({}) == 1
    assert CostCurve.of(CURVE.to_dict()) == CURVE
    assert CostCurve(1, 1, {1: 0.1}, {1: 1.0}).at(5) == 1


def test_widths() -> None:
    assert widths_up_to(1) == [1]
    assert widths_up_to(6) == [1, 2, 3, 5, 6]


def test_the_formula_by_hand() -> None:
    found = predict(figures(), PLAIN, CURVE, measured=0.9)
    assert found is not None
    # t_v(1) = 0.99 s / 99 forwards; d = 0.098 s / 49 forwards / 10 ms = 0.2; c = 0.2 / 4
    assert (found.tokens_per_round, found.verify_cost) == pytest.approx((2.0, 2.0))
    assert (found.draft_cost, found.cost_per_token) == pytest.approx((0.2, 0.05))
    assert found.speedup == pytest.approx(2 / 2.2)
    assert found.reasons == [
        "verify of 5 tokens costs 2.00x one",
        "drafting costs 0.20 forwards a round",
        "blocks took 0.92x of what t_v(m) says",
    ]


def test_reasons_that_the_formula_leaves_out() -> None:
    slow = figures(seconds=2.0, prefill_seconds=0.2, accepted=60, target_seconds=0.98)
    found = predict(slow, PLAIN, CostCurve(1, 9, {1: 0.01}, {1: 1.0}), measured=1.0)
    assert found is not None
    assert found.reasons[0] == "drafting costs 0.20 forwards a round"
    assert "other time 36% (plain 1%)" in found.reasons
    assert "prompts take 10% of the time, which no draft shortens" in found.reasons
    assert "accepted tokens behind the end of a text: 10% of it" in found.reasons
    assert "blocks took 2.00x of what t_v(m) says" in found.reasons


def test_thin_blocks_of_a_batch_are_named() -> None:
    curve = CostCurve(4, 100, CURVE.seconds, CURVE.ratio)
    plain = replace(PLAIN, block_rows=396)  # four rows in each forward
    thin = predict(figures(block_rows=147), plain, curve, measured=0.9)
    full = predict(figures(block_rows=196), plain, curve, measured=0.9)
    assert thin is not None
    assert full is not None
    assert "blocks hold 3.0 of 4 rows on average (plain 4.0)" in thin.reasons
    assert not any("blocks hold" in reason for reason in full.reasons)


def test_a_method_that_does_not_tell_gets_no_prediction() -> None:
    assert predict(figures(decode_by_depth=None), PLAIN, CURVE, 1.0) is None
    assert predict(figures(draft_seconds=None), PLAIN, CURVE, 1.0) is None


# --- measuring ------------------------------------------------------------------------------------


def stand(model: Any) -> Stand:
    return Stand.of(model, None, plugins())


@pytest.mark.parametrize("batch", [1, 2])
def test_every_width_is_timed(batch: int) -> None:
    curve = measure_cost(stand(tiny_llama()), ids(20), batch=batch, widths=[1, 2, 4], cycles=2)
    assert (curve.batch, curve.context, sorted(curve.seconds)) == (batch, 20, [1, 2, 4])
    assert curve.ratio[1] == 1
    assert all(seconds > 0 for seconds in curve.seconds.values())


def test_a_prompt_gives_way_where_the_context_is_short() -> None:
    curve = measure_cost(stand(tiny_llama(64)), ids(60), batch=1, widths=[1, 3], cycles=3)
    assert sorted(curve.seconds) == [1, 3]
    assert curve.context < 60
    with pytest.raises(SpecdecError, match="too short to time blocks of 40 tokens"):
        measure_cost(stand(tiny_llama(6)), ids(4), batch=1, widths=[1, 40], cycles=9)
