"""A row's output does not depend on its neighbours, its place, or when it was admitted."""

from __future__ import annotations

from typing import Any

import pytest
from support import (
    Ask,
    ScriptedDrafter,
    accepting,
    base,
    decoder_for,
    following,
    greedy,
    ids,
    oracle,
    registered_drafters,
    sampled,
    tiny_llama,
    varied_prompt,
    wrong,
)

from specdec_core import Budget, Capture, Context, Draft, InvalidParameter, SamplingParams, SpecDecoder
from specdec_core.engine.scheduler import Scheduler

PROMPTS = [ids(length, 21) for length in (1, 3, 9, 20)]
DRAFTERS = registered_drafters()


def expected(prompts: list[list[int]], n: int) -> list[list[int]]:
    return [base(tiny_llama(), prompt, n) for prompt in prompts]


def said(results: Any) -> list[list[int]]:
    return [result.token_ids for result in results]


def rotating(n: int = 40) -> ScriptedDrafter:
    """Row 0 has no draft, row 1 four tokens, row 2 one; and round by round they take turns."""
    ahead = oracle(tiny_llama(), *PROMPTS, n=n)

    def script(ask: Ask) -> list[int]:
        k = [0, 4, 1, 2][(ask.i + ask.call) % 4]
        right = ahead(ask.tokens, min(k, ask.depth))
        return right if ask.call % 3 else [*right[:1], *map(wrong, right[1:])]

    return ScriptedDrafter(script, depth=4)


@pytest.mark.parametrize("capture", [Capture.OFF, Capture.FIXED])
@pytest.mark.parametrize("name", DRAFTERS)
def test_rows_of_a_batch_say_what_they_say_alone(name: str, capture: Capture) -> None:
    """B54: results come in the order of the prompts."""
    decoder = decoder_for(tiny_llama(), name, capture=capture, draft_tokens=None)
    results = decoder.generate(PROMPTS, greedy(24))
    assert said(results) == expected(PROMPTS, 24)
    assert [result.prompt_token_ids for result in results] == PROMPTS
    for prompt, result in zip(PROMPTS, results, strict=True):
        alone = decoder.generate(prompt, greedy(24))
        assert (alone.token_ids, alone.finish_reason) == (result.token_ids, result.finish_reason)
        if decoder.drafter.capabilities.learns:
            continue  # from the rows before
        assert alone.stats.acceptance_histogram == result.stats.acceptance_histogram
        assert alone.stats.drafted_tokens == result.stats.drafted_tokens


@pytest.mark.parametrize("max_batch", [1, 2, 3, 16])
@pytest.mark.parametrize("name", DRAFTERS)
def test_more_prompts_than_places_wait_for_their_turn(name: str, max_batch: int) -> None:
    """B54: places are reused by rows of other lengths, which are admitted while others run."""
    prompts = [ids(length, 22) for length in (9, 1, 33, 4, 17, 2, 6)]
    params = [greedy(n) for n in (3, 20, 11, 1, 0, 7, 12)]
    decoder = decoder_for(tiny_llama(), name, max_batch=max_batch, prefill_chunk=8)
    places: dict[int, int] = {}
    together = []
    for done in decoder.rounds(prompts, params):
        for row in done.batch.rows:
            assert places.setdefault(row.id, row.place) == row.place  # fixed for life
            assert 0 <= row.place < max_batch
        together.append(len(done.batch.rows))
    assert max(together) >= min(max_batch, 3)  # short rows have ended when the long prompt has been read
    assert len(set(places.values())) == min(max_batch, 6)
    results = decoder.generate(prompts, params)
    for prompt, one, result in zip(prompts, params, results, strict=True):
        assert result.token_ids == base(tiny_llama(), prompt, one.max_new_tokens)


def test_rounds_tell_whether_others_wait_for_a_place() -> None:
    """Of a list at once; of a stream of requests once it has ended and a place stays free."""
    decoder = SpecDecoder(tiny_llama(), drafter="none", max_batch=2)
    rounds = [
        (done.batch.others_wait, [row.id for row in done.batch.rows])
        for done in decoder.rounds([ids(3)] * 3, greedy(4))
    ]
    last = max(row for _, rows in rounds for row in rows)
    assert [waits for waits, _ in rounds] == sorted((waits for waits, _ in rounds), reverse=True)
    assert all(not waits for waits, rows in rounds if last in rows)
    assert rounds[0][0]
    seen: list[bool] = []
    begun = Scheduler.next

    def watched(self: Scheduler) -> Any:
        turn = begun(self)
        seen.extend([] if turn.batch is None else [turn.batch.others_wait])
        return turn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "next", watched)
        list(decoder.finished(((i, ids(3), greedy(4)) for i in range(3)), [greedy(4)]))
    assert seen[0]
    assert not seen[-1]


@pytest.mark.parametrize("capture", [Capture.OFF, Capture.FIXED])
def test_rows_with_and_without_drafts_take_turns(capture: Capture) -> None:
    """B55."""
    decoder = SpecDecoder(tiny_llama(), drafter=rotating(), strict=True, capture=capture, draft_tokens=None)
    results = decoder.generate(PROMPTS, greedy(30))
    assert said(results) == expected(PROMPTS, 30)
    for result in results:
        assert result.stats.accepted_tokens > 5
        assert result.stats.drafted_tokens > result.stats.accepted_tokens


def test_a_row_that_ended_early_says_nothing_more() -> None:
    """B56: reasons and statistics are the row's own."""
    model = tiny_llama()
    first, second = varied_prompt(6, 12), varied_prompt(9, 12)
    eos = base(model, second, 2)[1]
    assert eos not in base(model, first, 12)
    decoder = SpecDecoder(model, strict=True)
    params = [greedy(30), greedy(30, eos_token_id=eos)]
    took_part = [len(done.batch.rows) for done in decoder.rounds([first, second], params)]
    long, short = decoder.generate([first, second], params)
    assert (long.token_ids, long.finish_reason) == (base(model, first, 30), "length")
    assert (short.token_ids, short.finish_reason) == (base(model, second, 2), "eos")
    assert (short.stats.new_tokens, short.stats.rounds) == (2, 2 - short.stats.accepted_tokens)
    assert long.stats.new_tokens == 30
    assert sum(short.stats.acceptance_histogram) == short.stats.rounds
    assert took_part[-1] == 1


def test_params_are_one_for_all_or_one_each() -> None:
    """B54, B56."""
    model = tiny_llama()
    decoder = SpecDecoder(model, strict=True)
    params = [greedy(3), greedy(9), SamplingParams(max_new_tokens=5, temperature=0.8, seed=3), greedy(1)]
    results = decoder.generate(PROMPTS, params)
    assert [len(result.token_ids) for result in results] == [3, 9, 5, 1]
    assert results[1].token_ids == base(model, PROMPTS[1], 9)
    assert results[2].token_ids == sampled(model, PROMPTS[2], params[2])
    assert results[3].token_ids == base(model, PROMPTS[3], 1)
    with pytest.raises(InvalidParameter, match="3 params for 4 prompts"):
        decoder.generate(PROMPTS, params[:3])


@pytest.mark.parametrize("name", DRAFTERS)
def test_permuted_rows_permute_the_outputs(name: str) -> None:
    """B54: with places, caps and seeds that go with the row."""
    decoder = decoder_for(tiny_llama(), name, max_batch=3)
    params = [SamplingParams(max_new_tokens=5 + i, temperature=i % 2 * 1.0, seed=i) for i in range(4)]
    plain = said(decoder.generate(PROMPTS, params))
    for order in ([3, 2, 1, 0], [1, 0, 3, 2], [2, 3, 1, 0]):
        turned = decoder.generate([PROMPTS[i] for i in order], [params[i] for i in order])
        assert said(turned) == [plain[i] for i in order]


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_seed_gives_the_text_of_plain_sampling(name: str) -> None:
    """B54, and the promise of `match`: in any batch, at any draft length, with any drafter."""
    model = tiny_llama()
    params = [
        SamplingParams(max_new_tokens=14, temperature=0.7, seed=5),
        SamplingParams(max_new_tokens=14, temperature=1.3, top_k=20, seed=6),
        SamplingParams(max_new_tokens=14, temperature=1.0, top_p=0.8, seed=-7),
        SamplingParams(max_new_tokens=14, temperature=0.4, min_p=0.1, seed=2**64 - 1),
    ]
    plain = [sampled(model, prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    for k in (0, 1, 5):
        decoder = decoder_for(model, name, draft_tokens=k, max_batch=3, verifier="match")
        assert said(decoder.generate(PROMPTS, params)) == plain
        assert decoder.generate(PROMPTS[2], params[2]).token_ids == plain[2]


def test_drafts_that_were_sampled_right_are_accepted_under_match() -> None:
    """B54: the text of a seed stays what it is when drafts are right, half right, or on a second branch."""
    model, prompt = tiny_llama(), PROMPTS[2]
    params = SamplingParams(max_new_tokens=18, temperature=0.9, seed=11)
    plain = sampled(model, prompt, params)
    ahead = following([*prompt, *plain])

    def script(ask: Ask) -> list[tuple[int, int]]:
        right = ahead(ask.tokens, 2)
        nodes = [(wrong(right[0]), -1), (right[0], -1)] if right and ask.depth else []
        return nodes if len(right) < 2 or ask.depth < 2 else [*nodes, (wrong(right[1]), 1), (right[1], 1)]

    drafter = ScriptedDrafter(script, depth=2, nodes=4, trees=True)
    result = SpecDecoder(model, drafter=drafter, strict=True, draft_tokens=None).generate(prompt, params)
    assert result.token_ids == plain
    assert result.stats.rounds == 6
    assert result.verifier == "match"


def test_a_seed_of_its_own_is_drawn_for_a_row_without_one() -> None:
    """B54: it is reported, and gives the row again."""
    decoder = SpecDecoder(tiny_llama(), strict=True)
    params = SamplingParams(max_new_tokens=12, temperature=1.5)
    first, second = decoder.generate([[5, 6]] * 2, params)
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    again = decoder.generate([5, 6], params.replace(seed=second.seed))
    assert again.token_ids == second.token_ids


@pytest.mark.parametrize("seed", [1, 2])
def test_one_seed_for_a_list_of_prompts_is_every_rows_own(seed: int) -> None:
    """B54: never the place in the batch."""
    decoder = SpecDecoder(tiny_llama(), strict=True)
    params = SamplingParams(max_new_tokens=8, temperature=1.0, seed=seed)
    results = decoder.generate([*PROMPTS, PROMPTS[0]], params)
    assert results[0].token_ids == results[4].token_ids
    for prompt, result in zip(PROMPTS, results, strict=False):
        assert decoder.generate(prompt, params).token_ids == result.token_ids


def test_a_list_of_one_is_a_list() -> None:
    """B54."""
    decoder = SpecDecoder(tiny_llama(), strict=True)
    assert len(decoder.generate([[1, 2]], greedy(2))) == 1
    assert decoder.generate([1, 2], greedy(2)).token_ids == base(tiny_llama(), [1, 2], 2)


@pytest.mark.parametrize("capture", [Capture.OFF, Capture.FIXED])
def test_drafters_see_the_same_tokens_on_host_and_device(capture: Capture) -> None:
    """B55: in every round, for rows that took the place of longer and of shorter ones."""
    seen: set[int] = set()

    class Looking(ScriptedDrafter):
        def propose(self, context: Context, budget: Budget) -> Draft:
            for part in (context, context.for_rows([*range(len(context.rows))][::-1])):
                tokens, lengths = part.tokens.tolist(), part.lengths.tolist()
                assert lengths == list(part.host_lengths)
                for i, (row, length) in enumerate(zip(tokens, lengths, strict=True)):
                    assert row == [*part.row_tokens(i), *[0] * (max(lengths) - length)]
            seen.update(context.rows)
            return super().propose(context, budget)

    prompts = [ids(length, 23) for length in (9, 30, 3, 17, 1, 40)]
    script = accepting(oracle(tiny_llama(), *prompts), [2, 0, 1], 3)
    decoder = SpecDecoder(
        tiny_llama(), drafter=Looking(script), max_batch=2, strict=True, capture=capture, draft_tokens=None
    )
    results = decoder.generate(prompts, [greedy(n) for n in (4, 12, 15, 3, 20, 6)])
    assert len(seen) == len(results) == 6


def test_drafters_see_every_row_begin_and_end() -> None:
    """B55: each row is admitted once and released once, whatever the order."""
    drafter = rotating()
    decoder = SpecDecoder(tiny_llama(), drafter=drafter, max_batch=2, strict=True, draft_tokens=None)
    decoder.generate(PROMPTS, [greedy(n) for n in (9, 3, 5, 1)])
    assert not drafter.now
    for call in ("admit", "release"):
        rows = [row for name, those in drafter.calls if name == call for row in those]
        assert len(rows) == len(set(rows)) == 4
    assert {row for outcome in drafter.outcomes for row in outcome.rows} == set(rows)
