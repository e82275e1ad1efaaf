"""Static trees: for each node its parent, and which of the parent's candidates it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

from specdec_core import ROOT, UsageError

CHANCES = (0.50, 0.14, 0.07, 0.045, 0.03, 0.022, 0.017, 0.013)
"""How often a candidate of this rank is right: trees are grown by it. Later ranks fall off like 1 / rank."""
MOST_NODES = 512


@dataclass(frozen=True)
class Template:
    """A tree: parents come before children, levels one after another, siblings by rank."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; 1 for a child of the root."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def chances(self) -> tuple[float, ...]:
        """How likely each path is to be right, by CHANCES."""
        chances: list[float] = []
        for parent, rank in zip(self.parents, self.ranks, strict=True):
            chances.append(_chance(rank) * (1.0 if parent == ROOT else chances[parent]))
        return tuple(chances)

    @property
    def nodes(self) -> int:
        """How many there are."""
        return len(self.parents)

    @property
    def depth(self) -> int:
        """Of the deepest node."""
        return max(self.depths, default=0)

    @property
    def width(self) -> int:
        """Most children of a node: the ranks of siblings are consecutive."""
        return max(self.ranks, default=-1) + 1

    @cached_property
    def levels(self) -> tuple[tuple[int, int], ...]:
        """First node of each level, and the one behind its last."""
        starts = [self.depths.index(depth) for depth in range(1, self.depth + 1)]
        return tuple(zip(starts, [*starts[1:], self.nodes], strict=False))


def grown(nodes: int, depth: int, width: int) -> Template:
    """Grow the tree of so many nodes that is accepted farthest, if ranks are right as often as CHANCES says.

    Best-first: a node's chance is the product along its path, so each added node is the best one left
    (the paper's static tree of 80 nodes, arXiv 2408.08696, was found so too, from measured chances).
    """
    paths: list[tuple[int, ...]] = []
    heap: list[tuple[float, tuple[int, ...]]] = [(-_chance(0), (0,))]
    while heap and depth and len(paths) < nodes:
        worth, path = heappop(heap)
        paths.append(path)
        rank = path[-1]
        if rank + 1 < width:
            heappush(heap, (worth / _chance(rank) * _chance(rank + 1), (*path[:-1], rank + 1)))
        if len(path) < depth:
            heappush(heap, (worth * _chance(0), (*path, 0)))
    return _template(paths)


def full(widths: tuple[int, ...]) -> Template:
    """Make the tree in which every node of level i has widths[i] children.

    Raises:
        UsageError: there would be too many nodes.
    """
    paths: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for width in widths:
        if len(paths) + len(level) * width > MOST_NODES:
            shape = "x".join(map(str, widths))
            raise UsageError(f"shape={shape} makes more than {MOST_NODES} nodes; use smaller widths")
        level = [(*path, rank) for path in level for rank in range(width)]
        paths += level
    return _template(paths)


def cut(template: Template, nodes: int, depth: int) -> Template:
    """Leave the nodes of the first levels, from the left, that a budget allows: a smaller tree."""
    kept = [i for i in range(min(nodes, template.nodes)) if template.depths[i] <= depth]
    return Template(tuple(template.parents[i] for i in kept), tuple(template.ranks[i] for i in kept))


def _chance(rank: int) -> float:
    return CHANCES[rank] if rank < len(CHANCES) else CHANCES[-1] * len(CHANCES) / (rank + 1)


def _template(paths: list[tuple[int, ...]]) -> Template:
    ordered = sorted(paths, key=lambda path: (len(path), path))
    index = {path: i for i, path in enumerate(ordered)}
    return Template(
        tuple(index.get(path[:-1], ROOT) for path in ordered), tuple(path[-1] for path in ordered)
    )
