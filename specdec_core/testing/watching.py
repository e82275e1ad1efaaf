"""A drafter, watched: every draft with what stood before it, what it might draft, and the draws it made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specdec_core.contract.draft import ROOT, Draft
from specdec_core.contract.interfaces import (
    Budget,
    Capabilities,
    Context,
    Drafter,
    Outcome,
    RowRng,
    Rows,
    TargetInfo,
)

Text = tuple[int, ...]
Node = tuple[int, int]  # token, index of the parent
Sight = Callable[[Context, Budget], Budget]
"""What the drafter is to see of a budget."""


@dataclass(frozen=True)
class Draw:
    """One draw of one row."""

    kind: str  # bernoulli, categorical, target
    owner: str
    node: int  # of a target draw: the depth
    draw: int
    result: int
    weights: Tensor | None = None  # [V], of a categorical draw


@dataclass(frozen=True, eq=False)
class Proposal:
    """One call of `propose`."""

    rows: tuple[int, ...]
    texts: tuple[Text, ...]  # committed
    temperatures: tuple[float, ...]
    budget: Budget
    draft: Any  # what came back; a copy, where it is a Draft
    draws: tuple[list[Draw], ...]  # of each row

    def nodes(self, row: int) -> list[Node]:
        """A row's nodes, (token, parent) each, holes left out; parents by their index among these."""
        if not isinstance(self.draft, Draft) or not self.draft.nodes:
            return []
        renamed, nodes = {ROOT: ROOT}, list[Node]()
        pairs = zip(self.draft.tokens[row].tolist(), self.draft.parents[row].tolist(), strict=True)
        for index, (token, parent) in enumerate(pairs):
            if parent in renamed:
                renamed[index] = len(nodes)
                nodes.append((token, renamed[parent]))
        return nodes

    def depths(self, row: int) -> list[int]:
        """The depth of each place of a row's draft; 0: no node."""
        found: list[int] = []
        for index, parent in enumerate(self.draft.parents[row].tolist()):
            if parent == ROOT:
                found.append(1)
            elif 0 <= parent < index and found[parent]:
                found.append(found[parent] + 1)
            else:
                found.append(0)
        return found


class Watched:
    """A drafter that is watched; to everybody else it is the drafter itself.

    see: changes the budget that the drafter sees, such as to none for some rows.
    """

    def __init__(self, drafter: Drafter, see: Sight | None = None) -> None:
        self.drafter, self.see = drafter, see
        self.name, self.Config, self.config = drafter.name, drafter.Config, drafter.config
        self.proposals: list[Proposal] = []
        self.keep = True

    @property
    def capabilities(self) -> Capabilities:
        return self.drafter.capabilities

    def bind(self, target: TargetInfo) -> None:
        self.drafter.bind(target)

    def admit(self, rows: Rows) -> None:
        self.drafter.admit(rows)

    def propose(self, context: Context, budget: Budget) -> Draft:
        budget = self.see(context, budget) if self.see else budget
        count = len(context.rows)
        if not any(budget.depth):
            return Draft.empty(count, context.device)
        if not self.keep:
            return self.drafter.propose(context, budget)
        draws: tuple[list[Draw], ...] = tuple([] for _ in range(count))
        changed: Any = context
        changed.rng = WatchedRng(context.rng, draws, list(range(count)))
        before = Budget(list(budget.depth), budget.nodes)
        draft: Any = self.drafter.propose(context, budget)
        self.proposals.append(
            Proposal(
                rows=context.rows,
                texts=tuple(tuple(context.row_tokens(i)) for i in range(count)),
                temperatures=tuple(params.temperature for params in context.params),
                budget=before,
                draft=_copied(draft),
                draws=draws,
            )
        )
        return draft  # type: ignore[no-any-return]

    def observe(self, outcome: Outcome) -> None:
        self.drafter.observe(outcome)

    def release(self, rows: Sequence[int]) -> None:
        self.drafter.release(rows)

    def drafted(self) -> dict[Text, list[Node]]:
        """What was drafted after each text; every text is that of one row."""
        return {
            text: proposal.nodes(i)
            for proposal in self.proposals
            for i, text in enumerate(proposal.texts)
            if proposal.budget.depth[i]
        }


@dataclass(eq=False)
class WatchedRng:
    """A `RowRng` that notes every draw."""

    inner: Any
    draws: tuple[list[Draw], ...]  # of each row of the round
    index: list[int]  # which of them each row here is
    owner: str = ""

    def bernoulli(self, p: Tensor, node: Tensor | int, draw: int) -> Tensor:
        drawn: Tensor = self.inner.bernoulli(p, node, draw)
        for i, (row, chance) in enumerate(zip(self.index, p.tolist(), strict=True)):
            if chance > 0:
                self.draws[row].append(Draw("bernoulli", self.owner, _at(node, i), draw, int(drawn[i])))
        return drawn

    def categorical(self, weights: Tensor, node: Tensor | int, draw: int) -> Tensor:
        drawn: Tensor = self.inner.categorical(weights, node, draw)
        kept = weights.detach().to("cpu", copy=True)
        for i, (row, token) in enumerate(zip(self.index, drawn.tolist(), strict=True)):
            self.draws[row].append(Draw("categorical", self.owner, _at(node, i), draw, token, kept[i]))
        return drawn

    def target_draw(self, logits: Tensor, depth: Tensor | int) -> Tensor:
        drawn: Tensor = self.inner.target_draw(logits, depth)
        columns = drawn.view(len(self.index), -1).tolist()
        depths = depth.view(len(self.index), -1).tolist() if isinstance(depth, Tensor) else None
        for i, (row, tokens) in enumerate(zip(self.index, columns, strict=True)):
            for c, token in enumerate(tokens):
                at = depth if isinstance(depth, int) else (depths or [])[i][c]
                self.draws[row].append(Draw("target", self.owner, int(at), 0, token))
        return drawn

    def child(self, name: str) -> RowRng:
        owner = f"{self.owner}/{name}"
        return WatchedRng(self.inner.child(name), self.draws, self.index, owner)

    def for_rows(self, index: Sequence[int]) -> WatchedRng:
        rows = [self.index[i] for i in index]
        return WatchedRng(self.inner.for_rows(index), self.draws, rows, self.owner)


def _at(node: Tensor | int, row: int) -> int:
    return node if isinstance(node, int) else int(node[row])


def _copied(draft: Any) -> Any:
    """A drafter may write to its buffers again."""
    if not isinstance(draft, Draft) or not isinstance(draft.tokens, Tensor):
        return draft

    def copy(value: Any) -> Any:
        return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value

    return replace(
        draft,
        tokens=copy(draft.tokens),
        parents=copy(draft.parents),
        laws=copy(draft.laws),
        probs=copy(draft.probs),
        scores=copy(draft.scores),
    )


def muted(rounds: int) -> Sight:
    """See no budget in the first rounds."""
    left = [rounds]

    def see(context: Context, budget: Budget) -> Budget:
        left[0] -= 1
        return Budget([0] * len(budget.depth), budget.nodes) if left[0] >= 0 else budget

    return see


def sometimes(every: int) -> Sight:
    """See no budget for rows at every so-many-th committed length."""

    def see(context: Context, budget: Budget) -> Budget:
        pairs = zip(budget.depth, context.host_lengths, strict=True)
        return Budget([depth if length % every else 0 for depth, length in pairs], budget.nodes)

    return see


def same_weights(a: Tensor, b: Tensor) -> bool:
    """Whether two lists of weights are one distribution."""
    a, b = a.double(), b.double()
    return torch.allclose(a / a.sum(), b / b.sum(), rtol=1e-5, atol=1e-9)


def shown(nodes: Sequence[Node]) -> str:
    """Nodes in words: bare tokens for a chain."""
    if all(parent == i - 1 for i, (_, parent) in enumerate(nodes)):
        return str([token for token, _ in nodes])
    return f"{list(nodes)} (token, parent)"
