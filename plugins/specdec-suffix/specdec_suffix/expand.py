"""From occurrences of a context to a draft: how often it went on in which way."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil

from specdec_core import ROOT
from specdec_suffix.index import GAP

Occurrence = tuple["array[int]", int, int]
"""A text, where in it the context ends, and how many tokens of the context are the same."""


@dataclass
class Nodes:
    """The tree of one row."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Limits:
    """How far a draft goes."""

    depth: int
    nodes: int
    branches: int  # most children of a node; 1: a chain
    alpha: float  # levels for each token of the longest match that leads to a node
    floor: float  # least probability of a path


def expand(occurrences: Sequence[Occurrence], limits: Limits) -> Nodes:
    """Draft what followed, the likeliest path first (best-first, SuffixDecoding, arXiv 2411.04975).

    A node's probability given its parent is estimated from the occurrences that went as far as the parent.
    One that has m tokens in common with the context, what was drafted included, counts m**2, and the largest
    m is set aside for what was never seen (an escape as in PPM; Cleary and Witten 1984). So one occurrence
    that matches m tokens predicts the next with m / (m + 1), c of n alike with c / (n + 1/m), and longer
    matches outweigh shorter ones. A text that ends in mid-draft goes on periodically.

    occurrences: the most trusted first, which wins where weights are equal.
    """
    found = Nodes()
    heap: list[tuple[float, int, int, int, list[int], list[Occurrence]]] = []
    _grow(heap, list(occurrences), [], ROOT, 1.0, limits)
    while heap and len(found.tokens) < limits.nodes:
        score, _, parent, token, path, going = heappop(heap)
        node = len(found.tokens)
        found.tokens.append(token)
        found.parents.append(parent)
        found.scores.append(-score)
        _grow(heap, going, [*path, token], node, -score, limits)
    return found


def _grow(
    heap: list[tuple[float, int, int, int, list[int], list[Occurrence]]],
    occurrences: list[Occurrence],
    path: list[int],
    node: int,
    reached: float,
    limits: Limits,
) -> None:
    """Put the likeliest children of a node into the heap."""
    depth = len(path)
    if not occurrences or depth >= limits.depth:
        return
    longest = max(match for _, _, match in occurrences)
    if depth >= ceil(limits.alpha * longest):
        return
    total, weights, going = longest + depth, dict[int, int](), dict[int, list[Occurrence]]()
    for occurrence in occurrences:
        text, end, match = occurrence
        at = end + depth
        token = text[at] if at < len(text) else path[at - len(text)]
        if token == GAP:
            continue
        weight = (match + depth) ** 2
        total += weight
        if token in going:
            weights[token] += weight
            going[token].append(occurrence)
        else:
            weights[token], going[token] = weight, [occurrence]
    best = sorted(weights, key=weights.__getitem__, reverse=True) if len(weights) > 1 else list(weights)
    for rank, token in enumerate(best[: limits.branches]):
        score = reached * weights[token] / total
        if score < limits.floor:
            break
        heappush(heap, (-score, node * limits.branches + rank, node, token, path, going[token]))
