"""From each head's candidates to a tree of nodes, on the device and with sizes the host knows.

B rows, D heads used, k candidates a head, n nodes. A node at depth d is a candidate of head d - 1; its score
is the product of the heads' probabilities on its path. Parents come before children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec_core import HOLE, ROOT
from specdec_medusa.choices import Choices


@dataclass(frozen=True, eq=False)
class Nodes:
    """A tree for each row."""

    tokens: Tensor  # int64 [B, n]
    parents: Tensor  # int64 [B, n]
    scores: Tensor  # float32 [B, n]
    depth: int  # of the deepest node
    width: int  # most children of a node


class TreeMaker(Protocol):
    """Makes trees out of candidates."""

    depth: int  # heads it uses

    def __call__(self, ids: Tensor, probs: Tensor, depths: Sequence[int], nodes: int) -> Nodes:
        """Arrange candidates: ids int64 [B, D, k], probs float32 [B, D, k], likeliest first.

        depths: [B], deepest node of each row; nodes: most nodes of a row.
        """


class StaticTree:
    """The same paths of ranks every round (section 2.1.2). A smaller node budget takes the first of them."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.depth = max(map(len, choices))
        place = {path: i for i, path in enumerate(choices)}
        self._parents = torch.tensor([place.get(path[:-1], ROOT) for path in choices])
        self._levels = torch.tensor([len(path) for path in choices])
        self._ranks = torch.tensor([path[-1] for path in choices])
        self._paths = torch.tensor([[*path, *[-1] * (self.depth - len(path))] for path in choices])
        self._width = max(
            sum(path[:-1] == parent for path in choices) for parent in {c[:-1] for c in choices}
        )

    def to(self, device: torch.device) -> StaticTree:
        """Move the tree's shape to a device."""
        for name in ("_parents", "_levels", "_ranks", "_paths"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    def __call__(self, ids: Tensor, probs: Tensor, depths: Sequence[int], nodes: int) -> Nodes:
        """Take each path's candidate; nodes below a row's depth are holes."""
        deepest = min(max(depths), self.depth, ids.shape[1])
        kept = min(nodes, len(self.choices))
        levels, ranks = self._levels[:kept], self._ranks[:kept]
        fits = levels <= deepest
        head = (levels - 1).clamp(max=ids.shape[1] - 1)
        tokens = ids[:, head, ranks]
        limits = torch.tensor(depths).to(ids.device, non_blocking=True)
        real = fits & (levels <= limits.unsqueeze(1))
        paths = self._paths[:kept, : ids.shape[1]]
        along = probs[:, torch.arange(paths.shape[1], device=ids.device), paths.clamp(min=0)]
        scores = along.where(paths >= 0, 1.0).prod(dim=-1)
        parents = self._parents[:kept].where(real, HOLE)
        return Nodes(tokens, parents, scores, deepest, self._width)


class AdaptiveTree:
    """The likeliest paths of each round: best first by the product of probabilities, up to the node budget.

    A product only falls along a path, so the n likeliest nodes hold all their ancestors, and the n likeliest
    of a level are all that can have children among them: a beam a level and one sort of all are exact.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def to(self, device: torch.device) -> AdaptiveTree:
        """Hold nothing."""
        return self

    def __call__(self, ids: Tensor, probs: Tensor, depths: Sequence[int], nodes: int) -> Nodes:
        """Grow level by level, then keep the best; what a row's depth or a zero forbids is a hole."""
        rows, heads, k = ids.shape
        deepest = min(max(depths), self.depth, heads)
        limits = torch.tensor(depths).to(ids.device, non_blocking=True)
        tokens, parents, scores = [], [], []
        beam, first = (
            probs.new_ones(rows, 1),
            ROOT,
        )  # the last level's scores, and the index of its first node
        for level in range(deepest):
            allowed = (limits > level).unsqueeze(1)
            grown = (beam.unsqueeze(2) * probs[:, level, None, :]).flatten(1) * allowed
            beam, at = grown.topk(min(nodes, grown.shape[1]), dim=-1)
            tokens.append(ids[:, level].gather(1, at % k))
            parents.append(at // k + first)
            scores.append(beam)
            first = sum(part.shape[1] for part in scores[:-1])
        return _best(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), nodes, deepest, k)


def _best(tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int, depth: int, width: int) -> Nodes:
    """Keep the best nodes of all levels; among equals those of higher levels come first."""
    kept = min(nodes, scores.shape[1])
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    places = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    scores, order = scores[:, :kept], order[:, :kept]
    parents = parents.gather(1, order)
    renamed = places.gather(1, parents.clamp(min=0)).where(parents >= 0, ROOT)
    return Nodes(tokens.gather(1, order), renamed.where(scores > 0, HOLE), scores, depth, min(width, kept))


def right_nodes(nodes: Nodes, labels: Tensor) -> Tensor:
    """Mark the nodes that a row's true continuation runs through: labels int64 [B, D] -> bool [B, n]."""
    above = nodes.parents.clamp(min=0)
    levels = torch.zeros_like(nodes.parents)
    real = nodes.parents != HOLE
    for _ in range(nodes.depth - 1):
        levels = torch.where(nodes.parents >= 0, levels.gather(1, above) + 1, 0)
    fits = real & (nodes.tokens == labels.gather(1, levels.clamp(max=labels.shape[1] - 1)))
    right = fits
    for _ in range(nodes.depth - 1):
        right = fits & ((nodes.parents < 0) | right.gather(1, above))
    return right
