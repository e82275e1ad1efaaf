"""A stream gives, round by round, what `generate` gives: whole characters, the last chunk with the result."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support import (
    ByteTokenizer,
    ScriptedDrafter,
    accepting,
    base,
    copier,
    decoder_for,
    following,
    greedy,
    ids,
    oracle,
    registered_drafters,
    tiny_llama,
    writer,
)

from specdec_core import InvalidParameter, SamplingParams, SpecDecoder

EMOJI = "a\U0001f600b\u00e9c\u4e2d"  # characters of one to four bytes, 12 in all, that all differ


def byte_decoder(text: str, k: int, **options: Any) -> SpecDecoder:
    """A decoder of a model that goes round in `text`; k tokens a round are drafted right."""
    model = writer(text)
    said = list((text * 20).encode())
    drafter = ScriptedDrafter(accepting(following(said), [k], k), depth=max(k, 1))
    return SpecDecoder(
        model, ByteTokenizer(), drafter=drafter, strict=True, **{"draft_tokens": None, **options}
    )


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("name", registered_drafters())
def test_the_chunks_are_the_output(name: str, seed: int | None) -> None:
    """B30, B80: ids and text, greedy and sampled; as many chunks as rounds."""
    params = SamplingParams(max_new_tokens=25, temperature=0.0 if seed is None else 0.9, seed=seed)
    decoder = decoder_for(tiny_llama(), name, tokenizer=ByteTokenizer())
    prompt = ids(9, 51)
    chunks = list(decoder.stream(prompt, params))
    result = chunks[-1].result
    assert result is not None
    assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
    assert "".join(chunk.text for chunk in chunks) == result.text == ByteTokenizer().decode(result.token_ids)
    whole = decoder.generate(prompt, params)
    assert (whole.token_ids, whole.text, whole.finish_reason) == (
        result.token_ids,
        result.text,
        result.finish_reason,
    )
    assert len(chunks) == result.stats.rounds
    assert all(chunk.result is None for chunk in chunks[:-1])
    assert all(chunk.token_ids for chunk in chunks)


@pytest.mark.parametrize("k", range(7))
def test_no_chunk_holds_half_a_character(k: int) -> None:
    """B80: emoji and CJK cut by the border of a block, at every offset."""
    chunks = list(byte_decoder(EMOJI, k).stream("a", greedy(48)))
    assert "".join(chunk.text for chunk in chunks) == EMOJI[1:] + EMOJI * 3 + "a"
    assert all("\ufffd" not in chunk.text for chunk in chunks)
    assert len(chunks) == -(-48 // (k + 1))
    if k < 3:
        assert any(not chunk.text for chunk in chunks)  # a character was held back


@pytest.mark.parametrize("n", range(1, 13))
def test_a_text_that_ends_inside_a_character_shows_that_at_its_end_only(n: int) -> None:
    """B80: cut by the cap."""
    decoder = byte_decoder(EMOJI, 4)
    chunks = list(decoder.stream("a", greedy(n)))
    text = (EMOJI * 2).encode()[1 : n + 1].decode(errors="replace")
    assert "".join(chunk.text for chunk in chunks) == text
    assert all("\ufffd" not in chunk.text for chunk in chunks[:-1])
    assert chunks[-1].result is not None
    assert chunks[-1].result.text == text == decoder.generate("a", greedy(n)).text


def test_bytes_that_are_no_character_are_shown_when_that_is_certain() -> None:
    """B80: a model that says invalid bytes."""
    model = copier({ord("a"): 0xF0, 0xF0: 0x9F, 0x9F: ord("b"), ord("b"): 0x80, 0x80: 0x80}, 257)
    decoder = SpecDecoder(model, ByteTokenizer(), drafter="none", strict=True)
    chunks = list(decoder.stream("a", greedy(6)))
    text = bytes([0xF0, 0x9F, ord("b"), 0x80, 0x80, 0x80]).decode(errors="replace")
    assert [chunk.text for chunk in chunks] == ["", "", "\ufffdb", "", "", "\ufffd" * 3]
    assert chunks[-1].result is not None
    assert chunks[-1].result.text == text


def test_a_chunk_is_given_as_soon_as_its_round_is_over() -> None:
    """B80: not one round late; rounds run only when they are asked for."""
    model = tiny_llama()
    drafter = ScriptedDrafter(accepting(oracle(model, [1, 2]), [2], 2), depth=2)
    stream = SpecDecoder(model, drafter=drafter, strict=True, draft_tokens=None).stream([1, 2], greedy(9))
    assert drafter.proposals == 0
    for i in range(3):
        chunk = next(stream)
        assert chunk.token_ids == base(model, [1, 2], 9)[3 * i : 3 * i + 3]
        assert drafter.proposals == i + 1
    assert chunk.result is not None
    assert list(stream) == []


def test_a_stream_without_a_tokenizer_gives_ids() -> None:
    """B80."""
    chunks = list(SpecDecoder(tiny_llama(), strict=True).stream([1, 2], greedy(5)))
    assert chunks[-1].result is not None
    assert (chunks[-1].result.text, {chunk.text for chunk in chunks}) == (None, {""})


def test_a_stream_takes_one_prompt() -> None:
    """B80: at once, not when the first chunk is asked for."""
    decoder = SpecDecoder(tiny_llama(), ByteTokenizer())
    for prompts in ([[1], [2]], ["\x01", "\x02"]):
        with pytest.raises(InvalidParameter, match="one prompt"):
            decoder.stream(prompts)


def test_a_stream_can_be_watched_and_left() -> None:
    """B80: every round is shown before its chunk; a stream that is closed has ended."""
    decoder = SpecDecoder(tiny_llama(), strict=True)
    seen: list[Any] = []
    stream = decoder.stream([1, 2], greedy(9), watch=seen.append)
    chunk = next(stream)
    assert seen[0].outcome.tokens == (chunk.token_ids,)
    stream.close()
    assert list(stream) == []
    assert len(seen) == 1


def test_a_slow_reader_does_not_change_the_text() -> None:
    """B80."""
    decoder = byte_decoder(EMOJI, 2)
    parts = []
    for chunk in decoder.stream("a", greedy(12)):
        time.sleep(0.01)
        parts.append(chunk.text)
    assert "".join(parts) == decoder.generate("a", greedy(12)).text
