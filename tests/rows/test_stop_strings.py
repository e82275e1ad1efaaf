"""Stop strings are found wherever a block puts them, and text, ids, logprobs and stream agree."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import ByteTokenizer, ScriptedDrafter, decoder_for, following, writer

from specdec_core import InvalidParameter, SamplingParams
from specdec_core.rows.text import RowText

TEXT = "abcdefghijklmnopqrstuvwxyz0123456789 .,:"
PROMPT = list(b"a")
SAID = (TEXT * 3)[1:]  # what the writer says after the prompt


def decoder(k: int) -> Any:
    ahead = following(list((TEXT * 4).encode()))
    drafter = ScriptedDrafter(lambda ask: ahead(ask.tokens, min(k, ask.depth)), depth=12)
    return decoder_for(writer(TEXT), drafter, tokenizer=ByteTokenizer())


def expected(stops: tuple[str, ...], n: int, include: bool = False) -> tuple[str, int, str]:
    """Text, tokens and reason by looking at the whole text: one byte is one token."""
    for end in range(1, n + 1):
        done = [stop for stop in stops if SAID[:end].endswith(stop)]
        if done:
            return SAID[: end if include else end - max(map(len, done))], end, "stop"
    return SAID[:n], n, "length"


@pytest.mark.parametrize("k", [0, 1, 5, 12])
@pytest.mark.parametrize("offset", range(1, 14))
def test_a_stop_string_completing_at_each_offset_of_a_block(k: int, offset: int) -> None:
    """B32, B35, B36."""
    stop = SAID[offset - 1 : offset + 2]
    result = decoder(k).generate(PROMPT, SamplingParams(max_new_tokens=30, stop=stop))
    text, tokens, reason = expected((stop,), 30)
    assert (result.text, len(result.token_ids), result.finish_reason) == (text, tokens, reason)
    assert bytes(result.token_ids).decode() == text + stop


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    "stops", [("def", "e"), ("cde", "de", "zz"), ("fghi", "hij", "ghi"), ("nothing like it",), ("9 .,:", "3")]
)
def test_of_several_the_first_to_complete_wins(stops: tuple[str, ...], include: bool) -> None:
    params = SamplingParams(max_new_tokens=40, stop=stops, include_stop=include, logprobs=0)
    result = decoder(12).generate(PROMPT, params)
    text, tokens, reason = expected(stops, 40, include)
    assert (result.text, len(result.token_ids), result.finish_reason) == (text, tokens, reason)
    assert [one.token_id for one in result.logprobs] == result.token_ids


@pytest.mark.parametrize("k", [0, 5, 12])
@pytest.mark.parametrize("stops", [("def",), ("ij", "jklmnop"), ("zz", "defx"), ("c",)])
def test_a_stream_never_shows_a_stop_string_nor_its_beginning(k: int, stops: tuple[str, ...]) -> None:
    """B81."""
    chunks = list(decoder(k).stream(PROMPT, SamplingParams(max_new_tokens=20, stop=stops)))
    text, tokens, reason = expected(stops, 20)
    assert "".join(chunk.text for chunk in chunks) == text == chunks[-1].result.text
    assert list(chain.from_iterable(chunk.token_ids for chunk in chunks)) == chunks[-1].result.token_ids
    assert (len(chunks[-1].result.token_ids), chunks[-1].result.finish_reason) == (tokens, reason)


def test_stops_wait_for_min_new_tokens() -> None:
    """B40: a stop string that completes before the minimum is no stop; a later one is."""
    params = SamplingParams(max_new_tokens=80, stop="de", min_new_tokens=10)
    result = decoder(5).generate(PROMPT, params)
    assert result.finish_reason == "stop"
    assert result.text == SAID[: SAID.index("de", 10)]


def test_rows_of_a_batch_have_their_own_stops() -> None:
    params = [SamplingParams(max_new_tokens=20, stop=s) for s in ((), "f", ("mn", "kl"))]
    results = decoder(4).generate([PROMPT] * 3, params)
    assert [r.text for r in results] == [expected(p.stop, 20)[0] for p in params]
    assert [r.finish_reason for r in results] == ["length", "stop", "stop"]


def test_stops_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="tokenizer"):
        decoder_for(writer(TEXT), "none").generate(PROMPT, SamplingParams(stop="x"))
    with pytest.raises(InvalidParameter, match="stop"):
        SamplingParams(stop=("a", ""))


@given(
    st.text("ab\u00e9\U0001f600", min_size=1, max_size=20),
    st.lists(st.text("ab\u00e9\U0001f600", min_size=1, max_size=4), max_size=3),
    st.booleans(),
    st.lists(st.integers(1, 5), min_size=1, max_size=8),
)
def test_text_and_chunks_equal_those_of_the_whole_text(
    text: str, stops: list[str], include: bool, sizes: list[int]
) -> None:
    """B80: also where characters take several tokens and blocks cut them."""
    raw = text.encode()
    ends = [(text.find(s) + len(s), text.find(s), s) for s in stops if s in text]
    wanted = text if not ends else text[: min(ends)[0] if include else min(ends)[1]]
    watch = RowText(ByteTokenizer(), tuple(stops), include_stop=include)
    shown, at, turn = "", 0, 0
    while at < len(raw) and not watch.stopped:
        size = sizes[turn % len(sizes)]
        watch.add(raw[at : at + size])
        shown += watch.take()
        assert wanted.startswith(shown)
        at, turn = at + size, turn + 1
    shown += watch.finish()
    assert shown == watch.text == wanted
