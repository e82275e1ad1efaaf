"""A drafter that does as it is told, and scripts that tell it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from pydantic import Field

from specdec_core.contract.draft import HOLE, ROOT, Draft, DraftLaw
from specdec_core.contract.interfaces import (
    Budget,
    Capabilities,
    Context,
    DrafterConfig,
    Outcome,
    Rows,
    TargetInfo,
)
from specdec_core.testing.models import VOCAB
from specdec_core.testing.reference import base

Node = tuple[int, int]  # token, index of the parent
Ahead = Callable[[list[int], int], list[int]]
Script = Callable[["Ask"], "Sequence[int] | Sequence[Node]"]


class Ask:
    """What a script is asked for: one row of one round."""

    def __init__(self, call: int, i: int, row: int, tokens: list[int], budget: Budget) -> None:
        self.call, self.i, self.row, self.tokens = call, i, row, tokens
        self.depth, self.nodes = budget.depth[i], budget.nodes


class ScriptedConfig(DrafterConfig):
    """Options of the scripted drafter."""

    num_tokens: int = Field(8, ge=0, description="deepest node")


class ScriptedDrafter:
    """Proposes what its script says for each row: token ids (a chain), or (token, parent) nodes.

    `calls` records every call and its rows, `outcomes` all that was observed; `now` are the rows it has.
    """

    name = "scripted"
    Config = ScriptedConfig

    def __init__(
        self,
        script: Script,
        *,
        depth: int = 8,
        nodes: int | None = None,
        trees: bool = False,
        laws: Iterable[DraftLaw] = (DraftLaw.ONE_HOT,),
    ) -> None:
        self.config = ScriptedConfig(num_tokens=depth)
        self.capabilities = Capabilities(
            laws=frozenset(laws), max_depth=depth, max_nodes=nodes, makes_trees=trees
        )
        self.script = script
        self.proposals = 0
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.outcomes: list[Outcome] = []
        self.now: set[int] = set()

    def bind(self, target: TargetInfo) -> None:
        self.calls.append(("bind", ()))

    def admit(self, rows: Rows) -> None:
        self.calls.append(("admit", rows.ids))
        self.now.update(rows.ids)

    def propose(self, context: Context, budget: Budget) -> Draft:
        self.calls.append(("propose", context.rows))
        drafts = [
            nodes_of(self.script(Ask(self.proposals, i, row, list(context.row_tokens(i)), budget)))
            for i, row in enumerate(context.rows)
        ]
        self.proposals += 1
        return tree_draft(drafts, context.device)

    def observe(self, outcome: Outcome) -> None:
        self.calls.append(("observe", outcome.rows))
        self.outcomes.append(outcome)

    def release(self, rows: Sequence[int]) -> None:
        self.calls.append(("release", tuple(rows)))
        self.now.difference_update(rows)


def nodes_of(said: Sequence[Any]) -> list[Node]:
    """A script's answer as nodes: a list of bare ids is a chain."""
    return [(said_, i - 1) if isinstance(said_, int) else said_ for i, said_ in enumerate(said)]


def tree_draft(rows: list[list[Node]], device: Any = "cpu", law: DraftLaw = DraftLaw.ONE_HOT) -> Draft:
    """A draft of one tree a row, of any sizes."""
    n = max(map(len, rows), default=0)
    if n == 0:
        return Draft.empty(len(rows), device)
    tokens = [[token for token, _ in row] + [0] * (n - len(row)) for row in rows]
    parents = [[parent for _, parent in row] + [HOLE] * (n - len(row)) for row in rows]
    children = [[up.count(parent) for parent in set(up) - {HOLE}] for up in parents]
    return Draft.of(
        torch.tensor(tokens, device=device),
        torch.tensor(parents, device=device),
        law,
        depth=max(depth_of(up) for up in parents),
        width=max(max(one, default=0) for one in children),
    )


def depth_of(parents: Sequence[int]) -> int:
    """Depth of a tree in parents' notation; holes count nothing."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent == HOLE else 1 if parent == ROOT else depths[parent] + 1)
    return max(depths, default=0)


def following(*texts: Sequence[int]) -> Ahead:
    """Look up what comes next in known texts, prompt and output together: (tokens, k) -> k ids."""

    def ahead(tokens: list[int], k: int) -> list[int]:
        for text in texts:
            if list(text[: len(tokens)]) == tokens:
                return list(text[len(tokens) : len(tokens) + k])
        return []

    return ahead


def oracle(model: Any, *prompts: Sequence[int], n: int = 80) -> Ahead:
    """Know what plain greedy decoding says after these prompts."""
    return following(*([*prompt, *base(model, prompt, n)] for prompt in prompts))


def wrong(token: int, by: int = 1) -> int:
    """Another token of the vocabulary."""
    return (token + by) % VOCAB


def accepting(ahead: Ahead, counts: Sequence[int], k: int) -> Script:
    """A chain of k tokens a round, of which the first counts[round] are right and the rest wrong."""

    def script(ask: Ask) -> list[int]:
        right = ahead(ask.tokens, min(k, ask.depth))
        good = counts[ask.call % len(counts)]
        return [token if i < good else wrong(token) for i, token in enumerate(right)]

    return script


def planted(parents: Sequence[int], path: Sequence[int], ahead: Ahead) -> Script:
    """A tree of this shape with the right tokens along `path` and wrong, distinct ones elsewhere."""

    def script(ask: Ask) -> list[Node]:
        right = ahead(ask.tokens, len(path))
        nodes: list[Node] = []
        for node, parent in enumerate(parents):
            at = path.index(node) if node in path else None
            if at is not None and at < len(right):
                nodes.append((right[at], parent))
            else:
                depth = depth_of(list(parents[: node + 1]))
                avoid = right[depth - 1] if depth <= len(right) else 0
                nodes.append((wrong(avoid, node + 1), parent))
        return pruned(nodes, ask.depth)

    return script


def pruned(nodes: list[Node], depth: int) -> list[Node]:
    """Leave out nodes deeper than allowed; parents keep their meaning."""
    depths: dict[int, int] = {ROOT: 0}
    renamed = {ROOT: ROOT}
    kept: list[Node] = []
    for node, (token, parent) in enumerate(nodes):
        depths[node] = depths[parent] + 1
        if depths[node] <= depth:
            renamed[node] = len(kept)
            kept.append((token, renamed[parent]))
    return kept
