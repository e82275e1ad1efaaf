"""What is counted, by definition: every round, tokens as verified, seconds that sum to the whole."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support import (
    Ask,
    ScriptedDrafter,
    accepting,
    base,
    decoder_for,
    greedy,
    ids,
    oracle,
    planted,
    registered_drafters,
    tiny_llama,
    varied_prompt,
    wrong,
)

from specdec_core import SamplingParams, SpecDecoder, Stats

PROMPT = ids(7, 41)
DRAFTERS = registered_drafters()


def scripted(counts: list[int], k: int, n: int, **options: Any) -> Any:
    """Run n tokens with drafts of k of which counts[round] are right."""
    model = tiny_llama()
    drafter = ScriptedDrafter(accepting(oracle(model, PROMPT), counts, k), depth=k)
    result = SpecDecoder(model, drafter=drafter, strict=True, draft_tokens=None).generate(
        PROMPT, greedy(n, **options)
    )
    assert result.token_ids == base(model, PROMPT, n, [options.get("eos_token_id")])
    return result.stats


def check_identities(stats: Stats, *, trimmed: int = 0) -> None:
    """What holds for any run; trimmed: tokens that were verified and then cut off by an EOS."""
    assert 0 <= stats.acceptance_rate <= 1
    assert stats.accepted_tokens + stats.rounds == stats.new_tokens + trimmed
    histogram = stats.acceptance_histogram
    assert sum(i * count for i, count in enumerate(histogram)) == stats.accepted_tokens
    assert sum(histogram) == stats.rounds
    assert not histogram or histogram[-1] > 0
    assert stats.accepted_tokens <= stats.drafted_tokens
    assert stats.target_calls == stats.rounds + stats.prefill_calls
    assert sum(stats.acceptance_by_depth) == pytest.approx(stats.mean_acceptance_length - 1)
    assert stats.acceptance_by_depth == sorted(stats.acceptance_by_depth, reverse=True)
    parts = stats.prefill_seconds + stats.draft_seconds + stats.target_seconds + stats.other_seconds
    assert parts == pytest.approx(stats.total_seconds)
    assert stats.time_to_first_token is not None
    assert 0 < stats.time_to_first_token <= stats.total_seconds
    assert stats.tokens_per_second == pytest.approx(stats.new_tokens / stats.total_seconds)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", DRAFTERS)
def test_identities_of_every_run(name: str, temperature: float) -> None:
    """B83: single rows, a batch, prompts in chunks; one-token runs too."""
    decoder = decoder_for(tiny_llama(), name, prefill_chunk=8)
    prompts = [PROMPT, [3, 4, 5] * 7, [1]]
    params = [SamplingParams(max_new_tokens=n, temperature=temperature, seed=n) for n in (17, 24, 1)]
    results = decoder.generate(prompts, params)
    for result, prompt, one in zip(results, prompts, params, strict=True):
        check_identities(result.stats)
        assert result.stats.prompt_tokens == len(prompt)
        assert result.stats.new_tokens == len(result.token_ids) == one.max_new_tokens
        assert result.stats.prefill_calls == max(-(-len(prompt) // 8) - 1, 0)


def test_a_token_behind_the_first_rejection_does_not_count() -> None:
    """B83: the mask 1, 0, 1, 1 accepts one token."""
    model = tiny_llama()
    ahead = oracle(model, PROMPT)

    def script(ask: Ask) -> list[int]:
        right = ahead(ask.tokens, min(4, ask.depth))
        return [wrong(token) if i == 1 else token for i, token in enumerate(right)]

    drafter = ScriptedDrafter(script, depth=4)
    stats = (
        SpecDecoder(model, drafter=drafter, strict=True, draft_tokens=None).generate(PROMPT, greedy(10)).stats
    )
    assert stats.acceptance_histogram == [0, 5]
    assert (stats.accepted_tokens, stats.rounds, stats.drafted_tokens) == (5, 5, 4 + 4 + 4 + 3 + 1)


def test_means_by_hand() -> None:
    """B84: three rounds accept 2, 0 and 3 of 4."""
    stats = scripted([2, 0, 3], 4, 8)
    check_identities(stats)
    assert stats.rounds == 3
    assert stats.acceptance_histogram == [1, 0, 1, 1]
    assert stats.accepted_tokens / stats.rounds == pytest.approx(5 / 3)
    assert stats.mean_acceptance_length == pytest.approx(8 / 3)
    assert stats.tokens_per_target_call == pytest.approx(8 / 3)
    # shares of all rounds: depth 1 and 2 were reached by two of three, depth 3 by one, 4 by none
    assert stats.acceptance_by_depth == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    # the last round could draft 3 tokens only: 4 were left to say
    assert stats.drafted_tokens == 4 + 4 + 3
    assert stats.acceptance_rate == pytest.approx(5 / 11)


def test_a_perfect_draft_of_four() -> None:
    """B83: 32 tokens in 7 rounds, 4.57 tokens a call, the prefill being the first round."""
    stats = scripted([4], 4, 32)
    check_identities(stats)
    assert (stats.rounds, stats.target_calls, stats.prefill_calls) == (7, 7, 0)
    assert round(stats.tokens_per_target_call, 2) == 4.57
    assert stats.acceptance_histogram == [0, 1, 0, 0, 6]
    assert (stats.drafted_tokens, stats.acceptance_rate) == (25, 1.0)


def test_drafted_is_what_was_drafted() -> None:
    """B85: shorter drafts than asked for, rounds without one, and the last one clipped."""
    model = tiny_llama()
    ahead = oracle(model, PROMPT)
    lengths = [2, 5, 0, 1]
    drafter = ScriptedDrafter(
        lambda ask: [wrong(t) for t in ahead(ask.tokens, min(lengths[ask.call % 4], ask.depth))]
    )
    decoder = SpecDecoder(model, drafter=drafter, draft_tokens=5, strict=True)
    stats = decoder.generate(PROMPT, greedy(10)).stats
    # rounds leave room for 9, 8, ... 0 drafted tokens
    assert stats.drafted_tokens == sum(min(lengths[i % 4], 9 - i) for i in range(10))
    assert stats.acceptance_histogram == [10]
    assert (stats.acceptance_rate, stats.mean_acceptance_length, stats.acceptance_by_depth) == (0.0, 1.0, [])


def test_nodes_of_a_tree_count_each() -> None:
    """B85: holes and padding of other rows do not."""
    model, other = tiny_llama(), [4, 5]
    shape = planted([-1, -1, 0, 1, 1], [1, 4], oracle(model, PROMPT, other))

    def script(ask: Ask) -> Any:
        return shape(ask) if ask.tokens[:7] == PROMPT else [wrong(0)]

    drafter = ScriptedDrafter(script, depth=2, nodes=5, trees=True)
    decoder = SpecDecoder(model, drafter=drafter, strict=True, draft_tokens=None)
    first, second = decoder.generate([PROMPT, other], greedy(9))
    assert (first.stats.rounds, first.stats.drafted_tokens, first.stats.accepted_tokens) == (3, 15, 6)
    assert second.stats.drafted_tokens == second.stats.rounds - 1  # none in the round that can say one token
    for result in (first, second):
        check_identities(result.stats)


def test_an_eos_in_mid_block_cuts_tokens_and_not_the_verdict() -> None:
    """B83: accepted counts what was verified; new tokens are those of the output."""
    model = tiny_llama()
    prompt = varied_prompt(6, 12)
    said = base(model, prompt, 12)
    drafter = ScriptedDrafter(accepting(oracle(model, prompt), [5], 5), depth=5)
    decoder = SpecDecoder(model, drafter=drafter, strict=True, draft_tokens=None)
    stats = decoder.generate(prompt, greedy(40, eos_token_id=said[8])).stats
    assert (stats.new_tokens, stats.rounds, stats.accepted_tokens) == (9, 2, 10)
    check_identities(stats, trimmed=3)


def test_rows_add_up() -> None:
    """B85: pooled sums, not the last row's; the seconds are those of the run."""
    decoder = SpecDecoder(tiny_llama(), strict=True, prefill_chunk=8)
    results = decoder.generate([PROMPT, [3, 4, 5] * 7, [1]], [greedy(n) for n in (17, 24, 5)])
    parts = [result.stats for result in results]
    pooled = results.stats
    for name in (
        "prompt_tokens",
        "new_tokens",
        "rounds",
        "prefill_calls",
        "drafted_tokens",
        "accepted_tokens",
    ):
        assert getattr(pooled, name) == sum(getattr(part, name) for part in parts)
    assert sum(pooled.acceptance_histogram) == pooled.rounds
    check_identities(pooled)
    assert pooled.total_seconds < sum(part.total_seconds for part in parts)
    assert pooled.total_seconds >= max(part.total_seconds for part in parts)
    assert pooled.time_to_first_token == min(part.time_to_first_token or 1e9 for part in parts)


def test_pooling_by_hand() -> None:
    """B84: means of pooled rows weigh rounds, not rows."""
    first, second = Stats(prompt_tokens=3), Stats(prompt_tokens=4)
    for accepted in (2, 0):
        first.count_round(4, accepted, accepted + 1)
    second.count_round(3, 3, 4)
    first.total_seconds, second.total_seconds = 1.0, 2.0
    pooled = Stats.pooled([first, second])
    assert pooled.acceptance_histogram == [1, 0, 1, 1]
    assert pooled.mean_acceptance_length == pytest.approx(8 / 3)
    assert pooled.acceptance_by_depth == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert pooled.acceptance_rate == pytest.approx(5 / 11)
    assert (pooled.prompt_tokens, pooled.new_tokens, pooled.total_seconds) == (7, 8, 3.0)
    run = Stats(total_seconds=2.5, target_seconds=1.0)
    timed = Stats.pooled([first, second], run)
    assert (timed.total_seconds, timed.target_seconds, timed.other_seconds) == (2.5, 1.0, 1.5)
    assert Stats.pooled([]).mean_acceptance_length == 0.0
    assert first.acceptance_histogram == [1, 0, 1]  # the parts are left as they are


@pytest.mark.parametrize("kind", ["stream", "rounds"])
def test_the_time_a_consumer_takes_is_in_no_figure(kind: str) -> None:
    """B83: sleeping while chunks are in hand."""
    decoder = SpecDecoder(tiny_llama(), drafter="none", strict=True)
    decoder.generate(PROMPT, greedy(2))  # warm
    run: Any = getattr(decoder, kind)(PROMPT, greedy(6))
    began = time.perf_counter()
    for _ in range(6):
        item = next(run)
        time.sleep(0.1)
    assert list(run) == []
    wall = time.perf_counter() - began
    stats = item.result.stats if kind == "stream" else item.batch.rows[0].stats
    assert wall > 0.6
    # the last chunk of a stream is in hand when the run has ended
    assert stats.total_seconds <= wall - (0.5 if kind == "stream" else 0.6)
    check_identities(stats)


def test_times_are_booked_where_they_are_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """B83: a slow drafter, and slow forwards of first and of later rounds."""
    model = tiny_llama()
    ahead = oracle(model, PROMPT)

    def slow(ask: Ask) -> list[int]:
        time.sleep(0.03)
        return ahead(ask.tokens, min(1, ask.depth))

    decoder = SpecDecoder(
        model, drafter=ScriptedDrafter(slow, depth=1), strict=True, prefill_chunk=4, draft_tokens=None
    )
    replica = decoder.target.model
    forward = replica.forward

    def slow_forward(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.02)
        return forward(*args, **kwargs)

    monkeypatch.setattr(replica, "forward", slow_forward)
    stats = decoder.generate(PROMPT, greedy(8)).stats
    monkeypatch.undo()
    assert (stats.rounds, stats.prefill_calls) == (4, 1)
    assert stats.draft_seconds >= 4 * 0.03
    assert stats.target_seconds >= 3 * 0.02
    assert stats.prefill_seconds >= 2 * 0.02
    assert stats.time_to_first_token is not None
    assert stats.time_to_first_token >= 0.07
    assert stats.other_seconds < 0.1 + stats.total_seconds / 2
    check_identities(stats)


def test_every_figure_is_given_by_name() -> None:
    """B84: the names that `--json` prints, as documented."""
    figures = scripted([2, 0, 3], 4, 8).to_dict()
    documented = (
        "prompt_tokens new_tokens rounds target_calls drafted_tokens accepted_tokens acceptance_rate "
        "mean_acceptance_length tokens_per_target_call acceptance_histogram acceptance_by_depth "
        "prefill_seconds time_to_first_token draft_seconds target_seconds other_seconds total_seconds "
        "tokens_per_second"
    ).split()
    assert [name for name in figures if name in documented] == documented
    assert figures["mean_acceptance_length"] == pytest.approx(8 / 3)
