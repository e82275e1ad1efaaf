"""What all drafters with a model share: where its logits come from, and the rows it knows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec_core import (
    Budget,
    CachedModel,
    Capabilities,
    Context,
    Draft,
    Outcome,
    Rows,
    TargetInfo,
    UsageError,
)
from specdec_drafters._loading import OwnModelConfig, own_model


@dataclass(frozen=True, eq=False)
class DraftModel:
    """A model that drafts, and the vocabulary its tokens must lie in."""

    cached: CachedModel
    vocab_size: int  # of the target
    borrowed: bool  # the target's own layers and cache


def own_draft_model(target: TargetInfo, config: OwnModelConfig, drafter: str) -> DraftModel:
    """Wrap a model of its own, the one named or the target's companion.

    Raises:
        UsageError: there is none, or its vocabulary is another one than the target's.
        UnsupportedModel: its state cannot be rolled back.
    """
    wanted = target.companions.get("draft") if config.model is None else config.model
    if wanted is None:
        raise UsageError(
            f"drafter {drafter!r} needs a model, and this target ships none: write {drafter}:model=ID_OR_PATH"
        )
    try:
        model = own_model(wanted, config, target)
    except UsageError as error:
        raise UsageError(f"drafter {drafter!r}: {error}") from error
    return DraftModel(target.cached(model), target.vocab_size, borrowed=False)


def early_draft_model(target: TargetInfo, layer: int | None) -> DraftModel:
    """Take the target's first layers; without a layer the target's companion exit, else a third of them.

    Raises:
        UsageError: there is no such exit.
    """
    layers = target.config.num_hidden_layers
    if layers < 2:
        raise UsageError(f"this target has {layers} layer, so it has no early exit")
    if layer is None:
        layer = target.companions.get("exit_layer", max(1, layers // 3))
    return DraftModel(target.early_layers(layer), target.vocab_size, borrowed=True)


class CachedDrafter(ABC):
    """A drafter over a `CachedModel`. Subclasses bind a `DraftModel` and draft for rows that have a depth.

    The model is never fed past its own context limit: a row that has reached it goes on undrafted. A
    borrowed model does not read a prompt a second time, so a row's first round has no draft.
    """

    capabilities: Capabilities

    def __init__(self, config: Any) -> None:
        self.config = config
        self._places: dict[int, int] = {}  # row id -> place
        self._unread: set[int] = set()  # rows whose prompt the target has not read yet
        self._draft_model: DraftModel | None = None

    @property
    def draft_model(self) -> DraftModel:
        """What drafts."""
        assert self._draft_model is not None, "the drafter is not bound"
        return self._draft_model

    @abstractmethod
    def bind(self, target: TargetInfo) -> None:
        """Set `_draft_model`; see `Drafter.bind`."""

    @abstractmethod
    def draft(self, context: Context, budget: Budget) -> Draft:
        """Draft for rows that all have a depth of at least 1."""

    def admit(self, rows: Rows) -> None:
        """Reserve room in the cache."""
        self._places.update(zip(rows.ids, rows.places, strict=True))  # first: so that all are released
        self._unread.update(rows.ids)
        self.draft_model.cached.admit(rows, self.capabilities.nodes)

    def propose(self, context: Context, budget: Budget) -> Draft:
        """Draft for the rows that have a depth."""
        clipped = budget.clipped(self.capabilities)
        depths = [self._deepest(context, i, depth) for i, depth in enumerate(clipped.depth)]
        index = [i for i, depth in enumerate(depths) if depth > 0]
        if not index or budget.nodes < 1:
            return Draft.empty(len(depths), context.device)
        part = context if len(index) == len(depths) else context.for_rows(index)
        draft = self.draft(part, replace(clipped, depth=depths).for_rows(index))
        return Draft.merged(len(depths), [(draft, index)], context.device)

    def observe(self, outcome: Outcome) -> None:
        """Keep the accepted nodes that were fed, forget the others."""
        self.draft_model.cached.keep(outcome)
        read = [row for row, tokens in zip(outcome.rows, outcome.tokens, strict=True) if tokens]
        self._unread.difference_update(read)

    def release(self, rows: Sequence[int]) -> None:
        """Free the rows' places."""
        self._unread.difference_update(rows)
        self.draft_model.cached.release([self._places.pop(row) for row in rows if row in self._places])

    def _deepest(self, context: Context, i: int, depth: int) -> int:
        if self.draft_model.borrowed and context.rows[i] in self._unread:
            return 0
        limit = self.draft_model.cached.context_limit
        return depth if limit is None else min(depth, limit - context.host_lengths[i])
