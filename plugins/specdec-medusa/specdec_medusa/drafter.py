"""Drafter `medusa`: heads on the target's last state guess the next few tokens at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

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
    UsageError,
)
from specdec_medusa.checkpoint import load_heads
from specdec_medusa.choices import (
    Choices,
    chain_choices,
    checked,
    measured_choices,
    paper_choices,
    read_choices,
)
from specdec_medusa.heads import Heads
from specdec_medusa.target import state_width
from specdec_medusa.trees import AdaptiveTree, StaticTree

_USUAL_HEADS = 5  # assumed until the weights are read, when the drafter is bound


class MedusaConfig(DrafterConfig):
    """Options of `medusa`."""

    heads: str | None = Field(
        None, description="file, folder or hub id of the heads; default: those that the target ships"
    )
    tree: str | list[list[int]] = Field(
        "adaptive",
        description="adaptive: the likeliest paths of each round; measured: a static tree from the "
        "accuracies that training measured; paper: the paper's 63 nodes; chain; or a JSON file of paths",
    )
    nodes: int = Field(24, ge=1, le=512, description="most nodes of an adaptive or a measured tree")
    top_k: int = Field(10, ge=1, le=256, description="most candidates of each head")
    num_heads: int | None = Field(None, ge=1, description="use the first so many heads; default: all")
    revision: str | None = Field(None, description="branch, tag or commit of a hub id")


class Medusa:
    """Draft with Medusa heads (Cai et al. 2024, arXiv 2401.10774).

    Head k reads the state at the last token that was fed, as the target's head does, and guesses the token
    k + 2 places behind it: that of depth k + 1, as the pending token lies between. The candidates of all
    heads make a ONE_HOT tree. A row's first round has no draft: its states are not there yet.
    """

    name = "medusa"
    Config = MedusaConfig

    def __init__(self, config: MedusaConfig) -> None:
        self.config = config
        self._ready: set[int] = set()  # rows whose state is that of the last fed token
        self.capabilities = self._capable(config.num_heads or _USUAL_HEADS, config.nodes)

    def bind(self, target: TargetInfo) -> None:
        """Load the heads; refuse those of another target, and a tree they cannot fill.

        Raises:
            UsageError: they cannot be loaded, or do not fit the target or the tree.
        """
        self._target = target
        self._heads, found = self._loaded(target)
        tokens = min(self._heads.vocab_size or target.vocab_size, target.vocab_size)
        self._top_k = min(self.config.top_k, tokens)
        depth = self.config.num_heads or self._heads.count
        if depth > self._heads.count:
            raise UsageError(f"num_heads={depth} is more than were trained: {self._heads.count}")
        choices = self._choices(depth, found)
        tree = AdaptiveTree(depth) if choices is None else StaticTree(checked(choices, depth, self._top_k))
        self._tree = tree.to(target.device)
        nodes = self.config.nodes if choices is None else len(choices)
        self.capabilities = self._capable(tree.depth, nodes, (target.config.num_hidden_layers,))
        self._states = torch.zeros(
            target.max_rows, self._heads.hidden_size, dtype=target.dtype, device=target.device
        )

    def admit(self, rows: Rows) -> None:
        """Wait for the rows' first states."""

    def propose(self, context: Context, budget: Budget) -> Draft:
        """Make a tree for each row whose state is there."""
        index = [i for i, row in enumerate(context.rows) if row in self._ready and budget.depth[i] > 0]
        if not index or budget.nodes < 1:
            return Draft.empty(len(context.rows), context.device)
        part = context if len(index) == len(context.rows) else context.for_rows(index)
        depths = [budget.depth[i] for i in index]
        ids, probs = self._candidates(part, min(max(depths), self._tree.depth))
        nodes = self._tree(ids, probs, depths, budget.nodes)
        draft = Draft.of(
            nodes.tokens,
            nodes.parents,
            DraftLaw.ONE_HOT,
            depth=nodes.depth,
            width=nodes.width,
            chain=nodes.width == 1,  # each node hangs on the one before, and holes come last
            scores=nodes.scores,
            counts=(nodes.tokens.shape[1],) * len(index),
        )
        return Draft.merged(len(context.rows), [(draft, index)], context.device)

    def observe(self, outcome: Outcome) -> None:
        """Keep the state at the last token that was fed, of rows that committed something."""
        states = outcome.hidden.get(self._target.config.num_hidden_layers)
        said = [i for i, tokens in enumerate(outcome.tokens) if tokens and outcome.fed]
        if states is None or not said:
            return
        last = [(i, outcome.fed[i] - 1, outcome.places[i]) for i in said]
        row, at, place = torch.tensor(last).T.to(states.device, non_blocking=True)
        self._states[place] = self._target.final_norm(states[row, at]).to(self._states)
        self._ready.update(outcome.rows[i] for i in said)

    def release(self, rows: Sequence[int]) -> None:
        """Forget the rows."""
        self._ready.difference_update(rows)

    def _candidates(self, context: Context, depth: int) -> tuple[Tensor, Tensor]:
        """Ask the first `depth` heads: ids int64 and probabilities float32, both [B, depth, top_k]."""
        places = torch.tensor(context.places).to(self._states.device, non_blocking=True)
        with torch.no_grad():
            logits = self._heads(self._states[places], self._target.output_embeddings, depth)
        logits = logits.transpose(0, 1)[..., : self._target.vocab_size].to(self._states.device, torch.float32)
        if self._heads.ids is None:  # the first head's path is known: what a constraint forbids is left out
            first = context.masked(logits[:, 0])
            logits = torch.cat([first.unsqueeze(1), logits[:, 1:]], dim=1)
        probs, ids = logits.softmax(dim=-1).topk(self._top_k, dim=-1)
        return self._heads.named(ids), probs

    def _loaded(self, target: TargetInfo) -> tuple[Heads, dict[str, Any]]:
        where = self.config.heads or target.companions.get("medusa")
        if where is None:
            raise UsageError(
                "drafter 'medusa' needs heads, and this target ships none: write medusa:heads=PATH, or train "
                "some with `specdec-medusa train`"
            )
        heads, found = load_heads(str(where), target.vocab_size, self.config.revision)
        width = state_width(target)
        if heads.hidden_size != width:
            raise UsageError(
                f"heads={where} read states of width {heads.hidden_size}, and the target's are {width} wide; "
                "use heads that were trained for this target"
            )
        return heads.requires_grad_(False).to(device=target.device, dtype=target.dtype), found

    def _choices(self, depth: int, found: dict[str, Any]) -> Choices | None:
        """Give a static tree's paths; None: the tree is adaptive."""
        tree = self.config.tree
        if not isinstance(tree, str):
            return [tuple(path) for path in tree]
        if tree == "measured":
            accuracies = found.get("medusa_accuracies")
            if not accuracies:
                raise UsageError(
                    "tree=measured needs heads with measured accuracies in their config; use adaptive"
                )
            return measured_choices([each[: self._top_k] for each in accuracies[:depth]], self.config.nodes)
        if tree in ("adaptive", "paper", "chain"):
            return {"adaptive": None, "paper": paper_choices(), "chain": chain_choices(depth)}[tree]
        return read_choices(tree)

    def _capable(self, depth: int, nodes: int, layers: tuple[int, ...] = ()) -> Capabilities:
        chain = self.config.tree == "chain"
        return Capabilities(
            laws=frozenset({DraftLaw.ONE_HOT}),
            max_depth=depth,
            max_nodes=None if chain else nodes,
            makes_trees=not chain,
            hidden_layers=layers,
        )
