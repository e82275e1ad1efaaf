"""What is wrong with a request is told at the border, in one line."""

from __future__ import annotations

from typing import Any

import pytest
from support import ScriptedDrafter, greedy, tiny_llama
from transformers import BatchEncoding

from specdec_core import InvalidParameter, SamplingParams, SpecDecoder
from specdec_core.engine.requests import params_of_each
from specdec_core.rows.prompts import encode_prompts

ENCODED = BatchEncoding({"input_ids": [1, 2], "attention_mask": [1, 1]})


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "the prompt is empty; pass at least one token, or a list of at least one prompt"),
        ([[]], "prompt 0 is empty; pass at least one token"),
        (
            ENCODED,
            r"the prompt is BatchEncoding, a tokenizer's output; pass its ids alone: \[\"input_ids\"\]",
        ),
        ([ENCODED, ENCODED], "the prompt is BatchEncoding, a tokenizer's output"),
        ({"input_ids": [1]}, "the prompt is dict, a tokenizer's output"),
        ({"role": "user", "content": "a"}, "the prompt is dict; put chat messages into a list"),
        (3, "the prompt is int; pass text, token ids or chat messages"),
    ],
)
def test_what_is_no_prompt_is_told_with_the_remedy(prompt: Any, words: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{words}"):
        encode_prompts(prompt, None)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ([SamplingParams(), None], "params 1 is NoneType; pass a SamplingParams for each prompt"),
        ([SamplingParams(), {}], "params 1 is dict"),
        ({"temperature": 1}, "params is dict; pass a SamplingParams, or a list of them"),
        ("ab", "params is str"),
        ([SamplingParams()], "1 params for 2 prompts"),
    ],
)
def test_what_are_no_params_is_told(params: Any, words: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{words}"):
        params_of_each(params, 2)


@pytest.mark.parametrize(
    "params", [{"eos_token_id": 97}, {"eos_token_id": [3, -1]}, {"bad_words_ids": [[5, 97]]}]
)
def test_ids_lie_in_the_vocabulary(params: dict[str, Any]) -> None:
    field = next(iter(params))
    with pytest.raises(
        InvalidParameter, match=rf"{field} holds the token id (97|-1); the target's ids are 0 to 96"
    ):
        SpecDecoder(tiny_llama(), drafter="none").generate([1], SamplingParams(**params))


# --- one drafter, one decoder ---------------------------------------------------------------------


def test_a_drafter_serves_one_decoder() -> None:
    drafter = ScriptedDrafter(lambda ask: [])
    first = SpecDecoder(tiny_llama(), drafter=drafter)
    with pytest.raises(InvalidParameter, match="'scripted' already serves another decoder; make a new one"):
        SpecDecoder(tiny_llama(), drafter=drafter)
    assert drafter.calls == [("bind", ())], "it was refused before it was bound again"
    assert first.generate([1], greedy(1)).token_ids
    del first
    SpecDecoder(tiny_llama(), drafter=drafter)  # the first is gone
