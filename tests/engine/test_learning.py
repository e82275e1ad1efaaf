"""What the contract has for drafters that learn: rows with draws of their own, row ids, scored tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import ScriptedDrafter, base, ids, markov_llama, tiny_llama

from specdec_core import HOLE, Draft, SamplingParams, SpecDecoder
from specdec_core.contract.rng import row_seed
from specdec_core.drafting.combination import Combination


def scripted(script: Any, **capabilities: Any) -> ScriptedDrafter:
    drafter = ScriptedDrafter(script, depth=4, nodes=7, trees=capabilities.get("makes_trees", False))
    drafter.capabilities = replace(drafter.capabilities, **capabilities)
    return drafter


def memory(learns: bool) -> ScriptedDrafter:
    """Drafts 0 after a prompt that it does not know, else what was said after it the last time."""
    known: dict[tuple[int, ...], int] = {}

    class Memory(ScriptedDrafter):
        def observe(self, outcome: Any) -> None:
            for row, tokens in zip(outcome.rows, outcome.tokens, strict=True):
                if row in asked:
                    known[asked.pop(row)] = tokens[0]

    asked: dict[int, tuple[int, ...]] = {}

    def script(ask: Any) -> list[int]:
        if len(ask.tokens) > 3:
            return []
        asked[ask.row] = tuple(ask.tokens)
        return [known.get(tuple(ask.tokens), 0)]

    drafter = Memory(script, depth=1)
    drafter.capabilities = replace(drafter.capabilities, learns=learns)
    return drafter


@pytest.mark.parametrize("learns", [True, False])
def test_rows_of_one_seed_make_draws_of_their_own_if_the_drafter_learns(learns: bool) -> None:
    """The second assertion is what goes wrong when such a drafter does not say so."""
    rows = 300
    log_p = torch.full((40, 40), -30.0)
    log_p[:, :2] = 0.0  # 0 or 1 follows, one as likely as the other
    prompts = [[2 + i // 30, 2 + i % 30, 39] for i in range(rows)]
    params = [SamplingParams(max_new_tokens=2, temperature=1.0, seed=seed) for seed in range(rows)]
    decoder = SpecDecoder(
        markov_llama(log_p),
        drafter=memory(learns),
        verifier="rejection",
        max_batch=rows,
        draft_tokens=1,
        strict=True,
    )
    for run in range(2):
        zeros = sum(result.token_ids[0] == 0 for result in decoder.generate(prompts, params))
        if learns or run == 0:
            assert abs(zeros - rows / 2) < 5 * (rows / 4) ** 0.5
        else:
            assert zeros == rows


def test_own_seeds_differ_by_row_and_by_seed() -> None:
    made = {row_seed(seed, row) for seed in (0, 1, -1, 2**63) for row in range(50)}
    assert len(made) == 200
    assert all(0 <= seed < 2**64 for seed in made)


def test_the_seed_that_is_reported_is_the_one_that_was_given() -> None:
    decoder = SpecDecoder(
        tiny_llama(), drafter=memory(True), verifier="rejection", strict=True, draft_tokens=None
    )
    result = decoder.generate(ids(5), SamplingParams(max_new_tokens=3, temperature=1.0, seed=7))
    assert result.seed == 7


def test_row_ids_begin_where_the_drafter_says() -> None:
    drafter = scripted(lambda ask: [], next_row=41)
    decoder = SpecDecoder(tiny_llama(), drafter=drafter, strict=True, draft_tokens=None)
    seen = [
        done.outcome.rows for done in decoder.rounds([ids(3), ids(3, 1)], SamplingParams(max_new_tokens=1))
    ]
    assert {row for rows in seen for row in rows} == {41, 42}
    both = Combination([scripted(lambda ask: [], next_row=3), scripted(lambda ask: [], learns=True)])
    assert (both.capabilities.next_row, both.capabilities.learns) == (3, True)


def test_scored_are_the_tokens_that_the_top_logits_follow() -> None:
    """Of the last pending token and of every node, accepted or not; -1 where a row has none."""
    model, prompts = tiny_llama(), [ids(5), ids(9)]
    trees = [[(3, -1), (4, -1), (5, 0)], [(6, -1)]]
    drafter = scripted(lambda ask: trees[ask.i] if ask.depth > 1 else [], top_logits=2, makes_trees=True)
    decoder = SpecDecoder(model, drafter=drafter, draft_tokens=3, strict=True)
    decoder.generate(prompts, SamplingParams(max_new_tokens=4))
    looked = 0
    for outcome in drafter.outcomes:
        assert outcome.scored is not None
        assert outcome.top_logits is not None
        assert outcome.scored.shape == outcome.top_logits[0].shape[:2]
        for scored in outcome.scored.tolist():
            looked += 1
            assert scored[1:] in ([3, 4, 5], [6], [6, -1, -1], [])
    assert looked >= 4
    first = drafter.outcomes[0]
    assert first.scored is not None
    assert int(first.scored[0, 0]) in {prompt[-1] for prompt in prompts}
    assert first.for_rows([0]).scored is not None


def test_members_that_asked_for_no_logits_get_no_scored_tokens() -> None:
    quiet, curious = scripted(lambda ask: [5]), scripted(lambda ask: [], top_logits=1)
    decoder = SpecDecoder(tiny_llama(), drafter=Combination([quiet, curious]), draft_tokens=1, strict=True)
    decoder.generate(ids(4), SamplingParams(max_new_tokens=4))
    assert all(outcome.scored is None for outcome in quiet.outcomes)
    seen = [outcome.scored for outcome in curious.outcomes]
    assert any(scored is not None and scored.tolist()[0][1:] == [5] for scored in seen)


def test_trees_of_the_host() -> None:
    draft = Draft.trees([[1, 2, 3], [], [4]], [[-1, -1, 0], [], [-1]], scores=[[0.5, 0.25, 0.125], [], [1.0]])
    assert draft.tokens.tolist() == [[1, 2, 3], [0, 0, 0], [4, 0, 0]]
    assert draft.parents.tolist() == [[-1, -1, 0], [HOLE] * 3, [-1, HOLE, HOLE]]
    assert (draft.depth, draft.width, draft.counts, draft.chain) == (2, 2, (3, 0, 1), False)
    assert draft.scores is not None
    assert draft.scores.tolist() == [[0.5, 0.25, 0.125], [0.0] * 3, [1.0, 0.0, 0.0]]
    chain = Draft.trees([[1, 2], [3]], [[-1, 0], [-1]])
    assert (chain.depth, chain.width, chain.scores, chain.chain) == (2, 1, None, True)
    assert Draft.trees([[], []], [[], []]).nodes == 0


def test_a_tree_of_the_host_is_decoded_as_such() -> None:
    model, prompt = tiny_llama(), ids(6)
    said = base(model, prompt, 8)

    class Planted(ScriptedDrafter):
        def propose(self, context: Any, budget: Any) -> Draft:
            at = context.host_lengths[0] - len(prompt)
            right = said[at : at + 2]
            if budget.depth[0] < 2 or len(right) < 2:
                return Draft.empty(1)
            return Draft.trees([[(right[0] + 1) % 97, right[0], right[1]]], [[-1, -1, 1]])

    drafter = Planted(lambda ask: [], depth=2, nodes=3, trees=True)
    result = SpecDecoder(model, drafter=drafter, draft_tokens=2, strict=True).generate(
        prompt, SamplingParams(max_new_tokens=8)
    )
    assert result.token_ids == said
    assert result.stats.rounds == 4
