"""What is wrong with a request is told at the border, in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import ScriptedDrafter, greedy, tiny_llama
from transformers import BatchEncoding

from specdec_core import Capabilities, DraftLaw, InvalidParameter, SamplingParams, SpecDecoder
from specdec_core.engine import memory as room
from specdec_core.engine.memory import check_room
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


# --- room -----------------------------------------------------------------------------------------

CHAINS = Capabilities(laws=frozenset({DraftLaw.ONE_HOT}), max_depth=4)
DRAWN = Capabilities(laws=frozenset({DraftLaw.SAMPLED}), max_depth=4)


def test_a_batch_that_would_not_fit_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, vocab = torch.device("cpu"), 150_000
    monkeypatch.setattr(room, "_free", lambda device: 2 * 10**9)
    check_room(64, 20, vocab, CHAINS, cpu)  # 42 indices: 1.6 GB
    with pytest.raises(
        InvalidParameter,
        match=r"max_batch=64 with drafts of 20 nodes over 150000 tokens needs 2\.4 GB .* 2\.0 GB is free",
    ):
        check_room(64, 20, vocab, DRAWN, cpu)  # and 20 for q
    monkeypatch.setattr(room, "_free", lambda device: None)
    check_room(64, 20, vocab, DRAWN, cpu)


def test_a_run_counts_the_rows_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr("specdec_core.engine.decoder.check_room", lambda rows, *_: seen.append(rows))
    decoder = SpecDecoder(tiny_llama(), drafter="none", max_batch=3)
    for prompts in ([[1]], [[1]] * 5):
        decoder.generate(prompts, greedy(1))
    list(decoder.finished([(0, [1], greedy(1))], [greedy(1)]))
    assert seen == [1, 3, 3]


def test_free_memory_is_known_here() -> None:
    free = room._free(torch.device("cpu"))
    assert free is None or 10**6 < free < 10**15


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
