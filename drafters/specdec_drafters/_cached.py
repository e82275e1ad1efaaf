"""What all drafters with a model share: where its logits come from, and the rows it knows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
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
class Source:
    """A model that drafts, and the vocabulary its tokens must lie in."""

    model: CachedModel
    vocab_size: int  # of the target
    borrowed: bool  # the target's own layers and cache


def small_model_source(target: TargetInfo, config: OwnModelConfig, drafter: str) -> Source:
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
    return Source(target.cached(model), target.vocab_size, borrowed=False)


def early_exit_source(target: TargetInfo, layer: int | None) -> Source:
    """Take the target's first layers; without a layer the target's companion exit, else a third of them.

    Raises:
        UsageError: there is no such exit.
    """
    layers = target.config.num_hidden_layers
    if layers < 2:
        raise UsageError(f"this target has {layers} layer, so it has no early exit")
    if layer is None:
        layer = target.companions.get("exit_layer", max(1, layers // 3))
    return Source(target.early_layers(layer), target.vocab_size, borrowed=True)


class CachedDrafter(ABC):
    """A drafter over a `CachedModel`. Subclasses bind a `Source` and draft for rows that have room.

    The model is never fed past its own context limit: a row that has reached it goes on undrafted. A
    borrowed model does not read a prompt a second time, so a row's first round has no draft.
    """

    capabilities: Capabilities

    def __init__(self, config: Any) -> None:
        self.config = config
        self._places: dict[int, int] = {}  # row id -> place
        self._unread: set[int] = set()  # rows whose prompt the target has not read yet
        self._source: Source | None = None

    @property
    def source(self) -> Source:
        """Where logits come from."""
        assert self._source is not None, "the drafter is not bound"
        return self._source

    @abstractmethod
    def bind(self, target: TargetInfo) -> None:
        """Set the source; see `Drafter.bind`."""

    @abstractmethod
    def draft(self, context: Context, budget: Budget) -> Draft:
        """Draft for rows that all have a depth of at least 1."""

    def admit(self, rows: Rows) -> None:
        """Reserve room in the cache."""
        self._places.update(zip(rows.ids, rows.places, strict=True))  # first: so that all are released
        self._unread.update(rows.ids)
        self.source.model.admit(rows, self.capabilities.nodes)

    def propose(self, context: Context, budget: Budget) -> Draft:
        """Draft for the rows that have room."""
        depths = [self._room(context, i, depth) for i, depth in enumerate(budget.depth)]
        index = [i for i, depth in enumerate(depths) if depth > 0]
        if not index or budget.nodes < 1:
            return Draft.empty(len(depths), context.device)
        part = context if len(index) == len(depths) else context.for_rows(index)
        allowed = Budget(
            [depths[i] for i in index], min(budget.nodes, self.capabilities.nodes), budget.goes_on
        )
        draft = self.draft(part, allowed)
        return Draft.merged(len(depths), [(draft, index)], context.device)

    def observe(self, outcome: Outcome) -> None:
        """Keep the accepted nodes that were fed, forget the others."""
        self.source.model.keep(outcome)
        read = [row for row, tokens in zip(outcome.rows, outcome.tokens, strict=True) if tokens]
        self._unread.difference_update(read)

    def release(self, rows: Sequence[int]) -> None:
        """Free the rows' places."""
        self._unread.difference_update(rows)
        self.source.model.release([self._places.pop(row) for row in rows if row in self._places])

    def _room(self, context: Context, i: int, depth: int) -> int:
        if self.source.borrowed and context.rows[i] in self._unread:
            return 0
        depth = min(depth, self.capabilities.max_depth)
        limit = self.source.model.context_limit
        return depth if limit is None else min(depth, limit - context.host_lengths[i])
