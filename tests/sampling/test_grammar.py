"""JSON schemas and regular expressions, by llguidance."""

from __future__ import annotations

import json
import sys
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import decoder_for, same

from specdec_core import FinishReason, SamplingParams, UsageError, grammar
from specdec_core.contract.constraints import Walk
from specdec_core.testing.models import tiny_model

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ann", "bob"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "fine": {"type": "boolean"},
    },
    "required": ["name", "size", "fine"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def byte_tokenizer() -> Any:
    """A byte-level BPE with a few merges, and an EOS."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    merges = [
        ("n", "a"),
        ("m", "e"),
        ("na", "me"),
        ("1", "2"),
        ('"', ":"),
        ("t", "r"),
        ("tr", "ue"),
        ("u", "e"),
    ]
    merges = [merges[-1], *merges[:-1]]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def valid(text: str) -> bool:
    """Whether a text is JSON of SCHEMA."""
    found = json.loads(text)
    return (
        list(found) == ["name", "size", "fine"]
        and found["name"] in ("ann", "bob")
        and type(found["size"]) is int
        and 0 <= found["size"] <= 999
        and type(found["fine"]) is bool
    )


@pytest.mark.parametrize(
    "drafter", ["none", "prompt_lookup", "early_exit:layer=1,draft=sampled", "early_exit:layer=1"]
)
def test_a_json_schema_is_kept(byte_tokenizer: Any, drafter: str) -> None:
    model = tiny_model(vocab=len(byte_tokenizer) + 7)  # padded, as many targets are
    decoder = decoder_for(model, drafter, tokenizer=byte_tokenizer)
    constraint = grammar.json_schema(SCHEMA, byte_tokenizer, compact=True)
    params = SamplingParams(max_new_tokens=80, temperature=1.0, constraint=constraint)
    results = decoder.generate(['{"name": "eve"}'] * 6, params)
    assert all(r.finish_reason == FinishReason.EOS and valid(r.text) for r in results)
    greedy = decoder.generate("{", params.replace(temperature=0.0))
    assert valid(greedy.text)
    assert greedy.stats.rounds < len(greedy.token_ids) - 10
    seeded = params.replace(seed=4)
    plain = decoder_for(model, "none", tokenizer=byte_tokenizer, draft_tokens=0)
    if "sampled" not in drafter:  # there `auto` is `match`
        assert decoder.generate("{", seeded).token_ids == plain.generate("{", seeded).token_ids
    assert greedy.token_ids == plain.generate("{", params.replace(temperature=0.0)).token_ids


def test_whitespace_is_free_unless_compact(byte_tokenizer: Any) -> None:
    spaced = byte_tokenizer('{ "name": "ann"')["input_ids"]
    loose, tight = (
        grammar.json_schema(json.dumps(SCHEMA), byte_tokenizer, compact=compact).matcher()
        for compact in (False, True)
    )
    assert loose.consume(spaced) == len(spaced)
    assert tight.consume(spaced) == 1


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_regex_is_kept(byte_tokenizer: Any, ignore_eos: bool) -> None:
    pattern = grammar.regex(r"(ab?c){2}[0-9]{3};", byte_tokenizer)
    decoder = decoder_for(tiny_model(vocab=len(byte_tokenizer)), "prompt_lookup", tokenizer=byte_tokenizer)
    params = SamplingParams(max_new_tokens=40, temperature=1.5, constraint=pattern, ignore_eos=ignore_eos)
    for result in decoder.generate(["abcac12;"] * 5, params):
        assert result.text is not None
        assert result.text.endswith(";")
        assert result.text.replace("abc", "ac").startswith("acac")
        assert result.finish_reason == (FinishReason.STOP if ignore_eos else FinishReason.EOS)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_llguidance_rolls_back_exactly(byte_tokenizer: Any, data: st.DataObject) -> None:
    made = data.draw(
        st.sampled_from(
            [
                grammar.regex(r"(ab?c)*[0-9]{2,4};", byte_tokenizer),
                grammar.json_schema(SCHEMA, byte_tokenizer, compact=True),
            ]
        )
    )
    eos, vocab = {byte_tokenizer.eos_token_id}, len(byte_tokenizer)
    walk = Walk(made, eos, vocab)
    texts = [
        "ac",
        "abc",
        "abcac12;",
        "ac1234;",
        "12;x",
        '{"name":"ann"',
        '{"name":"bob","size":12,"fine":true}',
        "}",
    ]
    known = [byte_tokenizer(text)["input_ids"] for text in texts]
    for _ in range(12):
        text = data.draw(st.sampled_from(known))
        path = text[: data.draw(st.integers(0, len(text)))] + data.draw(st.sampled_from([[], [70], [15, 16]]))
        fresh = Walk(made, eos, vocab)
        assert walk.legal(path) == fresh.legal(path)
        assert same(walk.allowed(path), fresh.allowed(path))
        assert walk.forced(8) == fresh.forced(8)


def test_mistakes_are_one_line(byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for build, culprit in (
        (lambda: grammar.regex("[0-9", byte_tokenizer), r"^regex\(\[0-9\): .*unclosed character class"),
        (lambda: grammar.json_schema({"type": "foo"}, byte_tokenizer), "^json_schema.*foo"),
        (lambda: grammar.json_schema("{oops", byte_tokenizer), r"^the JSON schema \{oops is no JSON: "),
        (lambda: grammar.json_schema("[1]", byte_tokenizer), r"^the JSON schema \[1\] is no JSON object"),
        (lambda: grammar.regex("a", object()), "a grammar needs a fast tokenizer, and object is none"),
    ):
        with pytest.raises(UsageError, match=culprit):
            build()
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match=r"pip install 'specdec-core\[grammar\]'"):
        grammar.regex("a", byte_tokenizer)


@pytest.mark.real_model
def test_a_real_model_says_json_of_the_schema(smollm2: Any) -> None:
    model, tokenizer = smollm2
    constraint = grammar.json_schema(SCHEMA, tokenizer, compact=True)
    said = {}
    for drafter, depth in product(("prompt_lookup", "none"), (None, 0)):
        decoder = decoder_for(model, drafter, tokenizer=tokenizer, draft_tokens=depth)
        result = decoder.generate(
            "A JSON record of ann:\n", SamplingParams(max_new_tokens=24, constraint=constraint)
        )
        assert result.finish_reason == FinishReason.EOS
        assert valid(result.text or "")
        said[drafter, depth] = result.token_ids
        assert (result.stats.rounds == len(result.token_ids)) == (depth == 0)
    assert len({tuple(tokens) for tokens in said.values()}) == 1
