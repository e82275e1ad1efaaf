"""Drafter `recycling`: trees of the candidates that the target itself had, and did not take."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from pydantic import Field, model_validator
from torch import Tensor

from specdec_core import (
    HOLE,
    ROOT,
    Budget,
    Capabilities,
    Context,
    Draft,
    DrafterConfig,
    DraftLaw,
    Outcome,
    Rows,
    TargetInfo,
    UsageError,
)
from specdec_recycling.store import Stored, check_place, load, save, save_at_the_end, vocabulary
from specdec_recycling.table import Table
from specdec_recycling.template import MOST_NODES, Template, cut, full, grown

_MOST_SHAPES = 64


class RecyclingConfig(DrafterConfig):
    """Options of `recycling`."""

    candidates: int = Field(8, ge=1, le=64, description="likeliest successors that are kept of each token")
    nodes: int = Field(80, ge=1, le=MOST_NODES, description="nodes of the tree")
    depth: int = Field(6, ge=1, le=32, description="levels of the tree")
    shape: str | None = Field(
        None, pattern=r"^\d+(x\d+)*$", description="children of every node, level by level, such as 8x3x2x1"
    )
    prompt: bool = Field(True, description="where nothing is known of a token, try its successor in a prompt")
    shared: bool = Field(True, description="one table for all rows, also later ones; false: one a row")
    path: Path | None = Field(None, description="file that keeps the table between runs")

    @model_validator(mode="after")
    def _consistent(self) -> RecyclingConfig:
        if self.path is not None and not self.shared:
            raise UsageError(f"path={self.path} keeps what rows share, and shared=false: leave one out")
        template = self.template
        if template.width > self.candidates:
            raise UsageError(
                f"shape={self.shape} wants {template.width} children of a node, and "
                f"candidates={self.candidates}; raise candidates, or lower the shape"
            )
        return self

    @property
    def template(self) -> Template:
        """The whole tree."""
        if self.shape is None:
            return grown(self.nodes, self.depth, self.candidates)
        widths = tuple(int(width) for width in self.shape.split("x"))
        if 0 in widths:
            raise UsageError(f"shape={self.shape} has a level without nodes; leave it out")
        return full(widths)


class Recycling:
    """Draft by token recycling (Luo et al. 2024, arXiv 2408.08696).

    A table holds, for each token, the target's k likeliest next tokens when it last read that token, on
    whatever path: those of rejected nodes too. A static tree is filled from it, starting at the last
    committed token, and every verification updates it. All of it happens on the device, without waiting for
    it. Drafts are a function of the row's past and, with `shared`, of other rows'; they change how many
    rounds there are, never the law of the output. `Draft.scores` are those of the template.
    """

    name = "recycling"
    Config = RecyclingConfig

    def __init__(self, config: RecyclingConfig) -> None:
        self.config = config
        template = config.template
        self.capabilities = Capabilities(
            laws=frozenset({DraftLaw.ONE_HOT}),
            max_depth=template.depth,
            max_nodes=template.nodes,
            makes_trees=template.width > 1,
            top_logits=config.candidates,
            learns=config.shared,
        )
        self._shapes: dict[tuple[int, int], _Shape] = {}  # by the budget's nodes and depth
        self._stored = Stored()
        self._place: tuple[Path, str] | None = None  # the file, and whose vocabulary is in it

    def bind(self, target: TargetInfo) -> None:
        """Make the table, or read it.

        Raises:
            UsageError: the file is damaged, foreign, or could not be written.
        """
        # a vocabulary that is smaller than the table is wide leaves the last candidates unknown
        k = min(self.config.candidates, target.vocab_size)
        self.capabilities = replace(self.capabilities, top_logits=k)
        slots = 1 if self.config.shared else target.max_rows
        self.table = Table(slots, target.vocab_size, self.config.candidates, target.device)
        self._shapes.clear()
        self._stored = Stored(self.table)
        if self.config.path is None:
            return
        path, words = self.config.path.expanduser().absolute(), vocabulary(target)
        check_place(path)
        if path.exists():
            load(path, self._stored, words)
            self.capabilities = replace(self.capabilities, next_row=self._stored.next_row)
        self._place = (path, words)
        weakref.finalize(self, save_at_the_end, path, self._stored, words)

    def save(self) -> None:
        """Write the table now.

        Raises:
            UsageError: there is no `path`, or no target yet.
            OSError: it cannot be written.
        """
        if self._place is None:
            raise UsageError("there is no file to save to: build the drafter with path=FILE")
        path, words = self._place
        save(path, self._stored, words)

    def admit(self, rows: Rows) -> None:
        """Look at the prompts; without `shared`, begin with an empty table for each row."""
        for row, place, prompt in zip(rows.ids, rows.places, rows.prompts, strict=True):
            self._stored.next_row = max(self._stored.next_row, row + 1)
            slot = 0 if self.config.shared else place
            if not self.config.shared:
                self.table.clear(slot)
            if self.config.prompt:
                self.table.suggest(slot, dict(pairwise(prompt)))

    def propose(self, context: Context, budget: Budget) -> Draft:
        """Fill the tree that the budget allows."""
        shape = self._shape(budget.nodes, max(budget.depth))
        if not shape.template.nodes:
            return Draft.empty(len(context.rows), context.device)
        last = context.tokens.gather(1, context.lengths.unsqueeze(-1) - 1).squeeze(-1)
        tokens = self.table.tree(self._slots(context.places), last, shape.template, shape.ranks, shape.up)
        hole = tokens == self.table.unknown
        if min(budget.depth) < shape.template.depth:
            deepest = torch.tensor(budget.depth, device=context.device).unsqueeze(-1)
            hole = hole | (shape.depths > deepest)
        return Draft.of(
            tokens.masked_fill(hole, 0),
            shape.parents.expand_as(tokens).masked_fill(hole, HOLE),
            DraftLaw.ONE_HOT,
            depth=shape.template.depth,
            width=shape.template.width,
            scores=shape.scores.expand(tokens.shape).masked_fill(hole, 0.0),
            chain=shape.template.width == 1,
        )

    def observe(self, outcome: Outcome) -> None:
        """Store the target's candidates at every index that it scored, whoever drafted it."""
        if outcome.top_logits is None or outcome.scored is None:
            return
        ids, _ = outcome.top_logits
        self.table.write(self._slots(outcome.places), outcome.scored, ids[..., : self.config.candidates])
        self._stored.changed = True

    def release(self, rows: Sequence[int]) -> None:
        """Keep the table: a place is cleared when it is taken again."""

    def _slots(self, places: Sequence[int]) -> Tensor:
        """Which table each row uses: int64 [B]."""
        slots = [0] * len(places) if self.config.shared else list(places)
        return torch.tensor(slots, device=self.table.candidates.device)

    def _shape(self, nodes: int, depth: int) -> _Shape:
        """The tree of a budget: what a row gets of it does not depend on its neighbours' depths."""
        config, can = self.config, self.capabilities
        size = min(nodes, can.nodes), min(depth, can.max_depth)
        if size not in self._shapes:
            if len(self._shapes) == _MOST_SHAPES:
                self._shapes.clear()
            whole = config.template if config.shape else grown(size[0], config.depth, config.candidates)
            self._shapes[size] = _Shape.of(cut(whole, *size), self.table.candidates.device)
        return self._shapes[size]


@dataclass(frozen=True, eq=False)
class _Shape:
    """A template on the device; n nodes."""

    template: Template
    ranks: Tensor  # int64 [n]
    up: Tensor  # int64 [n]: the parent's index in its own level
    parents: Tensor  # int64 [n]
    depths: Tensor  # int64 [n]
    scores: Tensor  # float32 [n]

    @classmethod
    def of(cls, template: Template, device: torch.device) -> _Shape:
        starts = [start for start, _ in template.levels]
        up = [
            0 if parent == ROOT else parent - starts[depth - 2]
            for parent, depth in zip(template.parents, template.depths, strict=True)
        ]
        ranks, rise, parents, depths = torch.tensor(
            [template.ranks, up, template.parents, template.depths], dtype=torch.int64
        ).to(device)
        return cls(template, ranks, rise, parents, depths, torch.tensor(template.chances, device=device))
