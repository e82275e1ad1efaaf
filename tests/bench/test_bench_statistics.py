"""Medians, paired bootstrap, and figures from hand-made units."""

from __future__ import annotations

from typing import Any

import pytest

from specdec_core.bench.statistics import bootstrap, typical_ratio
from specdec_core.bench.summary import summarize


def test_the_ratio_is_the_geometric_mean_of_medians() -> None:
    assert typical_ratio([[[1, 2, 100]], [[8, 8, 8]]]) == pytest.approx(4)
    assert typical_ratio([[[1, 2, 3], [2, 2, 2]], [[16]]]) == pytest.approx(4)


def test_constant_ratios_leave_no_doubt() -> None:
    found = bootstrap([[[1.5] * 3, [1.5] * 3]])
    assert (found.low, found.value, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_the_interval_of_one_prompt_is_that_of_its_medians() -> None:
    # Of 27 equally likely draws of three repeats, 7 have the median 1, 13 have 2, 7 have 3.
    assert bootstrap([[[1, 2, 3]]]).low == pytest.approx(1)
    assert bootstrap([[[1, 2, 3]]]).high == pytest.approx(3)
    narrow = bootstrap([[[1, 2, 3]]], level=0.4)  # quantiles 0.3 and 0.7
    assert (narrow.low, narrow.high) == pytest.approx((2, 2))


def test_prompts_are_drawn_again_within_their_category() -> None:
    apart = bootstrap([[[1.0]], [[4.0]]])
    assert (apart.low, apart.value, apart.high) == pytest.approx((2, 2, 2))
    together = bootstrap([[[1.0], [4.0]]])  # both the first: 1; one of each: 2; both the second: 4
    assert (together.low, together.value, together.high) == pytest.approx((1, 2, 4))


def test_equal_data_give_equal_intervals() -> None:
    data = [[[1.0 + i / 10 + j * i / 50 for j in range(5)] for i in range(9)]]
    assert bootstrap(data) == bootstrap(data)
    assert bootstrap(data) != bootstrap(data, seed=1)


@pytest.mark.parametrize("data", [[], [[]], [[[]]], [[[1.0, 0.0]]]])
def test_nothing_to_estimate_from(data: Any) -> None:
    with pytest.raises(ValueError, match=r"nothing to estimate|above 0"):
        bootstrap(data)


# --- from units to figures ------------------------------------------------------------------------


def run(seconds: float, ids: list[list[int]], **more: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "seconds": seconds,
        "token_ids": ids,
        "forwards": 4,
        "rounds": 4,
        "drafted": 0,
        "accepted": 0,
        "histogram": [4],
        "widths": {"1": 3},
        "block_rows": 3,
        "prefill_seconds": seconds / 4,
        "draft_seconds": 0.0,
        "target_seconds": seconds / 2,
    }
    return plain | more


def unit(group: str, repeat: int, none: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    category = group[0]
    runs = {"none": none, "fast": other}
    return {"group": group, "repeat": repeat, "category": category, "runs": runs}


def test_figures_by_hand() -> None:
    ids = [[1, 2, 3, 4]]
    drafted = {
        "forwards": 2,
        "rounds": 2,
        "drafted": 4,
        "accepted": 2,
        "histogram": [1, 0, 1],
        "widths": {"3": 1},
    }
    units = [
        # The machine becomes four times as slow from repeat to repeat: the ratio stays.
        unit("a1", repeat, run(4 * pace, ids), run(2 * pace, ids, **drafted))
        for repeat, pace in ((1, 1.0), (2, 4.0), (3, 16.0))
    ]
    units += [unit("b1", repeat, run(8.0, ids), run(1.0, [[1, 2, 3, 9]], **drafted)) for repeat in (1, 2, 3)]
    found = summarize(units, "fast", "none")
    row = found.to_dict()
    assert row["speedup"] == pytest.approx(4)  # geometric mean of 2 and 8
    assert row["speedup_low"] == row["speedup_high"] == pytest.approx(4)
    assert row["seconds"] == pytest.approx(8 + 1)
    assert row["tokens_per_second"] == pytest.approx(8 / 9)
    assert (row["prompts"], row["same_ids"], row["new_tokens"], row["forwards"]) == (2, 1, 8, 4)
    assert (row["drafted"], row["accepted"], row["acceptance_rate"]) == (8, 4, 0.5)
    assert (row["mean_acceptance_length"], row["mean_drafted"]) == (2, 2)
    assert row["acceptance_by_depth"] == [0.5, 0.5]
    assert row["widths"] == {"3": 2}
    assert row["other_seconds"] == pytest.approx(9 / 4)
    assert summarize(units, "none", "none").speedup.value == 1


def test_what_stands_behind_the_prompts_by_hand() -> None:
    """The prompts' own rounds, with what was accepted in them, are in neither rates nor acceptance."""
    ids = [[1, 2, 3, 4, 5, 6]]
    plain = {"first_tokens": 1, "first_histogram": [1], "prefill_seconds": 1.0}
    drafted = {
        "rounds": 3,
        "drafted": 6,
        "accepted": 3,
        "histogram": [1, 1, 1],
        "first_tokens": 3,
        "first_histogram": [0, 0, 1],
        "prefill_seconds": 2.0,
    }
    units = [unit("a", repeat, run(6, ids, **plain), run(3.5, ids, **drafted)) for repeat in (1, 2, 3)]
    found = summarize(units, "fast", "none")
    row, base = found.to_dict(), summarize(units, "none", "none").to_dict()
    assert base["decode_tokens_per_second"] == pytest.approx(5 / 5)
    assert row["decode_tokens_per_second"] == pytest.approx(3 / 1.5)
    assert (row["decode_speedup"], base["decode_speedup"]) == pytest.approx((2, 1))
    assert row["acceptance_by_depth"] == pytest.approx([2 / 3, 1 / 3])
    assert found.decode_by_depth == pytest.approx([1 / 2, 0])


@pytest.mark.parametrize("unknown", ["first_tokens", "prefill_seconds"])
def test_what_stands_behind_the_prompts_may_be_unknown(unknown: str) -> None:
    known = {"first_tokens": 1, "first_histogram": [1]}
    units = [unit("a", 1, run(4, [[1, 2]], **known), run(4, [[1, 2]], **known) | {unknown: None})]
    row, base = (summarize(units, name, "none").to_dict() for name in ("fast", "none"))
    assert (row["decode_tokens_per_second"], row["decode_speedup"]) == (None, None)
    assert base["decode_speedup"] == 1
    assert summarize(units, "none", "fast").decode_speedup is None


def test_forwards_that_nobody_counted_are_unknown() -> None:
    units = [unit("a", 1, run(1, [[1]]), run(1, [[1]], forwards=None))]
    row = summarize(units, "fast", "none").to_dict()
    assert (row["forwards"], row["forwards_per_token"]) == (None, None)


def test_a_text_of_its_first_round_alone_has_nothing_behind_it() -> None:
    one = run(1, [[1]], rounds=1, histogram=[1], widths={}, first_tokens=1, first_histogram=[1])
    found = summarize([unit("a", 1, one, one)], "fast", "none")
    assert (found.decode_tokens_per_second, found.decode_speedup, found.decode_by_depth) == (None, None, [])


def test_ids_must_agree_in_every_repeat() -> None:
    same, other = [[1, 2], [3]], [[1, 2], [4]]
    units = [unit("a", 1, run(1, same), run(1, same)), unit("a", 2, run(1, same), run(1, other))]
    assert summarize(units, "fast", "none").same_ids == 1


def test_parts_that_one_run_did_not_time_are_unknown() -> None:
    ids = [[1]]
    untimed = run(1, ids, draft_seconds=None, histogram=None)
    units = [unit("a", 1, run(1, ids), untimed)]
    row = summarize(units, "fast", "none").to_dict()
    assert row["draft_seconds"] is None
    assert row["acceptance_by_depth"] is None
    assert row["other_seconds"] == pytest.approx(0.25)
