"""Which candidates a static tree holds: paths of ranks, the paper's own, or made from measured accuracies.

A path (2, 0) is the first choice of the second head below the third choice of the first.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from pathlib import Path

from specdec_core import UsageError

Choices = list[tuple[int, ...]]

# The tree of 63 nodes that the paper made for Vicuna-7B; each word is a path, a digit a rank.
_PAPER = """
0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005
0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070
"""


def paper_choices() -> Choices:
    """Give the paper's tree: four levels, ranks up to 9."""
    return [tuple(map(int, word)) for word in _PAPER.split()]


def chain_choices(depth: int) -> Choices:
    """Give a chain: the first choice of each head."""
    return [(0,) * length for length in range(1, depth + 1)]


def measured_choices(accuracies: Sequence[Sequence[float]], nodes: int) -> Choices:
    """Make the tree of `nodes` nodes that is accepted most, heads taken as independent (section 2.3.3).

    accuracies: [K][R], how often choice r of head k is the right token.
    """
    # the negative chance of a path, the path, its parent's chance
    heap: list[tuple[float, tuple[int, ...], float]] = [(-accuracies[0][0], (0,), 1.0)]
    chosen: Choices = []
    while heap and len(chosen) < nodes:
        negative, path, parent = heapq.heappop(heap)
        chosen.append(path)
        head, rank = len(path) - 1, path[-1]
        if rank + 1 < len(accuracies[head]):
            sibling = (*path[:-1], rank + 1)
            heapq.heappush(heap, (-parent * accuracies[head][rank + 1], sibling, parent))
        if head + 1 < len(accuracies):
            heapq.heappush(heap, (negative * accuracies[head + 1][0], (*path, 0), -negative))
    return chosen


def read_choices(file: str) -> Choices:
    """Read a tree from a JSON file: a list of lists of ranks.

    Raises:
        UsageError: there is no such file, or it holds something else.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise UsageError(
            f"tree={file} is no file; use adaptive, measured, paper, chain, or a JSON file of paths"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"tree={file} is no JSON: {str(error).splitlines()[0]}") from error
    right = isinstance(found, list) and all(
        isinstance(path, list) and path and all(type(rank) is int for rank in path) for path in found
    )
    if not right:
        raise UsageError(f"tree={file} must hold a list of paths, such as [[0], [1], [0, 0]]")
    return [tuple(path) for path in found]


def checked(choices: Choices, heads: int, top_k: int) -> Choices:
    """Check a tree against the heads that are to fill it; put parents before children.

    Raises:
        UsageError: it is deeper than there are heads, asks for more candidates than `top_k`, or has a node
            without its parent.
    """
    if not choices:
        raise UsageError("the tree is empty; give at least one path, such as [[0]]")
    depth, rank = max(map(len, choices)), max(map(max, choices))
    if depth > heads:
        raise UsageError(
            f"the tree is {depth} deep and there are {heads} heads; use a tree for at most {heads}"
        )
    if rank >= top_k:
        raise UsageError(
            f"the tree asks for candidate {rank} of a head and top_k={top_k} gives 0 to {top_k - 1}"
        )
    if min(map(min, choices)) < 0:
        raise UsageError("the tree holds a negative rank; ranks count from 0")
    known = set(choices)
    if len(known) != len(choices):
        raise UsageError("the tree holds a path twice")
    for path in choices:
        if len(path) > 1 and path[:-1] not in known:
            raise UsageError(
                f"the tree has the path {list(path)} without its parent {list(path[:-1])}; add it"
            )
    seen: set[tuple[int, ...]] = {()}
    for path in choices:
        if path[:-1] not in seen:
            return sorted(choices, key=lambda path: (len(path), path))
        seen.add(path)
    return choices
