"""Tokens that a row's constraint forces are drafted for free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specdec_core.contract.draft import Draft, DraftLaw
from specdec_core.contract.interfaces import Budget, Capabilities, Context, Drafter, Outcome, Rows, TargetInfo

LABEL = "forced"
"""Stands in `Draft.sources`, and so in the statistics, for rows that were drafted here."""


class Forcing:
    """A drafter, and chains of forced tokens for rows where they reach at least as far.

    These are rows whose constraint forces as many tokens as the drafter may draft, and rows that it drafts
    nothing for. All others are drafted as by the drafter alone: with its own name, so the same randomness,
    and budget. A forced token is a ONE_HOT node, verified like any other.
    """

    def __init__(self, drafter: Drafter, most: int = 16) -> None:
        self.drafter, self.most = drafter, most
        self.name: str = drafter.name
        self.Config, self.config = drafter.Config, drafter.config
        self._forced: set[int] = set()  # ids of the rows that it drafted itself

    @property
    def capabilities(self) -> Capabilities:
        """What the drafter can make and needs, and chains of forced tokens."""
        can = self.drafter.capabilities
        return replace(
            can,
            laws=can.laws | {DraftLaw.ONE_HOT},
            max_depth=max(can.max_depth, self.most),
            max_nodes=max(can.nodes, self.most) if can.makes_trees else None,
        )

    def bind(self, target: TargetInfo) -> None:
        """Bind the drafter."""
        self.drafter.bind(target)

    def admit(self, rows: Rows) -> None:
        """Begin rows."""
        self.drafter.admit(rows)

    def propose(self, context: Context, budget: Budget) -> Draft:
        """Draft what is forced, and ask the drafter for the other rows."""
        depths = budget.forced or [0] * len(budget.depth)
        chains = [context.forced(i, min(depth, self.most)) if depth else [] for i, depth in enumerate(depths)]
        own = budget.clipped(self.drafter.capabilities)
        asked = [i for i, chain in enumerate(chains) if not chain or len(chain) < own.depth[i]]
        draft = self._asked(context, own, asked)
        drafted = [i for i, some in zip(asked, _drafted(draft), strict=True) if some or not chains[i]]
        forced = sorted(set(range(len(chains))) - set(drafted))
        self._forced.difference_update(context.rows)
        self._forced.update(context.rows[i] for i in forced)
        if not forced:
            return draft
        theirs = draft.for_rows([asked.index(i) for i in drafted])
        ours = [chains[i] for i in forced]
        sure = Draft.chains(ours, context.device, [[1.0] * len(chain) for chain in ours])
        merged = Draft.merged(len(chains), [(sure, forced), (theirs, drafted)], context.device)
        sources = dict.fromkeys(forced, LABEL) | dict(zip(drafted, theirs.sources or (), strict=False))
        return replace(merged, sources=tuple(sources.get(i, "") for i in range(len(chains))))

    def observe(self, outcome: Outcome) -> None:
        """Tell the drafter what was committed; the path is empty where its draft was not used."""
        own = [row not in self._forced for row in outcome.rows]
        self.drafter.observe(outcome.for_rows(range(len(own)), own_draft=own))

    def release(self, rows: Sequence[int]) -> None:
        """Forget rows."""
        self._forced.difference_update(rows)
        self.drafter.release(rows)

    def _asked(self, context: Context, budget: Budget, rows: list[int]) -> Draft:
        """Ask the drafter for these rows."""
        if not any(budget.depth[i] for i in rows):
            return Draft.empty(len(rows), context.device)
        if len(rows) == len(context.rows):
            return self.drafter.propose(context, budget)
        return self.drafter.propose(context.for_rows(rows), budget.for_rows(rows))


def _drafted(draft: Draft) -> list[bool]:
    """Which rows may have nodes, by what the host knows."""
    if not draft.nodes:
        return [False] * draft.rows
    return [True] * draft.rows if draft.counts is None else [count > 0 for count in draft.counts]
