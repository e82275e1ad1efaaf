"""What `prompt_lookup` finds: the longest matching suffix, its latest earlier occurrence, periodic ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import base, copier, greedy, ids, tiny_llama

from specdec_core import InvalidSpec, Registry, Rows, SamplingParams, SpecDecoder, UsageError
from specdec_drafters.prompt_lookup import PromptLookup, PromptLookupConfig


def drafter(**options: Any) -> PromptLookup:
    return PromptLookup(PromptLookupConfig(**options))


def admitted(found: PromptLookup, *rows: int) -> PromptLookup:
    params = tuple(SamplingParams() for _ in rows)
    found.admit(Rows(tuple(rows), tuple(range(len(rows))), tuple((1,) for _ in rows), params))
    return found


def draft(tokens: Sequence[int], budget: int = 3, **options: Any) -> list[int]:
    return admitted(drafter(**options), 0).propose_for(0, tokens, budget)


def brute_force(tokens: Sequence[int], budget: int, longest: int, shortest: int) -> list[int]:
    """The rule, as it is written down."""
    end = len(tokens)
    for n in range(min(longest, end - 1), shortest - 1, -1):
        for stop in range(end - 1, n - 1, -1):  # the latest first
            if list(tokens[stop - n : stop]) == list(tokens[end - n :]):
                copy = list(tokens)
                for i in range(budget):
                    copy.append(copy[stop + i])  # what was appended is read again: periodic
                return copy[end:]
    return []


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_short_prompts_without_a_match_draft_nothing(length: int) -> None:
    """B42: lengths 1 to max_ngram + 1, all tokens distinct."""
    model, prompt = tiny_llama(), list(range(20, 20 + length))
    assert draft(prompt) == []
    decoder = SpecDecoder(model, drafter="prompt_lookup:max_ngram=3", strict=True)
    result = decoder.generate(prompt, greedy(1))
    assert (result.token_ids, result.stats.drafted_tokens) == (base(model, prompt, 1), 0)
    assert decoder.generate(prompt, greedy(20)).token_ids == base(model, prompt, 20)


def test_the_longest_suffix_wins() -> None:
    """B44: the continuations of 3-gram and 1-gram differ."""
    tokens = [1, 2, 3, 7, 9, 3, 8, 1, 2, 3]
    assert draft(tokens, 1, min_ngram=1, max_ngram=3) == [7]
    assert draft(tokens, 1, min_ngram=1, max_ngram=1) == [8]
    assert draft(tokens, 1, min_ngram=2, max_ngram=2) == [7]
    assert draft(tokens, 1, min_ngram=4, max_ngram=9) == []
    assert draft([5, 3, 8, 1, 2, 3], 1, min_ngram=2) == []
    assert draft([5, 3, 8, 1, 2, 3], 1, min_ngram=1) == [8]


def test_the_defaults_are_what_is_documented() -> None:
    """B44."""
    config = PromptLookupConfig()
    assert (config.num_tokens, config.min_ngram, config.max_ngram) == (20, 1, 3)
    assert drafter().capabilities.max_depth == 20
    assert all(field.description for field in PromptLookupConfig.model_fields.values())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_ngram": 4}, "min_ngram=4 is larger than max_ngram=3"),
        ({"min_ngram": 0}, "min_ngram"),
        ({"max_ngram": 0}, "max_ngram"),
        ({"num_tokens": -1}, "num_tokens"),
        ({"max_ngrams": 3}, "max_ngrams"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, int], words: str) -> None:
    """B44: min > max among them; by name."""
    with pytest.raises(UsageError, match=words):
        Registry.discover().build_drafter("prompt_lookup", options)


def test_options_reach_the_drafter_from_its_text() -> None:
    """B44."""
    model = tiny_llama()
    decoder = SpecDecoder(model, drafter="prompt_lookup:max_ngram=5,min_ngram=2,num_tokens=4")
    config: Any = decoder.drafter.config
    assert (config.max_ngram, config.min_ngram, config.num_tokens) == (5, 2, 4)
    with pytest.raises(InvalidSpec):
        SpecDecoder(model, drafter="prompt_lookup:max_ngram=x")


def test_of_equal_matches_the_latest_wins() -> None:
    """B46: the tie rule."""
    assert draft([1, 2, 5, 1, 2, 6, 1, 2], 1) == [6]
    assert draft([4, 7, 4, 8, 4, 9, 4], 1) == [9]


def test_a_match_that_exists_in_generated_tokens_only_is_found() -> None:
    """B46: nothing repeats in the prompt, and the output does."""
    model = copier({1: 2, 2: 3, 3: 4, 4: 1})
    decoder = SpecDecoder(model, drafter="prompt_lookup", strict=True, draft_tokens=None)
    result = decoder.generate([9, 8, 1], greedy(30))
    assert result.token_ids == base(model, [9, 8, 1], 30)
    # four tokens until the 1 comes back, then blocks of twenty and one
    assert result.stats.acceptance_histogram[0] == 4
    assert result.stats.rounds == 4 + 2


def test_a_text_that_repeats_itself_is_accepted_whole() -> None:
    """B45: "a b c d" over and over; the query ends with the newest committed token."""
    model = copier({1: 2, 2: 3, 3: 4, 4: 1})
    decoder = SpecDecoder(model, drafter="prompt_lookup", strict=True, draft_tokens=None)
    result = decoder.generate([1, 2, 3, 4, 1], greedy(200))
    assert result.token_ids == base(model, [1, 2, 3, 4, 1], 200)
    assert result.stats.acceptance_rate >= 0.95
    assert result.stats.rounds == -(-200 // 21)


def test_a_continuation_that_runs_out_goes_on_periodically() -> None:
    """B45: one period of context is enough for a long draft."""
    assert draft([1, 2, 3, 1, 2, 3], 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert draft([6, 7, 7], 5) == [7] * 5
    assert draft([1, 2, 9, 1], 7) == [2, 9, 1, 2, 9, 1, 2]


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    steps=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    budget=st.integers(0, 9),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
)
def test_the_growing_index_finds_what_a_search_finds(
    tokens: list[int], steps: list[int], budget: int, sizes: tuple[int, int]
) -> None:
    """B42, B44, B46: at every length of a growing row, whatever it has grown by."""
    shortest, longest = sorted(sizes)
    found = admitted(drafter(min_ngram=shortest, max_ngram=longest), 0)
    length = 1
    for step in [0, *steps]:
        length = min(length + step, len(tokens))
        seen = tokens[:length]
        assert found.propose_for(0, seen, budget) == brute_force(seen, budget, longest, shortest)


@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_the_first_look_may_be_late(tokens: list[int]) -> None:
    """B42: a row that was not drafted for a while, or never."""
    assert draft(tokens, 4) == brute_force(tokens, 4, 3, 1)


def test_rows_keep_their_indices_apart_and_release_drops_them() -> None:
    """B46."""
    found = admitted(drafter(), 5, 6)
    assert found.propose_for(5, [1, 2, 1], 1) == [2]
    assert found.propose_for(6, [1, 3, 1], 1) == [3]
    found.release([5])
    assert set(found._index) == {6}
    found.release([6, 99])
    assert not found._index
    decoder = SpecDecoder(tiny_llama(), drafter="prompt_lookup", max_batch=2, strict=True)
    decoder.generate([ids(n) for n in (3, 9, 5)], greedy(9))
    bound: Any = decoder.drafter
    assert not bound._index
    run = decoder.rounds([1, 2, 1, 2], greedy(9))
    next(run)
    assert len(bound._index) == 1
    run.close()
    assert not bound._index


def test_a_draft_of_no_tokens_is_plain_decoding() -> None:
    """B42: num_tokens=0."""
    decoder = SpecDecoder(tiny_llama(), drafter="prompt_lookup:num_tokens=0", strict=True)
    result = decoder.generate([1, 2, 1, 2], greedy(6))
    assert (result.stats.rounds, result.stats.drafted_tokens) == (6, 0)
