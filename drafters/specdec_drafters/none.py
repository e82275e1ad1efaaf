"""Drafter `none`: plain decoding through the same loop, the honest baseline."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_core import (
    Budget,
    Capabilities,
    Context,
    Draft,
    DrafterConfig,
    DraftLaw,
    Outcome,
    Rows,
    TargetInfo,
)


class NoDrafter:
    """Propose nothing."""

    name = "none"
    Config = DrafterConfig
    capabilities = Capabilities(laws=frozenset({DraftLaw.ONE_HOT}), max_depth=0, on_host=True)

    def __init__(self, config: DrafterConfig) -> None:
        self.config = config

    def bind(self, target: TargetInfo) -> None:
        """Take any target."""

    def admit(self, rows: Rows) -> None:
        """Keep nothing of a row."""

    def propose(self, context: Context, budget: Budget) -> Draft:
        """Draft nothing."""
        return Draft.empty(len(context.rows), context.device)

    def observe(self, outcome: Outcome) -> None:
        """Learn nothing."""

    def release(self, rows: Sequence[int]) -> None:
        """Forget nothing."""
