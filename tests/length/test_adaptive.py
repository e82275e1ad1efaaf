"""`--draft-tokens auto` in earnest: what plain decoding says, one transfer a round, nothing left behind."""

from __future__ import annotations

import copy
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
from test_transfers import counting

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
from specdec_core.length.acceptance import Acceptance, Clue, new_row
from specdec_core.length.adaptive import AdaptiveLength
from specdec_core.length.costs import CPU_FLOAT32, CPU_HALF, CPU_PACKED, RoundCosts

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
    return policy, policy.budget(SimulatedBatch([SimulatedRow(i, [1], [0] * 50) for i in range(rows)]))  # type: ignore[arg-type]


def steps(budget: Any, sure: Sequence[float], rows: int = 1) -> int:
    """Draft until the answer is no: tokens drafted."""
    going = (budget.goes_on(tuple(range(rows)), torch.full((rows,), one)) for one in sure)
    return 1 + sum(itertools.takewhile(bool, going))


def timed(step: float) -> RoundCosts:
    costs = RoundCosts(CPU_HALF)
    for _ in range(3):
        costs.add(1, 0, 1.0)
        costs.add_draft(1, 1, step)
    return costs


def test_a_model_goes_on_while_it_is_sure() -> None:
    _, budget = asked(timed(0.3))
    assert budget.depth == [5]
    assert steps(budget, [0.99] * 4) == 5
    _, budget = asked(timed(0.3))
    assert steps(budget, [0.99, 0.1, 0.99, 0.99]) == 2
    _, budget = asked(timed(0.01))
    assert steps(budget, [0.5, 0.4, 0.5, 0.5]) > 2, (
        "a step that costs next to nothing is made on a small hope"
    )


def test_what_confidence_is_worth_is_learned() -> None:
    """A model that is always sure, and always wrong, is found out."""
    policy, _ = asked(timed(0.1))
    row, depths = SimulatedRow(0, [1], [0] * 200), []
    for _ in range(30):
        batch: Any = SimulatedBatch([row])
        budget = policy.budget(batch)
        n = steps(budget, [0.95] * 4) if budget.depth[0] else 0
        depths.append(n)
        row.said += 1
        row.stats.count_round(n, 0, 1)
        empty = torch.zeros((1, n), dtype=torch.int64)
        draft = Draft.of(empty, empty, DraftLaw.ONE_HOT)
        policy.update(batch, draft, Outcome((0,), (0,), ([0],), ([],), (None,)), {"draft": 0.1 * n})
    assert depths[0] == 5
    assert sum(depths[10:]) < 10


def test_only_where_a_look_is_free() -> None:
    """On a GPU each answer would be a transfer; and `none` of it where the length is fixed."""
    model = tiny_llama()
    decoder = decoder_for(model, "early_exit", draft_tokens="auto")
    seen = []
    propose = decoder.drafter.propose
    decoder.drafter.propose = lambda context, budget: (seen.append(budget.goes_on), propose(context, budget))[
        1
    ]  # type: ignore[method-assign]
    decoder.generate(PROMPTS[0], greedy(8))
    assert seen
    assert all(seen)
    seen.clear()
    decoder.draft_tokens = 3
    decoder.generate(PROMPTS[0], greedy(8))
    assert seen
    assert not any(seen)


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


# --- what is kept ---------------------------------------------------------------------------------


def test_nothing_of_a_text_is_left_for_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """B93: a call that accepts nothing, and then one that begins as the very first did."""
    made = []
    begun = AdaptiveLength.__init__

    def watched(self: AdaptiveLength, *args: Any, **options: Any) -> None:
        begun(self, *args, **options)
        made.append((self, copy.deepcopy((self._acceptance._run, self._acceptance._clues, self._rows))))

    monkeypatch.setattr(AdaptiveLength, "__init__", watched)
    model = tiny_llama()
    before = copy.deepcopy(model.generation_config.to_dict()), copy.deepcopy(model.config.to_dict())
    decoder = SpecDecoder(model, draft_tokens="auto", strict=True)
    for _ in range(2):
        decoder.generate([[3, 4, 5, 6] * 5, ids(40, 2)], greedy(30))
    (first, at_first), (second, then) = made
    assert first is not second
    assert then[1:] == at_first[1:] == ({}, {})
    assert {kind: (s.mean, s.variance) for kind, s in then[0].items()} == {
        kind: (s.mean, s.variance) for kind, s in at_first[0].items()
    }
    assert first._acceptance._clues  # it had learned something
    assert second._rows == {}  # rows that have ended are forgotten
    assert decoder.draft_tokens == "auto"
    assert (model.generation_config.to_dict(), model.config.to_dict()) == before


# --- estimates ------------------------------------------------------------------------------------


def test_what_was_never_seen_is_guessed_from_the_rest() -> None:
    acceptance, row, other = Acceptance(), new_row(), new_row()
    seen, unseen = Clue.of("", "depth", 1, 0.7), Clue.of("", "depth", 2, 0.7)
    assert acceptance.chance(row, seen) == pytest.approx(0.7)
    for _ in range(20):
        acceptance.learn(row, seen, accepted=False)
    chances = [acceptance.chance(*at) for at in ((row, seen), (row, unseen), (other, seen), (other, unseen))]
    assert chances[0] < 0.1
    assert chances[0] < min(chances[1:3])
    assert max(chances[1:3]) < chances[3] < 0.7
    assert acceptance.chance(row, seen, optimism=1.0) > chances[0]
    for _ in range(100):
        acceptance.learn(row, seen, accepted=True)
    assert acceptance.chance(row, seen) > 0.9


def test_silence_is_forgotten() -> None:
    acceptance, row, clue = Acceptance(), new_row(), Clue.of("", "depth", 1, 0.7)
    for _ in range(20):
        acceptance.learn(row, clue, accepted=False)
    low = acceptance.chance(new_row(), clue)
    for _ in range(2000):
        acceptance.fade()
    assert low < 0.6 < acceptance.chance(new_row(), clue)


def test_costs_are_a_guess_until_they_are_timed() -> None:
    costs = RoundCosts(CPU_FLOAT32)
    ratio = costs.round(1, 7) / costs.round(1, 0)
    assert ratio == pytest.approx(2.0)
    for _ in range(3):
        costs.add(1, 0, 0.050)
    assert costs.round(1, 7) == pytest.approx(0.1)
    costs.add(1, 3, 0.052)  # checking is cheap here: widths that were never tried seem so too
    assert costs.round(1, 7) < 0.060
    assert costs.round(4, 3) / costs.round(4, 0) < 1.5 < CPU_FLOAT32(16) / CPU_FLOAT32(4)
    assert costs.draft(1, 3) == pytest.approx(3 * 0.15 * 0.05)
    costs.add_draft(1, 2, 0.01)
    assert costs.draft(1, 3) == pytest.approx(0.015)


def test_a_slow_first_use_and_a_busy_machine_do_not_count() -> None:
    costs = RoundCosts(CPU_HALF, warm_up=2)
    for seconds in (1.0, 3.0, 0.05, 0.05, 0.9, 0.05, 0.051):
        costs.add(1, 0, seconds)
        costs.add(1, 4, 1.1 * seconds)
    assert costs.round(1, 0) == pytest.approx(0.05)
    assert costs.round(1, 4) == pytest.approx(0.055, rel=0.05)


def test_a_wider_block_never_costs_less() -> None:
    costs = RoundCosts(CPU_HALF)
    for width, seconds in ((0, 0.05), (2, 0.07), (4, 0.06), (8, 0.055)):
        costs.add(1, width, seconds)
    times = [costs.round(1, width) for width in range(12)]
    assert times == sorted(times)


def test_a_token_that_was_taken_to_be_free_says_little_of_others() -> None:
    """It took 5%, where the curve says .5%: that must not make larger drafts look ten times as dear."""
    costs = RoundCosts(CPU_PACKED)
    for _ in range(60):
        costs.add(4, 0, 1.0)
        costs.add(4, 1, 1.05)
    assert costs.round(4, 1) > 1.01
    believed = CPU_PACKED(16) / CPU_PACKED(4) - 1
    assert believed / 2 < costs.round(4, 12) - 1 < 2 * believed


def test_beside_prompts_every_token_costs_what_it_does_in_a_large_block() -> None:
    costs = RoundCosts(CPU_PACKED)
    costs.add(1, 0, 2.0)
    assert costs.round(1, 3) == pytest.approx(2.0, rel=0.05)  # flat up to five tokens
    assert costs.beside_prompts(1, 3) == pytest.approx(2.0 * (1 + 3 * CPU_PACKED.slope))


def test_of_an_earlier_call_only_proportions_count() -> None:
    costs = RoundCosts(CPU_FLOAT32)
    for _ in range(5):
        costs.add(1, 0, 0.05)
        costs.add(1, 4, 0.055)
    costs.begin()
    assert costs.timed(1)
    costs.add(1, 0, 0.1)  # a longer context
    assert costs.round(1, 4) == pytest.approx(0.11, rel=0.05)


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
