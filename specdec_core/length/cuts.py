"""How much to keep of what the host drafted, step by step from the node most worth checking to the least.

Where all rows share a rectangle, a step is a column of it. Where a block has no padding, each row goes as far
as its own nodes are worth it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TypeAlias

Step: TypeAlias = tuple[float, int, int]
"""More nodes to check: the tokens that each is expected to bring, how many columns of the block, and whose
row they are; -1: the next column of every row."""


def by_columns(chances: Sequence[Sequence[float]]) -> list[Step]:
    """Give a step for each column of a rectangle; chances: of each row's nodes, weighed, in their order."""
    rows = len(chances)
    return [(sum(column) / rows, rows, -1) for column in zip_longest(*chances, fillvalue=0.0)]


def by_rows(chances: Sequence[Sequence[float]]) -> list[Step]:
    """Give steps of single rows, the likeliest nodes first; a row's nodes stay in their order.

    A node that is likelier than those before it, as a tree may have some, is taken together with them.
    """
    steps: list[Step] = []
    for row, its in enumerate(chances):
        first = len(steps)
        for chance in its:
            nodes = 1
            while len(steps) > first and steps[-1][0] < chance:
                before = steps.pop()
                chance = (before[0] * before[1] + chance * nodes) / (before[1] + nodes)
                nodes += before[1]
            steps.append((chance, nodes, row))
    if len(chances) > 1:
        steps.sort(reverse=True)
    return steps


def kept(steps: Sequence[Step], least: Sequence[int]) -> list[int]:
    """Count the nodes of each row that some steps keep; least: those of each row that stay anyway."""
    counts = list(least)
    columns = 0
    for _, nodes, row in steps:
        if row < 0:
            columns += 1
        else:
            counts[row] += nodes
    return [max(columns, count) for count in counts] if columns else counts
