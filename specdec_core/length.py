"""How many tokens to draft."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_core.interfaces import Budget, Capabilities, Outcome
from specdec_core.rows import Batch


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

    def update(self, outcome: Outcome) -> None:
        """Learn nothing."""
