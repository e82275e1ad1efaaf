"""Ids to text in pieces: joined they are the whole, and no piece holds half a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ByteTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from specdec_core.rows.detokenizer import Detokenizer

TEXTS = [
    "ab cd ab cd",
    "caf\u00e9 \u4e2d\u6587",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "  two  spaces ",
    "\n\n",
]


def pieces(tokenizer: Any, ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """Decode in blocks of these sizes, over and over."""
    detokenizer, parts, at, turn = Detokenizer(tokenizer), [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        parts.append(detokenizer.add(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*parts, detokenizer.finish()]


def byte_level() -> Any:
    """A byte-level BPE, as of gpt2 and qwen, trained on a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=["<end>"], show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def metaspace() -> Any:
    """A tokenizer that drops the space before its first word, as of llama 2."""
    words = ["ab", "cd", "caf", "two", "spaces", "\u00e9", "\u2581"]
    vocab = {"<unk>": 0} | {"\u2581" + word: i for i, word in enumerate(words, 1)}
    vocab |= {word: len(vocab) + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def byte_fallback() -> Any:
    """Words, and bytes for all else, as of llama 2 and gemma."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581ab": 256, "cd": 257, "\u2581": 258}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<0x00>"))
    steps = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module", params=[ByteTokenizer, byte_level, metaspace], ids=lambda made: made.__name__)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return request.param()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_pieces_of_any_ids_join_to_the_whole(tokenizer: Any, data: Any, sizes: list[int]) -> None:
    """B80: random ids, which are seldom whole characters."""
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=40))
    whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(pieces(tokenizer, ids, sizes)) == whole


@given(text=st.text(max_size=30), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_pieces_of_a_text_are_whole_characters(text: str, sizes: list[int]) -> None:
    """B80."""
    text = text.replace("\ufffd", "")
    parts = pieces(ByteTokenizer(), list(text.encode()), sizes)
    assert "".join(parts) == text
    assert "\ufffd" not in "".join(parts)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_bytes_in_place_of_unknown_characters_are_put_together(size: int) -> None:
    """B80: many in a row, longer than what is decoded again."""
    text = "\u4e2d\u6587\U0001f600\u00e9" * 4
    ids = [256, 257, *text.encode(), 256, *text.encode(), 258, 257]
    parts = pieces(byte_fallback(), ids, [size])
    assert "".join(parts) == f"abcd{text} ab{text} cd"
    assert all("\ufffd" not in part for part in parts)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_real_byte_level_tokenizer_is_followed(text: str, size: int) -> None:
    """B80."""
    tokenizer = byte_level()
    parts = pieces(tokenizer, tokenizer.encode(text), [size])
    assert "".join(parts) == text
    assert all("\ufffd" not in part for part in parts)


def test_characters_are_held_back_until_they_are_complete() -> None:
    """B80."""
    detokenizer = Detokenizer(ByteTokenizer())
    given_ = list("x\U0001f600y".encode())
    assert [detokenizer.add([byte]) for byte in given_] == ["x", "", "", "", "\U0001f600", "y"]
    assert detokenizer.finish() == ""


def test_what_stands_before_half_a_character_is_shown() -> None:
    """B80, B32: tokens may end in mid-character, behind what a stop string looks for."""

    class Words(ByteTokenizer):
        words = (b"a\xc3", b"\xa9b", b"\xc3")

        def decode(self, token_ids: Sequence[int], **options: Any) -> str:
            return b"".join(self.words[token] for token in token_ids).decode(errors="replace")

    detokenizer = Detokenizer(Words())
    assert [detokenizer.add([token]) for token in (0, 1, 0, 2)] == ["a", "\xe9b", "a", ""]
    assert detokenizer.finish() == "\ufffd\ufffd"


def test_special_tokens_are_not_shown() -> None:
    """B30: an EOS that ended the row is in its ids and not in its text."""
    detokenizer = Detokenizer(ByteTokenizer())
    assert detokenizer.add([104, 105, 256]) == "hi"
    assert detokenizer.add([256]) == ""
    assert detokenizer.finish() == ""


def test_the_cost_of_a_piece_does_not_grow_with_the_text() -> None:
    """B80: a few tokens are decoded again, never all."""

    class Counting(ByteTokenizer):
        most = 0

        def decode(self, token_ids: Sequence[int], **options: Any) -> str:
            self.most = max(self.most, len(token_ids))
            return super().decode(token_ids, **options)

    tokenizer = Counting()
    pieces(tokenizer, list(b"abcdefgh" * 200), [4])
    assert tokenizer.most <= 16
