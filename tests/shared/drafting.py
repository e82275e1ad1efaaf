"""What the tests of drafters with a model share: cousins of a model, records of drafts, forced rejections."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specdec_core import (
    HOLE,
    Budget,
    Capabilities,
    Context,
    Draft,
    Drafter,
    DraftLaw,
    Outcome,
    RowRng,
    Rows,
    SamplingParams,
    SpecDecoder,
    TargetDistributions,
    TargetInfo,
    Verdict,
    VerifierConfig,
)
from specdec_core.testing.models import cousin as cousin
from specdec_drafters import EarlyExit, SmallModel, TreeTop2

RAGGED = (1, 3, 9, 20)


def small(model: Any, **options: Any) -> SmallModel:
    """A `small_model` over a model in memory."""
    return SmallModel(SmallModel.Config(model=model, **options))


def early(layer: int | None = None, **options: Any) -> EarlyExit:
    """An `early_exit`."""
    return EarlyExit(EarlyExit.Config(layer=layer, **options))


def tree(model: Any = None, layer: int | None = None, **options: Any) -> TreeTop2:
    """A `tree_top2` over a model in memory, or the target's first layers."""
    return TreeTop2(TreeTop2.Config(model=model, layer=layer, **options))


@functools.lru_cache(maxsize=256)
def plain(model: Any, prompt: tuple[int, ...], n: int) -> list[int]:
    """The ids that the model's own `generate` says greedily."""
    at = torch.tensor([prompt])
    said = model.generate(
        at,
        attention_mask=torch.ones_like(at),
        do_sample=False,
        max_new_tokens=n,
        min_new_tokens=n,
        pad_token_id=0,
    )
    return list(said[0, len(prompt) :].tolist())


def says(decoder: SpecDecoder, prompts: Sequence[Sequence[int]], n: int, **options: Any) -> list[list[int]]:
    """The ids a decoder gives for each prompt."""
    results = decoder.generate([list(p) for p in prompts], SamplingParams(max_new_tokens=n, **options))
    return [result.token_ids for result in results]


class Recorded:
    """A drafter, and for every row of every draft what stood before it and what was proposed."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name, self.Config, self.config = drafter.name, drafter.Config, drafter.config
        self.drafts: list[tuple[tuple[int, ...], list[tuple[int, int]]]] = []  # (context, nodes)
        self.raw: list[Draft] = []

    @property
    def capabilities(self) -> Capabilities:
        return self.drafter.capabilities

    def bind(self, target: TargetInfo) -> None:
        self.drafter.bind(target)

    def admit(self, rows: Rows) -> None:
        self.drafter.admit(rows)

    def propose(self, context: Context, budget: Budget) -> Draft:
        draft = self.drafter.propose(context, budget)
        self.raw.append(draft)
        for i in range(len(context.rows)):
            self.drafts.append((tuple(context.row_tokens(i)), nodes_of(draft, i)))
        return draft

    def observe(self, outcome: Outcome) -> None:
        self.drafter.observe(outcome)

    def release(self, rows: Sequence[int]) -> None:
        self.drafter.release(rows)


class Sometimes(Recorded):
    """Asks its drafter for a row only at some committed lengths: the others get nothing."""

    def __init__(self, drafter: Drafter, every: int) -> None:
        super().__init__(drafter)
        self.every = every

    def propose(self, context: Context, budget: Budget) -> Draft:
        depth = [
            d if length % self.every else 0
            for d, length in zip(budget.depth, context.host_lengths, strict=True)
        ]
        return super().propose(context, replace(budget, depth=depth))


def nodes_of(draft: Draft, row: int) -> list[tuple[int, int]]:
    """A row's nodes, (token, parent) each, holes left out."""
    pairs = zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True)
    return [pair for pair in pairs if pair[1] != HOLE]


class RejectAt:
    """Greedy, but nothing is accepted in some of its calls; what it says is still right."""

    name = "reject_at"
    Config = VerifierConfig
    laws = frozenset(DraftLaw)
    handles_trees = True
    lossless = True
    samples = False
    drafter_invariant = True
    preference = 0

    def __init__(self, inner: Any, calls: Collection[int]) -> None:
        self.config = VerifierConfig()
        self.inner, self.calls, self.seen = inner, calls, 0
        self.accepted: list[Tensor] = []

    def verify(self, p: TargetDistributions, draft: Draft, rng: RowRng) -> Verdict:
        self.seen += 1
        verdict: Verdict = self.inner.verify(p, draft, rng)
        if self.seen in self.calls:
            verdict = Verdict(torch.full_like(verdict.path, -1), p.argmax[:, 0])
        self.accepted.append((verdict.path >= 0).sum(dim=1))
        return verdict
