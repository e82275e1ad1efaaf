"""A row ends at an EOS, at its cap, or where the context is full: at that very token, in mid-block too."""

from __future__ import annotations

from typing import Any

import pytest
from support import (
    ByteTokenizer,
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
    writer,
)

from specdec_core import InvalidParameter, SamplingParams, SpecDecoder
from specdec_core.contract.sampling_params import FinishReason
from specdec_core.rows.row import ending
from specdec_core.testing.models import tiny_model

K = 5
PROMPT = varied_prompt(6, 2 * (K + 1))
DRAFTERS = registered_drafters()


def perfect(model: Any, prompt: list[int], k: int = K) -> ScriptedDrafter:
    """A drafter that is always right."""
    return ScriptedDrafter(accepting(oracle(model, prompt), [k], k), depth=k)


@pytest.mark.parametrize("offset", range(2 * (K + 1)))
def test_an_eos_at_any_offset_of_a_block_ends_the_row_there(offset: int) -> None:
    """B30: k + 1 offsets of the first block (the prefill's) and of the second."""
    model = tiny_llama()
    said = base(model, PROMPT, 2 * (K + 1))
    decoder = SpecDecoder(model, drafter=perfect(model, PROMPT), strict=True, draft_tokens=None)
    result = decoder.generate(PROMPT, greedy(40, eos_token_id=said[offset]))
    assert result.token_ids == said[: offset + 1]
    assert result.finish_reason == "eos"
    assert result.stats.new_tokens == offset + 1
    assert result.stats.rounds == offset // (K + 1) + 1
    chunks = list(decoder.stream(PROMPT, greedy(40, eos_token_id=said[offset])))
    assert [token for chunk in chunks for token in chunk.token_ids] == said[: offset + 1]


@pytest.mark.parametrize("path", [[0, 2, 4], [1, 3, 5]], ids=["first child", "second child"])
@pytest.mark.parametrize("offset", range(4))
def test_an_eos_at_any_depth_of_a_tree_ends_the_row_there(offset: int, path: list[int]) -> None:
    """B30: what the drafter observes is cut as well."""
    model = tiny_llama()
    said = base(model, PROMPT, 12)
    script = planted([-1, -1, 0, 1, 2, 3], path, oracle(model, PROMPT))
    drafter = ScriptedDrafter(script, depth=3, nodes=6, trees=True)
    decoder = SpecDecoder(model, drafter=drafter, strict=True, draft_tokens=None)
    result = decoder.generate(PROMPT, greedy(12, eos_token_id=said[4 + offset]))
    assert result.token_ids == said[: 5 + offset]
    last = drafter.outcomes[-1]
    assert last.finished == (FinishReason.EOS,)
    assert last.tokens == (said[4 : 5 + offset],)
    assert last.paths == (path[: offset + 1],)


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_ends_at_an_eos(name: str) -> None:
    """B30."""
    model, prompt = tiny_llama(), [3, 4, 5, 6] * 5
    decoder = decoder_for(model, name)
    said = base(model, prompt, 20)
    for offset in range(20):
        result = decoder.generate(prompt, greedy(20, eos_token_id=said[offset]))
        assert result.token_ids == base(model, prompt, 20, eos=[said[offset]])
        assert result.finish_reason == "eos"


def test_text_and_stream_hold_nothing_behind_an_eos() -> None:
    """B30: and a special EOS token is not shown."""
    model, tokenizer = writer("abcdefgh"), ByteTokenizer()
    decoder = SpecDecoder(
        model, tokenizer, drafter=perfect(model, [ord("a")], 8), strict=True, draft_tokens=None
    )
    params = greedy(40, eos_token_id=ord("e"))
    assert decoder.generate("a", params).text == "bcde"
    assert "".join(chunk.text for chunk in decoder.stream("a", params)) == "bcde"


def test_every_id_of_a_list_ends_the_row() -> None:
    """B38: whichever comes first; a list, a tuple or one id."""
    model = tiny_llama()
    said = base(model, PROMPT, 12)
    decoder = SpecDecoder(model, drafter=perfect(model, PROMPT), strict=True, draft_tokens=None)
    for eos in ([said[8], said[3]], (said[3], said[8]), [said[3]], said[3]):
        result = decoder.generate(PROMPT, greedy(12, eos_token_id=eos))
        assert (result.token_ids, result.finish_reason) == (said[:4], "eos")


@pytest.mark.parametrize("eos", ["one", "list"])
@pytest.mark.parametrize("where", ["generation_config", "config", "tokenizer"])
def test_eos_ids_come_from_the_model_when_none_are_given(where: str, eos: str) -> None:
    """B38: from generation_config, where the tokenizer's differs too; else from config; and the tokenizer."""
    model = tiny_model("llama", fresh=True)
    said = base(model, PROMPT, 12)
    value: Any = said[3] if eos == "one" or where == "tokenizer" else [said[9], said[3]]
    tokenizer = ByteTokenizer()
    tokenizer.eos_token_id = said[7]
    if where == "generation_config":
        model.generation_config.eos_token_id = value
        model.config.eos_token_id = said[1]  # not asked where generation_config has one
    elif where == "config":
        model.config.eos_token_id = value
    else:
        tokenizer.eos_token_id = value
    decoder = SpecDecoder(model, tokenizer, drafter=perfect(model, PROMPT), strict=True, draft_tokens=None)
    result = decoder.generate(PROMPT, greedy(12))
    assert (result.token_ids, result.finish_reason) == (said[:4], "eos")
    assert decoder.generate(PROMPT, greedy(12, eos_token_id=said[5])).token_ids == said[:6]  # in their place


@pytest.mark.parametrize("name", DRAFTERS)
def test_without_any_eos_a_row_runs_to_its_cap(name: str) -> None:
    """B37: the prompt has a match to look up."""
    model, prompt = tiny_llama(), [1, 2, 3, 1, 2, 3]
    assert model.config.eos_token_id is None
    assert model.generation_config.eos_token_id is None
    result = decoder_for(model, name).generate(prompt, greedy(20))
    assert (result.token_ids, result.finish_reason) == (base(model, prompt, 20), "length")


def test_ignore_eos_generates_past_it() -> None:
    """B37."""
    model = tiny_model("llama", fresh=True)
    said = base(model, PROMPT, 12)
    model.generation_config.eos_token_id = said[2]
    decoder = SpecDecoder(model, drafter=perfect(model, PROMPT), strict=True, draft_tokens=None)
    assert decoder.generate(PROMPT, greedy(12)).token_ids == said[:3]
    result = decoder.generate(PROMPT, greedy(12, ignore_eos=True))
    assert (result.token_ids, result.finish_reason) == (said, "length")


@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize("name", DRAFTERS)
def test_no_drafter_runs_over_the_cap(name: str, n: int) -> None:
    """B31: with k = 8, N = 1..6."""
    model, prompt = tiny_llama(), [1, 2, 3, 1, 2, 3]
    result = decoder_for(model, name, draft_tokens=8).generate(prompt, greedy(n))
    assert (result.token_ids, result.finish_reason) == (base(model, prompt, n), "length")


@pytest.mark.parametrize("n", range(1, 12))
def test_a_perfect_draft_of_eight_stops_at_the_cap(n: int) -> None:
    """B31: drafts are clipped to what may still be committed, the round's own token included."""
    model = tiny_llama()
    drafter = perfect(model, PROMPT, 8)
    result = SpecDecoder(model, drafter=drafter, strict=True, draft_tokens=None).generate(PROMPT, greedy(n))
    assert (result.token_ids, result.finish_reason) == (base(model, PROMPT, n), "length")
    assert result.stats.rounds == -(-n // 9)
    assert result.stats.accepted_tokens == n - result.stats.rounds


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_context_limit_ends_a_row(name: str) -> None:
    """B60: a context of 64, a prompt of 60, k = 8, N = 50."""
    model, prompt = tiny_llama(context=64), [1, 2, 3, 4, 5] * 12
    result = decoder_for(model, name).generate(prompt, greedy(50))
    assert (result.token_ids, result.finish_reason) == (base(model, prompt, 4), "context")


@pytest.mark.parametrize("length", range(54, 65))
def test_the_last_tokens_of_a_context_are_those_of_plain_decoding(length: int) -> None:
    """B60: a perfect draft of eight, whose block does not fit; a prompt may fill the context."""
    model, prompt = tiny_llama(context=64), ids(length, 12)
    drafter = ScriptedDrafter(accepting(oracle(model, prompt, n=64 - length), [8], 8))
    result = SpecDecoder(model, drafter=drafter, strict=True, draft_tokens=None).generate(prompt, greedy(50))
    assert (result.token_ids, result.finish_reason) == (base(model, prompt, 64 - length), "context")
    assert result.stats.rounds == -(-(64 - length) // 9)


def test_a_cap_that_is_reached_with_the_context_is_called_length() -> None:
    """B60."""
    model, prompt = tiny_llama(context=64), ids(60, 12)
    decoder = SpecDecoder(model, strict=True)
    assert decoder.generate(prompt, greedy(4)).finish_reason == "length"
    assert decoder.generate(prompt, greedy(5)).finish_reason == "context"


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    """B60."""
    decoder = SpecDecoder(tiny_llama(context=64))
    with pytest.raises(InvalidParameter, match=r"65 tokens.* 64"):
        decoder.generate(ids(65), greedy(1))


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_cap_of_nothing_gives_an_empty_result(name: str) -> None:
    """B41: also for a row of a batch, and in a stream."""
    model = tiny_llama()
    decoder = decoder_for(model, name)
    result = decoder.generate(PROMPT, greedy(0))
    assert (result.token_ids, result.finish_reason) == ([], "length")
    assert (result.stats.rounds, result.stats.target_calls, result.stats.total_seconds) == (0, 0, 0.0)
    [chunk] = decoder.stream(PROMPT, greedy(0))
    assert chunk.result is not None
    assert (chunk.token_ids, chunk.result.finish_reason) == ([], "length")
    batch = decoder.generate([PROMPT, [1], [2]], [greedy(0), greedy(3), greedy(0)])
    assert [len(one.token_ids) for one in batch] == [0, 3, 0]
    assert batch[1].token_ids == base(model, [1], 3)


@pytest.mark.parametrize("value", [-1, None, 1.9, True, "8", float("inf")])
def test_a_cap_that_is_no_count_is_an_error_that_names_it(value: Any) -> None:
    """B41: nothing is truncated or taken for endless."""
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(max_new_tokens=value)
    assert f"max_new_tokens={value!r}" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_the_default_cap_is_documented() -> None:
    """B41."""
    assert SamplingParams().max_new_tokens == 256


@pytest.mark.parametrize("k", [-1, 1.9, True, "8"])
def test_a_draft_length_that_is_no_count_is_an_error_that_names_it(k: Any) -> None:
    """B41."""
    with pytest.raises(InvalidParameter, match="draft_tokens="):
        SpecDecoder(tiny_llama(), draft_tokens=k)


def test_where_a_block_is_cut() -> None:
    """B30, B31: an EOS at the very last place counts as EOS."""
    none: frozenset[int] = frozenset()
    assert ending([1, 2, 3], 5, none, FinishReason.LENGTH) == (3, None)
    assert ending([1, 2, 3], 3, none, FinishReason.LENGTH) == (3, FinishReason.LENGTH)
    assert ending([1, 2, 3], 2, none, FinishReason.CONTEXT) == (2, FinishReason.CONTEXT)
    assert ending([1, 2, 3], 3, frozenset({3}), FinishReason.LENGTH) == (3, FinishReason.EOS)
    assert ending([1, 2, 3], 2, frozenset({3}), FinishReason.LENGTH) == (2, FinishReason.LENGTH)
    assert ending([1, 2, 3], 9, frozenset({2, 1}), FinishReason.LENGTH) == (1, FinishReason.EOS)
