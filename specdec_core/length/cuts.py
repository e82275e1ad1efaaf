"""How much to keep of what the host drafted, step by step from the node most worth checking to the least.

Where all rows share a rectangle, a step is a column of it. Where a block has no padding, each row goes as far
as its own nodes are worth it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple


class Step(NamedTuple):
    """More nodes to check, and how many more tokens they are expected to bring."""

    nodes: int  # columns of the block, of all rows together
    gain: float
    row: int | None = None  # whose nodes; None: the next one of every row


def by_columns(chances: Sequence[Sequence[float]]) -> list[Step]:
    """Give a step for each column of a rectangle; chances: of each row's nodes, weighed, in their order."""
    steps = [Step(len(chances), sum(column)) for column in zip_longest(*chances, fillvalue=0.0)]
    while steps and not steps[-1].gain:
        steps.pop()
    return steps


def by_rows(chances: Sequence[Sequence[float]]) -> list[Step]:
    """Give steps of single rows, the likeliest nodes first; a row's nodes stay in their order.

    A node that is likelier than those before it, as a tree may have some, is taken together with them.
    """
    steps: list[Step] = []
    for row, its in enumerate(chances):
        pools: list[Step] = []
        for chance in its:
            step = Step(1, chance, row)
            while pools and pools[-1].gain * step.nodes < step.gain * pools[-1].nodes:
                before = pools.pop()
                step = Step(before.nodes + step.nodes, before.gain + step.gain, row)
            pools.append(step)
        steps += pools
    steps.sort(key=lambda step: -step.gain / step.nodes)
    while steps and not steps[-1].gain:
        steps.pop()
    return steps


def kept(steps: Sequence[Step], least: Sequence[int]) -> list[int]:
    """Count the nodes of each row that some steps keep; least: those of each row that stay anyway."""
    columns = sum(1 for step in steps if step.row is None)
    counts = [max(columns, count) for count in least]
    for step in steps:
        if step.row is not None:
            counts[step.row] += step.nodes
    return counts
