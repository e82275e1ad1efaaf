"""How many tokens to draft: what every length policy is, and the fixed one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from specdec_core.contract.draft import Draft
from specdec_core.contract.interfaces import Budget, Capabilities, Outcome
from specdec_core.rows.batch import Batch

DraftTokens: TypeAlias = int | Literal["auto"] | None
"""What a caller asks for: a depth, the length that pays most at each time, or the drafter's own depth."""


@dataclass(frozen=True)
class Plan:
    """What one round may draft, by what was known before any of it was drawn."""

    budget: Budget
    cut: Callable[[Draft], Draft] | None = None  # leaves out nodes of what was proposed; None: none


class LengthPolicy(Protocol):
    """Plans each round, and learns from what came of it. Rows join and leave at any round."""

    @property
    def nodes(self) -> int:
        """Most nodes of a row that it ever asks for."""

    def plan(self, batch: Batch) -> Plan:
        """Say how much these rows may draft."""

    def learn(
        self, plan: Plan, batch: Batch, draft: Draft, outcome: Outcome, seconds: dict[str, float]
    ) -> None:
        """Learn from a round that was planned: what was drafted and committed, and what its parts took.

        A round that failed is never learned from.
        """

    def begin(self) -> None:
        """Begin again, with rows, after a time in which nobody decoded."""

    def forget(self, rows: Iterable[int]) -> None:
        """Forget rows that went before they had finished."""


@dataclass(frozen=True)
class FixedLength:
    """Ask for the same depth every round, clipped to the room that a row has left."""

    depth: int
    nodes: int
    most: int | None = None  # what was asked for, of any drafter

    @classmethod
    def of(cls, capabilities: Capabilities, draft_tokens: int | None) -> FixedLength:
        """Take the drafter's own depth, or the smaller of that and `draft_tokens`."""
        own = capabilities.max_depth
        depth = own if draft_tokens is None else min(draft_tokens, own)
        return cls(depth, capabilities.nodes if capabilities.makes_trees else depth, draft_tokens)

    def plan(self, batch: Batch) -> Plan:
        """Ask for that depth."""
        return Plan(Budget(batch.deepest(self.depth), self.nodes, forced=batch.forced(self.most)))

    def learn(
        self, plan: Plan, batch: Batch, draft: Draft, outcome: Outcome, seconds: dict[str, float]
    ) -> None:
        """Learn nothing."""

    def begin(self) -> None:
        """Begin as ever."""

    def forget(self, rows: Iterable[int]) -> None:
        """Forget nothing, for nothing is known."""
