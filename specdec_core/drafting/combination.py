"""Several drafters tried in order, row by row: the first that proposes for a row wins.

One batch can so hold rows of different laws and shapes. A member learns of every row's commits, and that its
own draft was not used where another member drafted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from specdec_core.contract.blame import blaming_drafter
from specdec_core.contract.draft import Draft
from specdec_core.contract.errors import DrafterError
from specdec_core.contract.interfaces import (
    Budget,
    Capabilities,
    Context,
    Drafter,
    DrafterConfig,
    Outcome,
    Rows,
    TargetInfo,
)


class CombinationConfig(DrafterConfig):
    """The members' options, by label."""

    members: dict[str, Any]


class Combination:
    """Drafters in order of preference, as one.

    `labels` names the members: their names, numbered from the second of a name on (`small_model#2`).
    `Draft.sources` says which of them drafted each row. A member that raises ends the whole combination; the
    error names it.
    """

    Config = CombinationConfig

    def __init__(self, members: Sequence[Drafter]) -> None:
        self.members = tuple(members)
        self.labels = _labels(members)
        self.name = ",".join(self.labels)
        self.config = CombinationConfig(members={label: member.config for label, member in self._labelled()})
        self._drafted: dict[int, str] = {}  # row id -> label of the member that drafted it last

    @property
    def capabilities(self) -> Capabilities:
        """What any of the members can make or needs."""
        all_of = [member.capabilities for member in self.members]
        trees = any(can.makes_trees for can in all_of)
        return Capabilities(
            laws=frozenset().union(*(can.laws for can in all_of)),
            max_depth=max(can.max_depth for can in all_of),
            max_nodes=max(can.nodes for can in all_of) if trees else None,
            makes_trees=trees,
            on_host=all(can.on_host for can in all_of),
            hidden_layers=tuple(sorted({layer for can in all_of for layer in can.hidden_layers})),
            top_logits=max(can.top_logits for can in all_of),
            learns=any(can.learns for can in all_of),
            asks=all(can.asks or can.on_host for can in all_of),
            next_row=max(can.next_row for can in all_of),
        )

    def bind(self, target: TargetInfo) -> None:
        """Bind every member."""
        for member in self.members:
            member.bind(target)

    def admit(self, rows: Rows) -> None:
        """Begin rows with every member."""
        for label, member in self._labelled():
            with blaming_drafter(label, "admit"):
                member.admit(rows)

    def propose(self, context: Context, budget: Budget) -> Draft:
        """Ask each member for the rows that none before it drafted."""
        left = [i for i, depth in enumerate(budget.depth) if depth > 0]
        parts: list[tuple[Draft, list[int]]] = []
        sources = [""] * len(budget.depth)
        for label, member in self._labelled():
            if not left:
                break
            allowed = budget.for_rows(left).clipped(member.capabilities)
            with blaming_drafter(label, "propose"):
                draft = member.propose(context.for_rows(left).for_member(label), allowed)
                taken = _taken(draft, allowed)
                parts.append((draft.for_rows(taken), [left[i] for i in taken]))
            for i in reversed(taken):
                sources[left.pop(i)] = label
        self._drafted.update(zip(context.rows, sources, strict=True))
        return replace(Draft.merged(len(sources), parts, context.device), sources=tuple(sources))

    def observe(self, outcome: Outcome) -> None:
        """Tell every member what was committed; the path is empty where another's draft was used."""
        for label, member in self._labelled():
            with blaming_drafter(label, "observe"):
                member.observe(self._as_seen_by(label, member.capabilities, outcome))

    def release(self, rows: Sequence[int]) -> None:
        """Release rows from every member, even if one fails."""
        failure: DrafterError | None = None
        for row in rows:
            self._drafted.pop(row, None)
        for label, member in self._labelled():
            try:
                with blaming_drafter(label, "release"):
                    member.release(rows)
            except DrafterError as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _labelled(self) -> Iterator[tuple[str, Drafter]]:
        return zip(self.labels, self.members, strict=True)

    def _as_seen_by(self, label: str, can: Capabilities, outcome: Outcome) -> Outcome:
        own = [self._drafted.get(row) == label for row in outcome.rows]
        top = outcome.top_logits if can.top_logits else None
        if top is not None:
            top = (top[0][..., : can.top_logits], top[1][..., : can.top_logits])
        return replace(
            outcome.for_rows(range(len(own)), own_draft=own),
            hidden={layer: outcome.hidden[layer] for layer in can.hidden_layers if layer in outcome.hidden},
            top_logits=top,
            scored=None if top is None else outcome.scored,
        )


def _labels(members: Sequence[Drafter]) -> tuple[str, ...]:
    seen: Counter[str] = Counter()
    labels = []
    for member in members:
        seen[member.name] += 1
        count = seen[member.name]
        labels.append(member.name if count == 1 else f"{member.name}#{count}")
    return tuple(labels)


def _taken(draft: Draft, budget: Budget) -> list[int]:
    """The rows that a draft is for, by what the host knows: a look at the device would be a transfer."""
    if not draft.nodes:
        return []
    counts = budget.depth if draft.counts is None else draft.counts
    return [i for i, count in enumerate(counts) if count > 0]
