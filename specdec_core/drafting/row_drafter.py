"""A base for drafters that work on the host, row by row: no model, fifteen lines.

class Parrot(RowDrafter):
    \"\"\"Repeat the last token.\"\"\"

    name = "parrot"

    def propose_row(self, tokens, budget):
        return [tokens[-1]] * budget
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from specdec_core.contract.draft import Draft, DraftLaw
from specdec_core.contract.interfaces import (
    Budget,
    Capabilities,
    Context,
    DrafterConfig,
    Outcome,
    Rows,
    TargetInfo,
)


class RowDrafterConfig(DrafterConfig):
    """Options of a row-wise drafter."""

    num_tokens: int = Field(default=10, ge=0, description="most tokens to draft a round")


class RowDrafter:
    """Turn `propose_row` into a `Drafter` of ONE_HOT chains: its tokens are a function of the row's own."""

    name: str
    Config: Any = RowDrafterConfig

    def __init__(self, config: RowDrafterConfig) -> None:
        self.config = config
        depth = config.num_tokens
        self.capabilities = Capabilities(frozenset({DraftLaw.ONE_HOT}), max_depth=depth, on_host=True)

    def propose_row(self, tokens: Sequence[int], budget: int) -> list[int]:
        """Draft at most `budget` ids after a row's committed `tokens` (prompt included, read-only)."""
        raise NotImplementedError

    def propose_for(self, row: int, tokens: Sequence[int], budget: int) -> list[int]:
        """Draft for a row by its id; for drafters that keep something for each row."""
        return self.propose_row(tokens, budget)

    def scores_for(self, row: int, chain: Sequence[int]) -> Sequence[float]:
        """Guess the chance of each token of the chain just proposed to be accepted; empty: no guess.

        Of the whole chain up to that token, so they do not rise. The length policy learns what its guesses
        are worth: they need to rank chains well more than to be right.
        """
        return ()

    def bind(self, target: TargetInfo) -> None:
        """Take any target."""

    def admit(self, rows: Rows) -> None:
        """Keep nothing of a row."""

    def propose(self, context: Context, budget: Budget) -> Draft:
        """Ask for each row in turn; a row's constraint cuts its chain, or forces another."""
        drafts, scores = [], []
        for i, (row, k) in enumerate(zip(context.rows, budget.depth, strict=True)):
            chain = self.propose_for(row, context.row_tokens(i), k) if k else []
            guesses = self.scores_for(row, chain) if chain else ()
            legal = context.legal(i, chain)
            chain, guesses = chain[:legal], guesses[:legal]
            forced = context.forced(i, k) if chain else []
            if chain[: len(forced)] != forced:
                chain, guesses = forced, [1.0] * len(forced)
            drafts.append(chain)
            scores.append(guesses)
        return Draft.chains(drafts, context.device, scores)

    def observe(self, outcome: Outcome) -> None:
        """Learn nothing: the next context holds all that was committed."""

    def release(self, rows: Sequence[int]) -> None:
        """Forget nothing."""
