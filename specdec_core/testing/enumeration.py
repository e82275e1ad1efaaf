"""Every outcome of a verifier, with its exact probability in float64.

A `BranchingRng` stands where the keyed generator stands otherwise. It models what that one does: a key
(node, draw) has one uniform u, a Bernoulli draw is u < p, and a categorical one finds u among cumulative
weights. A branch knows the interval in which each of its uniforms lies, so a uniform that is used twice has
the dependence it would have in earnest; `strict`, the default, forbids it.

Every row of a batch is a branch. Verifiers make their draws in the same order whatever the values are, so
draw number t of all rows is one call: rows take the first possible outcome, the others are noted as forks,
and the batch is verified again for those, until none is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec_core import Draft, RowRng, TargetDistributions, Verifier

Wrap = Callable[[RowRng], RowRng]


class KeyReused(AssertionError):
    """Two draws of one round that both happen have one key."""


class BranchingRng:
    """`RowRng` of which every row is a branch.

    Args:
        script: int64 [B, T], the outcomes of each row's first draws; -1: take the first possible one.
        nodes: n, the width of the draft.
        strict: raise `KeyReused` where two draws that happen have one key.
    """

    DRAWS = 4

    def __init__(self, script: Tensor, nodes: int, *, strict: bool = True) -> None:
        rows = script.shape[0]
        self.script, self.strict = script, strict
        self.weight = torch.ones(rows, dtype=torch.float64)
        self.forks: list[tuple[Tensor, Tensor]] = []  # (rows, their scripts)
        self._taken: list[Tensor] = []
        self._keyed = _Uniforms(rows, (nodes + 1) * self.DRAWS)
        self._noise = _Uniforms(rows, nodes + 2)  # the target's own, one a depth

    def bernoulli(self, p: Tensor, node: Tensor | int, draw: int) -> Tensor:
        assert bool(((p >= 0) & (p <= 1)).all()), f"not a probability: {p}"
        slot = self._slot(node, draw, p > 0)
        zero = torch.zeros_like(p, dtype=torch.float64)
        bounds = torch.stack([zero, p.double(), zero + 1.0], dim=1)
        return self._branch(self._keyed, slot, bounds) == 0

    def categorical(self, weights: Tensor, node: Tensor | int, draw: int) -> Tensor:
        slot = self._slot(node, draw, torch.ones(len(weights), dtype=torch.bool))
        return self._branch(self._keyed, slot, _cumulative(weights))

    def target_draw(self, logits: Tensor, depth: Tensor | int) -> Tensor:
        # A verdict reads one node of each depth, so how the draws at two nodes of one depth hang together
        # does not matter: here they share a uniform, as in earnest they share Gumbel noise.
        columns = logits if logits.dim() == 3 else logits.unsqueeze(1)
        depths = depth if isinstance(depth, Tensor) else torch.full(columns.shape[:2], depth)
        depths = depths.view(columns.shape[:2])
        drawn = [
            self._branch(self._noise, depths[:, c], _cumulative(columns[:, c].double().softmax(dim=-1)))
            for c in range(columns.shape[1])
        ]
        return torch.stack(drawn, dim=1).view(logits.shape[:-1])

    def child(self, name: str) -> RowRng:
        raise NotImplementedError("a verifier has no members")

    def _slot(self, node: Tensor | int, draw: int, happens: Tensor) -> Tensor:
        assert 0 <= draw < self.DRAWS
        nodes = torch.full(happens.shape, node) if isinstance(node, int) else node
        assert bool((nodes[happens] >= -1).all()), "a draw that happens has a node"
        slot = (nodes.clamp(min=-1) + 1) * self.DRAWS + draw
        again = self._keyed.used.gather(1, slot.unsqueeze(1)).squeeze(1) & happens
        if self.strict and bool(again.any()):
            raise KeyReused(f"draw {draw} of node {int(nodes[again][0])} is made twice in a round")
        self._keyed.used[torch.arange(len(slot))[happens], slot[happens]] = True
        return slot

    def _branch(self, uniforms: _Uniforms, slot: Tensor, bounds: Tensor) -> Tensor:
        """Take an outcome for each row, and note the others; bounds: float64 [B, m + 1] from 0 to 1."""
        share = uniforms.shares(slot, bounds)  # [B, m]
        t = len(self._taken)
        planned = self.script[:, t] if t < self.script.shape[1] else torch.full_like(slot, -1)
        taken = torch.where(planned < 0, (share > 0).max(dim=1).indices, planned)
        others = (share > 0) & (planned < 0).unsqueeze(1)
        others.scatter_(1, taken.unsqueeze(1), False)
        rows, outcome = others.nonzero(as_tuple=True)
        past = torch.stack([*self._taken, taken], dim=1)[rows]
        past[:, t] = outcome
        self.forks.append((rows, past))
        self._taken.append(taken)
        self.weight = self.weight * share.gather(1, taken.unsqueeze(1)).squeeze(1)
        uniforms.narrow(slot, bounds, taken)
        return taken


class _Uniforms:
    """The interval in which each row knows each of its uniforms to lie."""

    def __init__(self, rows: int, slots: int) -> None:
        self.low = torch.zeros((rows, slots), dtype=torch.float64)
        self.high = torch.ones((rows, slots), dtype=torch.float64)
        self.used = torch.zeros((rows, slots), dtype=torch.bool)

    def shares(self, slot: Tensor, bounds: Tensor) -> Tensor:
        """Give the chance of each part of [0, 1) that `bounds` cut: [B, m]."""
        low, high = self.low.gather(1, slot.unsqueeze(1)), self.high.gather(1, slot.unsqueeze(1))
        overlap = torch.minimum(bounds[:, 1:], high) - torch.maximum(bounds[:, :-1], low)
        return overlap.clamp(min=0.0) / (high - low)

    def narrow(self, slot: Tensor, bounds: Tensor, taken: Tensor) -> None:
        """Learn that the uniform lies in the part that was taken."""
        rows = torch.arange(len(slot))
        self.low[rows, slot] = torch.maximum(self.low[rows, slot], bounds[rows, taken])
        self.high[rows, slot] = torch.minimum(self.high[rows, slot], bounds[rows, taken + 1])


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Every verdict there can be."""

    row: Tensor  # int64 [N]: the row of the batch
    weight: Tensor  # float64 [N]: its probability
    path: Tensor  # int64 [N, d]
    next_token: Tensor  # int64 [N]


def outcomes(
    verifier: Verifier, p: TargetDistributions, draft: Draft, *, strict: bool = True, wrap: Wrap | None = None
) -> Outcomes:
    """Enumerate what a verifier may decide about each row of a draft.

    Raises:
        KeyReused: with `strict`, two draws that both happen have one key.
    """
    row = torch.arange(draft.rows)
    script = torch.empty((draft.rows, 0), dtype=torch.int64)
    found = []
    while len(row):
        rng = BranchingRng(script, draft.nodes, strict=strict)
        verdict = verifier.verify(take_p(p, row), take(draft, row), wrap(rng) if wrap else rng)
        found.append(Outcomes(row, rng.weight, verdict.path, verdict.next_token))
        script, row = _gathered(rng.forks, row)
    every = Outcomes(
        torch.cat([f.row for f in found]),
        torch.cat([f.weight for f in found]),
        torch.cat([f.path for f in found]),
        torch.cat([f.next_token for f in found]),
    )
    total = torch.zeros(draft.rows, dtype=torch.float64).index_add_(0, every.row, every.weight)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-12)
    return every


def _gathered(forks: list[tuple[Tensor, Tensor]], row: Tensor) -> tuple[Tensor, Tensor]:
    """Put the forks of a pass together: (scripts, the row of the batch that each belongs to)."""
    width = max((past.shape[1] for _, past in forks), default=0)
    scripts = [torch.nn.functional.pad(past, (0, width - past.shape[1]), value=-1) for _, past in forks]
    if not forks:
        return row.new_empty((0, 0)), row[:0]
    return torch.cat(scripts), row[torch.cat([rows for rows, _ in forks])]


def take(draft: Draft, row: Tensor) -> Draft:
    """Select rows of a draft."""
    probs = None if draft.probs is None else draft.probs[row]
    return replace(
        draft, tokens=draft.tokens[row], parents=draft.parents[row], laws=draft.laws[row], probs=probs
    )


def take_p(p: TargetDistributions, row: Tensor) -> TargetDistributions:
    """Select rows of the target's distributions."""
    return TargetDistributions(p.logits[row], None if p.greedy is None else p.greedy[row])


def _cumulative(weights: Tensor) -> Tensor:
    """[B, V] -> float64 bounds [B, V + 1], from 0 to exactly 1."""
    total = weights.double().cumsum(dim=1)
    bounds = torch.nn.functional.pad(total / total[:, -1:], (1, 0))
    # Behind the last index with weight everything is 1, so that none without weight gets a share.
    return bounds.masked_fill(bounds >= bounds[:, -1:], 1.0)
