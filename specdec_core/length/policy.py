"""How many tokens to draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from specdec_core.contract.draft import Draft
from specdec_core.contract.interfaces import Budget, Capabilities, Outcome
from specdec_core.rows.batch import Batch

DraftTokens: TypeAlias = int | Literal["auto"] | None
"""What a caller asks for: a depth, the length that pays most at each time, or the drafter's own depth."""


class LengthPolicy(Protocol):
    """Decides each round how much may be drafted, from what is known before the draws."""

    @property
    def nodes(self) -> int:
        """Most nodes of a row that it ever asks for."""

    def budget(self, batch: Batch) -> Budget:
        """Say how much these rows may draft."""

    def cut(self, draft: Draft) -> Draft:
        """Leave out nodes of what was proposed, for what the host knew before any of it was drawn."""

    def update(self, batch: Batch, draft: Draft, outcome: Outcome, seconds: dict[str, float]) -> None:
        """Learn from a round: what was drafted and committed, and the seconds of its parts."""


@dataclass(frozen=True)
class FixedLength:
    """Ask for the same depth every round, clipped to the room that a row has left."""

    depth: int
    nodes: int

    @classmethod
    def of(cls, capabilities: Capabilities, draft_tokens: int | None) -> FixedLength:
        """Take the drafter's own depth, or the smaller of that and `draft_tokens`."""
        own = capabilities.max_depth
        depth = own if draft_tokens is None else min(draft_tokens, own)
        return cls(depth, capabilities.nodes if capabilities.makes_trees else depth)

    def budget(self, batch: Batch) -> Budget:
        """Leave room for the token that a round adds of its own."""
        return Budget([max(min(self.depth, row.room - 1), 0) for row in batch.rows], self.nodes)

    def cut(self, draft: Draft) -> Draft:
        """Leave out nothing."""
        return draft

    def update(self, batch: Batch, draft: Draft, outcome: Outcome, seconds: dict[str, float]) -> None:
        """Learn nothing."""
