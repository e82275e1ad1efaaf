"""Drafter `tree_top2`: a tree of the likeliest tokens, one draft forward a level."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from specdec_core import (
    HOLE,
    Budget,
    Capabilities,
    Context,
    Draft,
    DraftLaw,
    TargetInfo,
    UsageError,
    on_device,
)
from specdec_drafters._cached import CachedDrafter, early_draft_model, own_draft_model
from specdec_drafters._children import Children, drawn_children, top_children
from specdec_drafters._law import Temperature
from specdec_drafters._loading import OwnModelConfig
from specdec_drafters._vocabulary import aligned

_MOST_NODES = 512


class TreeTop2Config(OwnModelConfig):
    """Options of `tree_top2`."""

    depth: int = Field(3, ge=1, le=16, description="levels of the tree")
    width: int = Field(2, ge=1, le=64, description="children of each node")
    children: Literal["top", "sampled"] = Field(
        "top", description="top: the likeliest tokens; sampled: drawn from q without replacement"
    )
    layer: int | None = Field(None, description="draft with the target's first layers, so many of them")
    temperature: Temperature = None

    @model_validator(mode="after")
    def _consistent(self) -> TreeTop2Config:
        if self.model is not None and self.layer is not None:
            raise UsageError("tree_top2 drafts with model= or with layer=, not with both; leave one out")
        if sum(level_sizes(self.width, self.depth, _MOST_NODES + 1)) > _MOST_NODES:
            raise UsageError(
                f"depth={self.depth} and width={self.width} make more than {_MOST_NODES} nodes; lower one"
            )
        return self


class TreeTop2(CachedDrafter):
    """Draft a full tree: `width` children of every node, `depth` levels; 2 + 4 + 8 nodes by default.

    A node's children are the likeliest tokens under q, in that order (a ONE_HOT tree), or drawn from it
    without replacement (SpecInfer, Miao et al. 2023; Sequoia, Chen et al. 2024). Logits come from a small
    model or from the target's first layers. `Draft.scores` holds each path's probability.
    """

    name = "tree_top2"
    Config = TreeTop2Config

    def __init__(self, config: TreeTop2Config) -> None:
        super().__init__(config)
        sampled = config.children == "sampled"
        self._law = DraftLaw.WITHOUT_REPLACEMENT if sampled else DraftLaw.ONE_HOT
        self._choose = drawn_children if sampled else top_children
        self.capabilities = Capabilities(
            laws=frozenset({self._law}),
            max_depth=config.depth,
            max_nodes=sum(level_sizes(config.width, config.depth, _MOST_NODES)),
            makes_trees=True,
        )

    def bind(self, target: TargetInfo) -> None:
        """Find the model that drafts: the one named, else a companion of the target."""
        shipped = target.companions
        if self.config.layer is None and (self.config.model is not None or "draft" in shipped):
            self._draft_model = own_draft_model(target, self.config, self.name)
        elif self.config.layer is not None or "exit_layer" in shipped:
            self._draft_model = early_draft_model(target, self.config.layer)
        else:
            raise UsageError(
                "drafter 'tree_top2' needs a model to draft with, and this target ships none: write "
                "tree_top2:model=ID_OR_PATH, or tree_top2:layer=E for the target's first layers"
            )
        if self.config.width > target.vocab_size:
            raise UsageError(f"width={self.config.width} is more than there are tokens: {target.vocab_size}")
        if not self.draft_model.cached.trees:
            raise UsageError("the model that tree_top2 drafts with can follow chains only; use small_model")

    def draft(self, context: Context, budget: Budget) -> Draft:
        """Draft level by level; what is over the budget is never drawn."""
        sizes = level_sizes(self.config.width, max(budget.depth), budget.nodes)
        tree = _Tree(context, budget.depth)
        model = self.draft_model.cached
        logits = model.extend(context)
        for depth, size in enumerate(sizes, 1):
            logits = aligned(logits, self.draft_model.vocab_size)
            children = self._choose(
                context, logits, tree.paths(), self.config.width, self.config.temperature, tree.nodes
            )
            tree.add(children, size, self.config.width)
            if depth < len(sizes):
                fed = tree.nodes - size
                logits = model.extend(context, tree.tokens[-1], tree.parents(), fed)[:, :size]
        return tree.finished(self._law, self.config.width)


def level_sizes(width: int, depth: int, nodes: int) -> list[int]:
    """Count the nodes of each level of a full tree, filled from the top and left until `nodes` are there."""
    sizes: list[int] = []
    size = 1
    for _ in range(depth):
        size = min(size * width, nodes - sum(sizes))
        if size <= 0:
            break
        sizes.append(size)
    return sizes


class _Tree:
    """The trees of a batch as they grow; B rows, c nodes on the last level (at first the root alone)."""

    def __init__(self, context: Context, depths: list[int]) -> None:
        self._limits = on_device(depths, context.device)
        rows = len(depths)
        self.nodes = 0
        self.tokens: list[Tensor] = []  # int64 [B, c] each
        self._parents: list[Tensor] = []  # int64 [B, c] each
        self._probs: list[Tensor] = []  # float32 [B, c, V] each
        self._scores: list[Tensor] = []  # float32 [B, c] each
        self._paths = torch.empty((rows, 1, 0), dtype=torch.int64, device=context.device)
        self._real = torch.ones((rows, 1), dtype=torch.bool, device=context.device)
        self._score = torch.ones((rows, 1), device=context.device)
        self._first = -1  # index of the last level's first node

    def paths(self) -> Tensor | None:
        """Tokens on the way to each node of the last level: int64 [B, c, depth]; None at the root."""
        return self._paths if self.tokens else None

    def add(self, children: Children, size: int, width: int) -> None:
        """Put `size` nodes below the last level: the children of its first node, of its second, ..."""
        up = torch.arange(size, device=self._real.device) // width  # each child's parent on the last level
        tokens = children.tokens.flatten(1)[:, :size]
        depth_left = (self._limits > len(self.tokens)).unsqueeze(1)
        self._real = self._real[:, up] & children.real.flatten(1)[:, :size] & depth_left
        self._score = self._score[:, up] * children.share.flatten(1)[:, :size]
        self._paths = torch.cat([self._paths[:, up], tokens.unsqueeze(-1)], dim=-1)
        self.tokens.append(tokens)
        self._parents.append(torch.where(self._real, self._first + up, HOLE))
        self._scores.append(self._score)
        if children.q is not None:
            self._probs.append(children.q.flatten(1, 2)[:, :size])
        self._first, self.nodes = self.nodes, self.nodes + size

    def parents(self) -> Tensor:
        """int64 [B, nodes so far]."""
        return torch.cat(self._parents, dim=1)

    def finished(self, law: DraftLaw, width: int) -> Draft:
        """Make the draft."""
        return Draft.of(
            torch.cat(self.tokens, dim=1),
            self.parents(),
            law,
            depth=len(self.tokens),
            width=width,
            probs=torch.cat(self._probs, dim=1) if self._probs else None,
            scores=torch.cat(self._scores, dim=1),
        )
