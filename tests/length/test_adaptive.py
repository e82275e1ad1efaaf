"""`--draft-tokens auto` in earnest: what plain decoding says, one transfer a round, nothing left behind."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from simulation import Batch as SimulatedBatch
from simulation import Row as SimulatedRow
from support import (
    ScriptedDrafter,
    base,
    decoder_for,
    greedy,
    ids,
    oracle,
    registered_drafters,
    sampled,
    tiny_llama,
    wrong,
)
from transfers import counting

from specdec_core import (
    Capabilities,
    Draft,
    DraftLaw,
    RowDrafter,
    RowDrafterConfig,
    SamplingParams,
    SpecDecoder,
)
from specdec_core.contract.interfaces import Outcome
from specdec_core.length.acceptance import Belief
from specdec_core.length.adaptive import AdaptiveLength
from specdec_core.length.costs import RoundCosts

PROMPTS = [[10], ids(5, 1), [3, 4, 5, 6] * 5, ids(40, 2)]


# --- what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", registered_drafters())
def test_it_says_what_plain_decoding_says(name: str) -> None:
    model = tiny_llama()
    decoder = decoder_for(model, name, draft_tokens="auto", max_batch=3)
    for prompts in (PROMPTS[:1], PROMPTS):
        results = decoder.generate(prompts, greedy(40))
        assert [r.token_ids for r in results] == [base(model, prompt, 40) for prompt in prompts]
    params = SamplingParams(max_new_tokens=20, temperature=0.8, seed=3)
    wanted = [sampled(model, prompt, params) for prompt in PROMPTS]
    assert [r.token_ids for r in decoder.generate(PROMPTS, params)] == wanted


def test_auto_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # of the fixture that fixes lengths
    assert SpecDecoder(tiny_llama()).draft_tokens == "auto"


@pytest.mark.parametrize("batch", [1, 4])
def test_a_round_has_one_transfer(batch: int) -> None:
    decoder = SpecDecoder(tiny_llama(), draft_tokens="auto", strict=True)
    with counting() as names:
        for done in decoder.rounds(PROMPTS[-batch:], greedy(20)):
            assert names == ["tolist"]
            assert done.draft.nodes <= 20
            names.clear()


# --- how far a model goes on -----------------------------------------------------------------------


def asked(costs: RoundCosts, rows: int = 1) -> tuple[AdaptiveLength, Any]:
    """A policy whose model drafts well, and the budget of its second round."""
    can = Capabilities(frozenset({DraftLaw.ONE_HOT}), 5, asks=True)
    policy = AdaptiveLength(can, costs, lambda: 0.0, asks=True)
    batch: Any = SimulatedBatch([SimulatedRow(i, [1], [0] * 50) for i in range(rows)])
    return policy, policy.plan(batch).budget


def steps(budget: Any, sure: Sequence[float], rows: int = 1) -> int:
    """Draft until the answer is no: tokens drafted."""
    going = (budget.goes_on(tuple(range(rows)), torch.full((rows,), one)) for one in sure)
    return 1 + sum(itertools.takewhile(bool, going))


def timed(step: float) -> RoundCosts:
    costs = RoundCosts("cpu")
    for _ in range(3):
        costs.add("", 1, 0, 1.0)
        costs.add_draft("", 1, 1, step)
    return costs


def test_a_model_goes_on_while_it_is_sure() -> None:
    _, budget = asked(timed(0.3))
    assert budget.depth == [5]
    assert steps(budget, [0.99] * 4) == 5
    _, budget = asked(timed(0.3))
    assert steps(budget, [0.99, 0.1, 0.99, 0.99]) == 2
    _, budget = asked(timed(0.01))
    assert steps(budget, [0.6, 0.6, 0.5, 0.5]) > 2, (
        "a step that costs next to nothing is made on a small hope"
    )


def test_what_confidence_is_worth_is_learned() -> None:
    """A model that is always sure, and always wrong, is found out."""
    policy, _ = asked(timed(0.1))
    row, depths = SimulatedRow(0, [1], [0] * 200), []
    for _ in range(30):
        batch: Any = SimulatedBatch([row])
        plan = policy.plan(batch)
        budget: Any = plan.budget
        n = steps(budget, [0.95] * 4) if budget.depth[0] else 0
        depths.append(n)
        row.said += 1
        row.stats.count_round(n, 0, 1)
        empty = torch.zeros((1, n), dtype=torch.int64)
        draft = Draft.of(empty, empty, DraftLaw.ONE_HOT)
        policy.learn(plan, batch, draft, Outcome((0,), (0,), ([0],), ([],), (None,)), {"draft": 0.1 * n})
    assert depths[0] == 5
    assert sum(depths[10:]) < 10


def test_only_where_a_look_is_free() -> None:
    """On a GPU each answer would be a transfer; and `none` of it where the length is fixed."""
    for length, asked_for in (("auto", True), (3, False)):
        decoder = decoder_for(tiny_llama(), "early_exit", draft_tokens=length)
        seen: list[Any] = []
        propose = decoder.drafter.propose

        def watched(context: Any, budget: Any, seen: list[Any] = seen, propose: Any = propose) -> Any:
            seen.append(budget.goes_on)
            return propose(context, budget)

        decoder.drafter.propose = watched  # type: ignore[method-assign]
        decoder.generate(PROMPTS[0], greedy(8))
        assert seen
        assert [goes_on is not None for goes_on in seen] == [asked_for] * len(seen)


# --- what is drafted ------------------------------------------------------------------------------


class Echo(RowDrafter):
    """Proposes what it is told, with scores or without."""

    name = "echo"

    def __init__(self, ahead: Any, score: float | None) -> None:
        super().__init__(RowDrafterConfig(num_tokens=6))
        self.ahead, self.score, self.budgets = ahead, score, list[int]()

    def propose_row(self, tokens: Sequence[int], budget: int) -> list[int]:
        self.budgets.append(budget)
        made: list[int] = self.ahead(list(tokens), budget)
        return made

    def scores_for(self, row: int, chain: Sequence[int]) -> list[float]:
        return [] if self.score is None else [self.score ** (i + 1) for i in range(len(chain))]


@pytest.mark.parametrize(
    ("score", "right", "drafts"), [(0.95, True, True), (0.02, False, False), (None, True, True)]
)
def test_scores_and_experience_decide(
    score: float | None, right: bool, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is cut is compared with what is said too: so a drafter without scores is found to be right."""
    monkeypatch.setattr(RoundCosts, "add", lambda *_: None)  # nothing is timed: costs are as on paper
    model, prompt = tiny_llama(), ids(9)
    ahead = oracle(model, prompt)
    drafter = Echo(ahead if right else lambda tokens, k: [wrong(t) for t in ahead(tokens, k)], score)
    decoder = SpecDecoder(model, drafter=drafter, draft_tokens="auto", strict=True)
    result = decoder.generate(prompt, greedy(60))
    assert result.token_ids == base(model, prompt, 60)
    assert set(drafter.budgets[:-6]) == {6}  # it is asked for all it has
    assert (result.stats.drafted_tokens > 20) == drafts
    assert (result.stats.rounds < 30) == drafts


def test_a_depth_is_never_more_than_the_drafters_own() -> None:
    model, prompt = tiny_llama(), ids(9)
    drafter = ScriptedDrafter(lambda ask: oracle(model, prompt)(ask.tokens, ask.depth), depth=3)
    decoder = SpecDecoder(model, drafter=drafter, draft_tokens="auto", strict=True)
    assert max(done.draft.nodes for done in decoder.rounds(prompt, greedy(40))) <= 3


# --- estimates ------------------------------------------------------------------------------------


def test_guesses_are_corrected_by_what_was_accepted() -> None:
    row = Belief()
    assert row.chance(0.7) == pytest.approx(0.7)
    for _ in range(30):
        row.learn([(0.7, False)])
    assert row.chance(0.7) < 0.25
    assert Belief(row).chance(0.7) < 0.6, "a new row begins with a little of it"
    for _ in range(60):
        row.learn([(0.7, True)])
    assert row.chance(0.7) > 0.85


def test_a_cut_draft_is_whole() -> None:
    draft = Draft.trees([[1, 2, 3, 4], [5]], [[-1, -1, 0, 1], [-1]], scores=[[0.5, 0.3, 0.4, 0.1], [0.2]])
    cut = draft.cut(3)
    assert (cut.nodes, cut.depth, cut.width, cut.counts) == (3, 2, 2, (3, 1))
    assert cut.parents.tolist() == [[-1, -1, 0], [-1, -2, -2]]
    assert cut.scores is not None
    assert cut.scores.shape == (2, 3)
    assert draft.cut(9) is draft
    assert draft.cut([9, 9]) is draft
    some = draft.cut([2, 0])
    assert (some.nodes, some.counts) == (2, (2, 0))
    assert some.cut(1).counts == (1, 0)
    assert draft.cut(0).nodes == 0
