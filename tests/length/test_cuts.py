"""What is kept of drafts: columns of a rectangle, or nodes row by row."""

from __future__ import annotations

import random
from itertools import accumulate, product

import pytest

from specdec_core.length.cuts import by_columns, by_rows, kept


def test_a_column_holds_the_nodes_of_all_rows() -> None:
    steps = by_columns([[0.5, 0.25], [], [0.25, 0.125]])
    assert steps == [(0.25, 3, -1), (0.125, 3, -1)]
    assert kept(steps[:1], [0, 0, 0]) == [1, 1, 1]
    assert kept(steps, [0, 4, 0]) == [2, 4, 2]


def test_the_likeliest_nodes_of_any_row_come_first() -> None:
    steps = by_rows([[0.5, 0.25], [], [0.75, 0.375, 0.125]])
    assert [(row, gain) for gain, _, row in steps] == [
        (2, 0.75),
        (0, 0.5),
        (2, 0.375),
        (0, 0.25),
        (2, 0.125),
    ]
    assert kept(steps[:3], [0, 4, 0]) == [1, 4, 2]


def test_a_node_takes_those_before_it_along() -> None:
    """A tree's second branch may be likelier than the end of its first."""
    steps = by_rows([[0.5, 0.125, 0.375]])
    assert steps == [(0.5, 1, 0), (0.25, 2, 0)]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_choice_of_as_many_nodes_is_worth_more(seed: int) -> None:
    """Against all choices of leading nodes: the best of each size that ends with a step."""
    rng = random.Random(seed)
    chances = [[rng.randrange(1, 16) / 16 for _ in range(rng.randrange(4))] for _ in range(3)]
    best: dict[int, float] = {}
    for counts in product(*(range(len(row) + 1) for row in chances)):
        worth = sum(sum(row[:count]) for row, count in zip(chances, counts, strict=True))
        best[sum(counts)] = max(best.get(sum(counts), 0.0), worth)
    steps = by_rows(chances)
    sizes = list(accumulate((nodes for _, nodes, _ in steps), initial=0))
    for taken, (size, gain) in enumerate(
        zip(sizes, accumulate((gain * nodes for gain, nodes, _ in steps), initial=0.0), strict=True)
    ):
        assert gain == pytest.approx(best[size])
        counts = kept(steps[:taken], [0, 0, 0])
        assert sum(sum(row[:count]) for row, count in zip(chances, counts, strict=True)) == pytest.approx(
            gain
        )
