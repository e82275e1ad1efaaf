"""Lengths that adapt leave the law of the output alone: every draft and every outcome, summed exactly.

The policy itself decides in every branch, from what that branch has seen, with timings that depend on it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from simulation import Batch, CostCurve, Row
from support import ids, tiny_llama

from specdec_core import (
    HOLE,
    Capabilities,
    Draft,
    DraftLaw,
    SamplingParams,
    SpecDecoder,
    Verifier,
    VerifierConfig,
)
from specdec_core.contract.interfaces import Outcome
from specdec_core.contract.sampling_params import FinishReason
from specdec_core.length import acceptance, costs
from specdec_core.length.adaptive import AdaptiveLength, AdaptivePlan
from specdec_core.length.costs import RoundCosts
from specdec_core.testing.enumeration import outcomes
from specdec_core.testing.worlds import (
    Drafted,
    Tokens,
    Toy,
    as_draft,
    as_p,
    chain,
    drafts,
    target_law,
    toy,
    tree,
    world,
)
from specdec_verifiers import Block, Match, Rejection, TreeMask

ONE_HOT, SAMPLED, WITHOUT = DraftLaw.ONE_HOT, DraftLaw.SAMPLED, DraftLaw.WITHOUT_REPLACEMENT
plain = VerifierConfig()
rejection, block, tree_mask, match = Rejection(plain), Block(plain), TreeMask(plain), Match(plain)
STEEP = CostCurve(((1, 1.0), (2, 1.3)), slope=0.35)  # lengths from 0 up are near to each other
SIZE = 4


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a policy change its mind within four tokens."""
    monkeypatch.setattr(acceptance, "_DOUBT", 0.3)
    monkeypatch.setattr(costs, "_ON_CPU", 0.35)
    monkeypatch.setattr(costs, "_SPREAD", 1.0)


class Clock:
    """What a run's clock shows: moved by hand, copied with the policy that reads it."""

    seconds = 0.0

    def now(self) -> float:
        return self.seconds


@dataclass
class Branch:
    """A way that a run went so far."""

    text: Tokens
    weight: float
    row: Row
    policy: AdaptiveLength
    whole: Draft | None = None  # what the host proposed in the round under way
    cuts: bool = False

    @classmethod
    def first(cls, can: Capabilities, *, ragged: bool) -> Branch:
        policy = AdaptiveLength(can, RoundCosts("cpu", ragged=ragged), Clock().now, asks=can.asks)
        return cls((), 1.0, Row(0, [], [0] * SIZE), policy)

    def after(self, drafted: Drafted, chance: float, path: list[int], last: int) -> Branch:
        """Commit a block, and let a copy of the policy learn of it."""
        policy, row = copy.deepcopy((self.policy, self.row))
        plan: Any = plan_of(policy, row)  # the same as was drafted by, for it is a function of the past
        if plan.budget.goes_on is not None:
            goes_on(plan, [float(q.max()) for _, _, q in drafted.nodes[: policy.depth - 1] if q is not None])
        if self.cuts and plan.cut is not None and self.whole is not None:
            plan.cut(self.whole)
        block = [*(drafted.nodes[node][0] for node in path), last][: row.left]
        row.said += len(block)
        real = sum(parent != HOLE for _, parent, _ in drafted.nodes)
        row.stats.count_round(real, len(path), len(block))
        row.finished = None if row.left else FinishReason.LENGTH
        text = (*self.text, *block)
        clock: Any = policy._now
        clock.__self__.seconds += STEEP(1 + len(drafted.nodes)) * (1 + 0.3 * (sum(text) % 2))
        outcome = Outcome((0,), (0,), (block,), (path,), (row.finished,))
        draft = as_draft([drafted], 2) if drafted.nodes else Draft.empty(1)
        policy.learn(plan, Batch([row]), draft, outcome, {"draft": 0.1 * len(drafted.nodes)})  # type: ignore[arg-type]
        return Branch(text, self.weight * chance * drafted.weight, row, policy)


def plan_of(policy: AdaptiveLength, row: Row) -> AdaptivePlan:
    return policy.plan(Batch([row]))  # type: ignore[arg-type]


def drafted_by_model(branch: Branch, q: Toy, law: DraftLaw, width: int) -> list[Drafted]:
    """What is drawn, to a depth that was decided before."""
    depth = plan_of(copy.deepcopy(branch.policy), branch.row).budget.depth[0]
    return drafts(q, law, chain(depth) if width == 1 else tree(*[width] * depth), branch.text)


def goes_on(plan: AdaptivePlan, sure: list[float]) -> bool:
    """Ask after each token of a chain, as a drafter does, until the answer is no."""
    asked = plan.budget.goes_on
    assert asked is not None
    return all(asked((0,), torch.tensor([one])) for one in sure)


def drafted_by_model_that_asks(branch: Branch, q: Toy) -> list[Drafted]:
    """What is drawn, with an end that depends on how sure q was before each draw."""
    depth = plan_of(copy.deepcopy(branch.policy), branch.row).budget.depth[0]

    def shape(path: Tokens) -> int:
        sure = [float(q((*branch.text, *path[:i])).max()) for i in range(len(path))]
        return int(len(path) < depth and goes_on(plan_of(copy.deepcopy(branch.policy), branch.row), sure))

    return drafts(q, SAMPLED, shape, branch.text)


def drafted_on_host(branch: Branch, q: Toy) -> list[Drafted]:
    """What is a function of the context: cut by what the host knows of it."""
    plan: Any = plan_of(copy.deepcopy(branch.policy), branch.row)
    [whole] = drafts(q, ONE_HOT, chain(plan.budget.depth[0]), branch.text)
    if not whole.nodes:
        return [whole]
    tokens = [token for token, _, _ in whole.nodes]
    scores = np.cumprod([q((*branch.text, *tokens[:i])).max() for i in range(len(tokens))]).tolist()
    branch.whole, branch.cuts = Draft.chains([tokens], scores=[scores]), True
    left = plan.cut(branch.whole).nodes
    return [replace(whole, nodes=whole.nodes[:left])]


def rounds(verifier: Verifier, p: Toy, made: list[tuple[Branch, Drafted]]) -> Iterator[Branch]:
    """Verify all at once; yield every way it can go."""
    rows = [drafted for _, drafted in made]
    draft = as_draft(rows, 2)
    every = outcomes(verifier, as_p(p, [branch.text for branch, _ in made], rows), draft)
    found = zip(
        every.row.tolist(), every.weight.tolist(), every.path.tolist(), every.next_token.tolist(), strict=True
    )
    for b, chance, path, last in found:
        branch, drafted = made[b]
        yield branch.after(drafted, chance, [node for node in path if node >= 0], last)


def law_with(
    verifier: Verifier, p: Toy, can: Capabilities, draft: Any, *, ragged: bool = False
) -> tuple[dict[Tokens, float], set[tuple[int, int]]]:
    """The law of the text, and the (tokens said, nodes) that came up."""
    law: dict[Tokens, float] = defaultdict(float)
    seen, branches = set[tuple[int, int]](), [Branch.first(can, ragged=ragged)]
    while branches:
        made = [(branch, drafted) for branch in branches for drafted in draft(branch)]
        seen |= {(len(branch.text), len(drafted.nodes)) for branch, drafted in made}
        branches = []
        for branch in rounds(verifier, p, made):
            if branch.row.finished:
                law[branch.text] += branch.weight
            else:
                branches.append(branch)
    return law, seen


def error(law: dict[Tokens, float], p: Toy) -> float:
    wanted = target_law(world(p, p, ONE_HOT, chain(0), size=SIZE))
    return max(abs(law.get(text, 0.0) - wanted.get(text, 0.0)) for text in law.keys() | wanted.keys())


def varied(seen: set[tuple[int, int]]) -> bool:
    """Whether the nodes depended on more than how much was said."""
    return len(seen) > len({said for said, _ in seen})


@pytest.mark.parametrize(
    ("verifier", "law", "width"),
    [
        (rejection, SAMPLED, 1),
        (block, SAMPLED, 1),
        (tree_mask, SAMPLED, 2),
        (tree_mask, WITHOUT, 2),
        (match, SAMPLED, 1),
    ],
    ids=lambda value: getattr(value, "name", str(value)).lower(),
)
def test_depths_that_a_model_is_asked_for_keep_the_law(verifier: Verifier, law: DraftLaw, width: int) -> None:
    p, q, depth = toy(1, 2), toy(2, 2), 3 if width == 1 else 2
    can = Capabilities(frozenset({law}), depth, sum(width**d for d in range(1, depth + 1)), width > 1)
    found, seen = law_with(verifier, p, can, lambda branch: drafted_by_model(branch, q, law, width))
    assert error(found, p) < 1e-12
    if width == 1:  # a tree of two levels leaves few sizes to choose from
        assert varied(seen)


@pytest.mark.parametrize("verifier", [rejection, block, tree_mask, match], ids=lambda v: v.name)
def test_chains_that_end_where_a_model_is_not_sure_keep_the_law(verifier: Verifier) -> None:
    p, q = toy(1, 2), toy(5, 2)
    can = Capabilities(frozenset({SAMPLED}), 3, asks=True)
    found, seen = law_with(verifier, p, can, lambda branch: drafted_by_model_that_asks(branch, q))
    assert error(found, p) < 1e-12
    assert varied(seen)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("verifier", [rejection, block, tree_mask, match], ids=lambda v: v.name)
def test_drafts_that_are_cut_by_their_scores_keep_the_law(verifier: Verifier, ragged: bool) -> None:
    p, q = toy(3, 2), toy(4, 2)
    can = Capabilities(frozenset({ONE_HOT}), 3, on_host=True)
    found, seen = law_with(verifier, p, can, lambda branch: drafted_on_host(branch, q), ragged=ragged)
    assert error(found, p) < 1e-12
    assert varied(seen)


def test_a_cut_by_what_was_drawn_would_be_seen() -> None:
    """Otherwise the tests above could not fail: host nodes of a drawn chain, cut by the value drawn."""
    p, q = toy(1, 2), toy(2, 2)
    can = Capabilities(frozenset({SAMPLED}), 3, on_host=True)

    def draft(branch: Branch) -> list[Drafted]:
        every = drafted_by_model(branch, q, SAMPLED, 1)
        return [replace(one, nodes=() if one.nodes and one.nodes[0][0] == 1 else one.nodes) for one in every]

    found, _ = law_with(rejection, p, can, draft)
    assert error(found, p) > 0.01


@pytest.mark.parametrize("ragged", [False, True])
def test_no_value_on_the_device_is_looked_at(ragged: bool) -> None:
    """Tensors without values: a look would raise, and on a GPU be a transfer."""
    can = Capabilities(frozenset({SAMPLED, ONE_HOT}), 5)
    policy, clock = AdaptiveLength(can, RoundCosts("cpu", ragged=ragged), (c := Clock()).now), c
    rows = [Row(i, [1], [0] * 40) for i in range(2)]
    for turn in range(6):
        batch: Any = Batch(rows)
        plan: Any = policy.plan(batch)
        budget = plan.budget
        n = max(*budget.depth, 1)
        made = Draft.chains([[5] * n, [6] * n], scores=[[0.5] * n, [0.4] * n])
        assert made.host
        nowhere = [tensor.to("meta") for tensor in (made.tokens, made.parents, made.laws)]
        draft = plan.cut(Draft(*nowhere, depth=n, width=1, host=(made.host[0], None), counts=(n, n)))  # type: ignore[misc, arg-type]
        assert draft.nodes == n  # what a model drafted is not cut
        assert draft.counts
        assert draft.counts[1] == n
        clock.seconds += 1.0
        for row in rows:
            row.said += 1
            row.stats.count_round(n, 0, 1)
        policy.learn(
            plan, batch, draft, Outcome((0, 1), (0, 1), ([5], [7]), ([], []), (None, None)), {"draft": 0.1}
        )
        assert turn or budget.depth


def test_rows_of_one_seed_share_no_draw_where_lengths_adapt() -> None:
    """A row's length may follow from what another drew: with the same noise that would be its own draw."""
    prompts, params = [ids(4), ids(4)], SamplingParams(max_new_tokens=4, temperature=1.0, seed=1)
    for draft_tokens, verifier, shared in (
        ("auto", "rejection", False),
        (2, "rejection", True),
        ("auto", "match", True),
    ):
        decoder = SpecDecoder(tiny_llama(), verifier=verifier, draft_tokens=draft_tokens, strict=True)  # type: ignore[arg-type]
        one, two = next(decoder.rounds(prompts, params)).batch.rows
        assert (one.own_seed == two.own_seed) == shared
