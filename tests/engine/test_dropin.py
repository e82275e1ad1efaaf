"""`specdec_core.generate` against `model.generate`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support import ByteTokenizer, ids, tiny_llama, writer
from transformers import GenerationConfig

from specdec_core import InvalidParameter, generate
from specdec_core.engine.dropin import _HONOURED, _ONLY, _WITHOUT_EFFECT

PROMPT = torch.tensor([ids(12, 5)])
LEFT_PADDED = torch.tensor([[0] * 7 + ids(5, 1), ids(12, 5)])
MASK = torch.tensor([[0] * 7 + [1] * 5, [1] * 12])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_new_tokens": 15},
        {"max_length": 20},
        {"max_new_tokens": 15, "repetition_penalty": 1.4},
        {"max_new_tokens": 15, "no_repeat_ngram_size": 2, "bad_words_ids": [[3], [24, 5]]},
        {"max_new_tokens": 15, "suppress_tokens": [24, 50]},
        {"max_new_tokens": 15, "sequence_bias": [[[24], -3.0]]},
        {"max_new_tokens": 15, "prompt_lookup_num_tokens": 3},
        {"generation_config": GenerationConfig(max_new_tokens=9)},
        {"generation_config": GenerationConfig(max_new_tokens=9), "max_new_tokens": 5},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_greedy_returns_what_transformers_returns(options: dict[str, Any]) -> None:
    plain = {name: value for name, value in options.items() if name != "prompt_lookup_num_tokens"}
    expected = tiny_llama().generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **copy.deepcopy(plain))
    got = generate(tiny_llama(), PROMPT, **options)
    assert torch.equal(got, expected)
    assert got.dtype == expected.dtype


def test_left_padded_batch_with_eos_is_padded_on_the_right() -> None:
    model = tiny_llama()
    eos = int(model.generate(LEFT_PADDED, attention_mask=MASK, max_new_tokens=6, pad_token_id=9)[0, -2])
    options = {"max_new_tokens": 12, "eos_token_id": eos, "pad_token_id": 9}
    expected = model.generate(LEFT_PADDED, attention_mask=MASK, **options)
    got = generate(model, input_ids=LEFT_PADDED, attention_mask=MASK, return_dict_in_generate=True, **options)
    assert torch.equal(got.sequences, expected)
    assert (expected[0] == 9).any()


def test_several_sequences_with_a_seed() -> None:
    options: dict[str, Any] = {
        "do_sample": True,
        "temperature": 1.5,
        "max_new_tokens": 8,
        "num_return_sequences": 3,
    }
    first, second = (
        generate(tiny_llama(), LEFT_PADDED, attention_mask=MASK, seed=4, **options) for _ in range(2)
    )
    assert first.shape == (6, 20)
    assert torch.equal(first, second)
    assert len({tuple(row.tolist()) for row in first[:3]}) == 3
    assert torch.equal(first[:3, :12], LEFT_PADDED[:1].expand(3, -1))


def test_sampling_has_transformers_default_top_k() -> None:
    """top_k=50 applies unless it is set, as in transformers."""
    logits = tiny_llama()(PROMPT).logits[0, -1]
    allowed = set(logits.topk(50).indices.tolist())
    options: dict[str, Any] = {
        "do_sample": True,
        "temperature": 30.0,
        "max_new_tokens": 1,
        "num_return_sequences": 200,
    }
    assert set(generate(tiny_llama(), PROMPT, seed=1, **options)[:, -1].tolist()) <= allowed
    assert not set(generate(tiny_llama(), PROMPT, seed=1, top_k=0, **options)[:, -1].tolist()) <= allowed


def test_a_streamer_gets_the_prompt_and_then_every_token() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.got: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            self.got.append(value.tolist())

        def end(self) -> None:
            self.got.append("end")

    ours, theirs = Recorder(), Recorder()
    generate(tiny_llama(), PROMPT, max_new_tokens=10, streamer=ours)
    tiny_llama().generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=10, streamer=theirs)
    assert ours.got == theirs.got
    with pytest.raises(InvalidParameter, match="streamer"):
        generate(tiny_llama(), LEFT_PADDED, attention_mask=MASK, streamer=ours)


def test_stop_strings_keep_the_tokens_that_complete_them() -> None:
    model, prompt = writer("abcdefghijklm"), torch.tensor([list(b"a")])
    got = generate(model, prompt, tokenizer=ByteTokenizer(), stop_strings=["fg", "k"], max_new_tokens=30)
    assert bytes(got[0].tolist()) == b"abcdefg"


@pytest.mark.parametrize("name", sorted(_ONLY))
def test_what_is_not_done_here_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidParameter, match=name):
        generate(tiny_llama(), PROMPT, **{name: 7})


def test_unknown_keywords_and_inputs_are_refused() -> None:
    with pytest.raises(InvalidParameter, match="max_new_token'"):
        generate(tiny_llama(), PROMPT, max_new_token=5)
    with pytest.raises(InvalidParameter, match="stopping_criteria"):
        generate(tiny_llama(), PROMPT, stopping_criteria=[])
    with pytest.raises(InvalidParameter, match="batch, length"):
        generate(tiny_llama())
    with pytest.raises(InvalidParameter, match="padded on the left"):
        generate(tiny_llama(), LEFT_PADDED, attention_mask=1 - MASK)


def test_every_keyword_of_this_transformers_is_accounted_for() -> None:
    known = _HONOURED | _WITHOUT_EFFECT | set(_ONLY)
    theirs = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert theirs <= known
    table = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
    mentioned = {
        name for name in _HONOURED | set(_ONLY) if f"`{name}" in table or name.startswith("encoder_")
    }
    assert mentioned == _HONOURED | set(_ONLY) - {"speculation_type", "use_mtp", "assistant_early_exit"}
