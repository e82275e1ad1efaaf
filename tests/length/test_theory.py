"""The forecasts: Leviathan et al.'s numbers, their edges, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.contract.errors import InvalidParameter
from specdec_core.length.theory import (
    best_draft_length,
    expected_tokens,
    expected_tokens_by_depth,
    forecasts,
    speedup,
)


@pytest.mark.parametrize(
    ("a", "k", "c", "tokens", "factor"),
    [
        (0.8, 4, 0.05, 3.3616, 2.8013),
        (0.5, 4, 0.05, 1.9375, 1.6146),
        (0.0, 4, 0.05, 1.0, 1 / 1.2),
        (1.0, 4, 0.05, 5.0, 5 / 1.2),
        (1.0, 7, 0.0, 8.0, 8.0),
        (0.8, 0, 0.05, 1.0, 1.0),
        (0.8, 0, 9.0, 1.0, 1.0),
    ],
)
def test_the_formulas(a: float, k: int, c: float, tokens: float, factor: float) -> None:
    assert expected_tokens(a, k) == pytest.approx(tokens, abs=5e-5)
    assert speedup(a, k, c) == pytest.approx(factor, abs=5e-5)


@given(a=st.floats(0, 0.999), k=st.integers(0, 40))
def test_the_sum_is_the_closed_form_of_the_paper(a: float, k: int) -> None:
    assert expected_tokens(a, k) == pytest.approx((1 - a ** (k + 1)) / (1 - a))


@given(a=st.floats(0, 1), k=st.integers(0, 30))
def test_equal_depths_are_the_special_case_of_shares_by_depth(a: float, k: int) -> None:
    shares = [a**depth for depth in range(1, k + 1)]
    assert expected_tokens_by_depth(shares) == pytest.approx(expected_tokens(a, k))


def test_shares_by_depth_are_those_of_all_rounds() -> None:
    # accepts of three rounds: 2, 0 and 3 of 4
    assert expected_tokens_by_depth([2 / 3, 2 / 3, 1 / 3, 0]) == pytest.approx(8 / 3)
    assert expected_tokens_by_depth([]) == 1


@given(a=st.floats(0, 1), c=st.floats(0, 2), most=st.integers(0, 30))
def test_no_draft_length_beats_the_best(a: float, c: float, most: int) -> None:
    best = best_draft_length(a, c, most)
    assert 0 <= best <= most
    assert all(speedup(a, k, c) <= speedup(a, best, c) for k in range(most + 1))


@pytest.mark.parametrize(
    ("a", "c", "most", "best"),
    [
        (0.8, 0.05, 8, 8),
        (0.8, 0.2, 8, 4),
        (0.3, 0.3, 8, 0),
        (1.0, 0.0, 8, 8),
        (0.0, 0.0, 8, 0),
        (0.9, 0.1, 0, 0),
    ],
)
def test_the_best_draft_length(a: float, c: float, most: int, best: int) -> None:
    assert best_draft_length(a, c, most) == best


@given(c=st.floats(0, 1), more=st.floats(1e-6, 1))
def test_a_gain_of_corollary_3_9_wherever_acceptance_exceeds_cost(c: float, more: float) -> None:
    a = min(c + more, 1.0)
    assert speedup(a, best_draft_length(a, c, 8), c) >= (1 + a) / (1 + c) * (1 - 1e-12)


def test_the_table_begins_with_plain_decoding() -> None:
    table = forecasts(0.8, 0.05, 4)
    assert [row.draft_tokens for row in table] == [0, 1, 2, 3, 4]
    assert (table[0].expected_tokens, table[0].speedup) == (1, 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: expected_tokens(-0.1, 4), "acceptance=-0.1"),
        (lambda: expected_tokens(1.1, 4), "acceptance=1.1"),
        (lambda: expected_tokens(math.nan, 4), "acceptance=nan"),
        (lambda: expected_tokens(0.5, -1), "draft_tokens=-1"),
        (lambda: expected_tokens(0.5, 1.5), "draft_tokens=1.5"),  # type: ignore[arg-type]
        (lambda: speedup(0.5, 4, -1), "cost=-1"),
        (lambda: speedup(0.5, 4, math.inf), "cost=inf"),
        (lambda: speedup(0.5, 4, math.nan), "cost=nan"),
        (lambda: best_draft_length(0.5, 0.1, -1), "draft_tokens=-1"),
        (lambda: expected_tokens_by_depth([0.5, 1.5]), "by_depth=1.5"),
        (lambda: expected_tokens_by_depth([0.5, 0.6]), "0.6 at depth 2 is more than 0.5"),
    ],
)
def test_what_is_no_probability_or_count_is_refused(call: Any, words: str) -> None:
    with pytest.raises(InvalidParameter, match=words.replace(".", r"\.")):
        call()
