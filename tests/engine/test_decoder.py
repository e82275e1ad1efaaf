"""`SpecDecoder`: what it takes, what it refuses, and what it leaves alone."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from memory import live_tensors
from support import (
    ByteTokenizer,
    ScriptedDrafter,
    accepting,
    base,
    greedy,
    ids,
    oracle,
    planted,
    tiny_llama,
    writer,
)
from torch import nn

from specdec_core import (
    Capture,
    DraftLaw,
    IncompatiblePair,
    InvalidParameter,
    SamplingParams,
    SpecdecError,
    SpecDecoder,
    UnknownPlugin,
)
from specdec_core.testing.models import tiny_model

# --- prompts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "prompt",
    [
        [3, 4, 5],
        (3, 4, 5),
        range(3, 6),
        torch.tensor([3, 4, 5]),
        torch.tensor([3, 4, 5], dtype=torch.int32),
        np.array([3, 4, 5]),
        list(np.array([3, 4, 5])),
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_a_prompt_of_ids_may_be_any_sequence(prompt: Any) -> None:
    """B25's kind: and alone or in a list it gives the same."""
    decoder = SpecDecoder(tiny_llama(), strict=True)
    expected = base(tiny_llama(), [3, 4, 5], 4)
    result = decoder.generate(prompt, greedy(4))
    assert (result.token_ids, result.prompt_token_ids) == (expected, [3, 4, 5])
    assert all(type(token) is int for token in result.prompt_token_ids)
    assert [one.token_ids for one in decoder.generate([prompt, prompt], greedy(4))] == [expected] * 2


@pytest.mark.parametrize(
    "batch", [torch.tensor([[3, 4], [5, 6]]), np.array([[3, 4], [5, 6]]), ([3, 4], [5, 6])]
)
def test_two_dimensions_are_a_list_of_prompts(batch: Any) -> None:
    """B54's kind."""
    results = SpecDecoder(tiny_llama(), strict=True).generate(batch, greedy(3))
    assert [one.token_ids for one in results] == [
        base(tiny_llama(), prompt, 3) for prompt in ([3, 4], [5, 6])
    ]


def test_text_and_chats_go_through_the_tokenizer() -> None:
    """B94's kind: the tokenizer's own template, once."""

    class Chatty(ByteTokenizer):
        chat_template = "{{ messages }}"

        def apply_chat_template(self, messages: Any, **options: Any) -> list[int]:
            assert options == {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
            return list("".join(f"<{m['role']}>{m['content']}" for m in messages).encode())

    decoder = SpecDecoder(writer("abcd"), Chatty(), strict=True)
    assert decoder.generate("a", greedy(3)).text == "bcd"
    assert [one.text for one in decoder.generate(["a", "b"], greedy(3))] == ["bcd", "cda"]
    chat = [{"role": "user", "content": "hi"}]
    assert decoder.generate(chat, greedy(1)).prompt_token_ids == list(b"<user>hi")
    assert len(decoder.generate([chat, chat], greedy(1))) == 2
    plain = SpecDecoder(writer("abcd"), ByteTokenizer())
    with pytest.raises(InvalidParameter, match="no chat template"):
        plain.generate(chat)
    with pytest.raises(InvalidParameter, match="chat messages need a tokenizer"):
        SpecDecoder(writer("abcd")).generate(chat)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "the prompt is empty"),
        ("", "the prompt is empty"),
        ([[1], []], "prompt 1 is empty"),
        (["a", ""], "prompt 1 is empty"),
        ([5, 97], "the prompt holds the token id 97; the target's ids are 0 to 96"),
        ([[5], [-1]], "prompt 1 holds the token id -1"),
        ([1.5, 2.5], "prompt 0 is float"),
        ([True], "pass text, token ids or chat messages"),
        (torch.tensor([0.5]), "pass text, token ids or chat messages"),
        (b"ab", "the prompt is bytes"),
        (None, "the prompt is NoneType"),
        (7, "the prompt is int"),
        ([None], "prompt 0 is NoneType"),
        ({"input_ids": [1]}, "the prompt is dict"),
    ],
    ids=repr,
)
def test_what_is_no_prompt_is_refused_by_name(prompt: Any, words: str) -> None:
    """B106's kind: before anything is generated."""
    decoder = SpecDecoder(tiny_llama(), ByteTokenizer())
    with pytest.raises(InvalidParameter) as caught:
        decoder.generate(prompt, greedy(4))
    assert words in str(caught.value)


def test_text_without_a_tokenizer_is_refused() -> None:
    """B106's kind."""
    decoder = SpecDecoder(tiny_llama())
    with pytest.raises(InvalidParameter, match="no tokenizer; pass token ids"):
        decoder.generate("hello")
    assert decoder.generate([1], greedy(1)).text is None


# --- construction ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"draft_tokens": -1}, "draft_tokens=-1"),
        ({"draft_tokens": 1.5}, "draft_tokens=1.5"),
        ({"max_batch": 0}, "max_batch=0"),
        ({"max_batch": True}, "max_batch=True"),
        ({"prefill_chunk": 1}, "prefill_chunk=1"),
    ],
)
def test_counts_are_checked(options: dict[str, Any], words: str) -> None:
    """B105's kind."""
    with pytest.raises(InvalidParameter, match=words):
        SpecDecoder(tiny_llama(), **options)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    """B99's kind."""
    with pytest.raises(UnknownPlugin, match="did you mean 'prompt_lookup'"):
        SpecDecoder(tiny_llama(), drafter="prompt_lokup")
    with pytest.raises(UnknownPlugin, match="did you mean 'greedy'"):
        SpecDecoder(tiny_llama(), verifier="greedyy")


def test_trees_need_a_target_that_can_check_them() -> None:
    """B77's kind: positions from slots; the error names drafter, model and reason."""
    drafter = ScriptedDrafter(lambda ask: [], trees=True)
    with pytest.raises(IncompatiblePair, match=r"'scripted' drafts trees, and mpt can check chains only"):
        SpecDecoder(tiny_model("mpt"), drafter=drafter, draft_tokens=None)
    chain = ScriptedDrafter(accepting(oracle(tiny_model("mpt"), [1, 2]), [3], 4), depth=4)
    result = SpecDecoder(tiny_model("mpt"), drafter=chain, strict=True, draft_tokens=None).generate(
        [1, 2], greedy(12)
    )
    assert (result.token_ids, result.stats.rounds) == (base(tiny_model("mpt"), [1, 2], 12), 3)


def test_a_verifier_that_cannot_sample_refuses_rows_that_do() -> None:
    """B105's kind: greedy rows pass."""
    decoder = SpecDecoder(tiny_llama(), verifier="greedy", strict=True)
    assert decoder.generate([1, 2], greedy(3)).verifier == "greedy"
    with pytest.raises(InvalidParameter, match=r"temperature=0\.5 needs a verifier that samples"):
        decoder.generate([[1], [2]], [greedy(3), SamplingParams(temperature=0.5)])


def test_auto_takes_a_verifier_for_each_call() -> None:
    """B72's kind: greedy where all rows are, one that keeps a seed's promise where one has a seed."""
    decoder = SpecDecoder(tiny_llama(), strict=True)
    assert decoder.generate([1, 2], greedy(3)).verifier == "greedy"
    assert (
        decoder.generate([1, 2], SamplingParams(max_new_tokens=3, temperature=1.0, seed=1)).verifier
        == "match"
    )
    assert decoder.generate([1, 2], SamplingParams(max_new_tokens=3, temperature=1.0)).verifier == "match"


def test_draft_tokens_and_the_drafters_own_depth_both_cap() -> None:
    """B105's kind: the smaller counts; 0 is plain decoding."""
    model, prompt = tiny_llama(), [7, 8] * 5
    drafted = {}
    for own, asked in ((3, None), (3, 8), (8, 3), (8, 0), (0, 8)):
        decoder = SpecDecoder(
            model, drafter=f"prompt_lookup:num_tokens={own}", draft_tokens=asked, strict=True
        )
        widths = [done.draft.nodes for done in decoder.rounds(prompt, greedy(20))]
        drafted[own, asked] = max(widths)
    assert drafted == {(3, None): 3, (3, 8): 3, (8, 3): 3, (8, 0): 0, (0, 8): 0}


# --- devices and capture --------------------------------------------------------------------------


@pytest.mark.parametrize("capture", [None, Capture.FIXED])
def test_every_device_says_what_plain_decoding_says(device: torch.device, capture: Capture | None) -> None:
    """B63, B75: chains, trees and batches on the target's own device; on a GPU in captured graphs."""
    model = tiny_llama(device=str(device))
    prompts = [ids(length, 81) for length in (1, 7, 30)]
    ahead = oracle(model, *prompts)
    tree = ScriptedDrafter(
        planted([-1, -1, 0, 1, 1], [1, 4], ahead), depth=2, nodes=5, trees=True, laws=[DraftLaw.ONE_HOT]
    )
    chain = ScriptedDrafter(accepting(ahead, [3, 0, 5], 5), depth=5)
    for drafter in ("none", "prompt_lookup", chain, tree):
        decoder = SpecDecoder(
            model, drafter=drafter, strict=True, capture=capture, prefill_chunk=16, draft_tokens=None
        )
        assert decoder.target.device.type == device.type
        results = decoder.generate(prompts, greedy(24))
        assert [one.token_ids for one in results] == [base(model, prompt, 24) for prompt in prompts]
    params = SamplingParams(max_new_tokens=12, temperature=0.8, top_k=30, seed=5)
    plain = SpecDecoder(model, drafter="none").generate(prompts[1], params)
    assert decoder.generate(prompts[1], params).token_ids == plain.token_ids  # drafted by the tree


@pytest.mark.parametrize("capture", [Capture.OFF, Capture.FIXED])
def test_calls_in_and_out_of_inference_mode_mix(capture: Capture) -> None:
    """B25's kind: what is made inside can be written to outside."""
    model, prompt = tiny_llama(), ids(70, 82)
    with torch.inference_mode():
        decoder = SpecDecoder(model, strict=True, capture=capture)
        assert decoder.generate(prompt, greedy(5)).token_ids == base(model, prompt, 5)
    for _ in range(2):
        assert decoder.generate(prompt[:40], greedy(5)).token_ids == base(model, prompt[:40], 5)
    with torch.inference_mode():
        stream = decoder.stream(prompt, greedy(5))
        assert next(stream).token_ids == base(model, prompt, 1)
        assert torch.is_inference_mode_enabled()
    assert [token for chunk in stream for token in chunk.token_ids] == base(model, prompt, 5)[1:]
    assert torch.is_grad_enabled()


# --- side effects ---------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Dropout that would show."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x) if self.training else x


def test_nothing_of_the_model_or_the_world_is_changed() -> None:
    """B72, B93: generators, configs, weights, gradients, mode."""
    model: Any = tiny_model("llama", fresh=True)
    model.generation_config.update(temperature=0.3, top_k=7, do_sample=True, max_new_tokens=3)
    kept = copy.deepcopy((model.config.to_dict(), model.generation_config.to_dict(), model.state_dict()))
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    decoder = SpecDecoder(model, strict=True)
    for params in (
        greedy(9),
        SamplingParams(max_new_tokens=9, temperature=1.0, seed=3),
        SamplingParams(temperature=1.0),
    ):
        list(decoder.stream([1, 2, 1], params.replace(max_new_tokens=9)))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    assert model.config.to_dict() == kept[0]
    assert model.generation_config.to_dict() == kept[1]
    assert all(torch.equal(weight, kept[2][name]) for name, weight in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not model.training


def test_a_models_generation_config_gives_no_sampling_settings() -> None:
    """B93: greedy unless asked for otherwise."""
    model: Any = tiny_model("llama", fresh=True)
    model.generation_config.update(temperature=0.3, do_sample=True, max_new_tokens=3, repetition_penalty=2.0)
    assert SpecDecoder(model, strict=True).generate([1, 2], greedy(9)).token_ids == base(model, [1, 2], 9)


@pytest.mark.parametrize("how", ["whole run", "abandoned", "failed"])
def test_a_model_in_training_is_run_without_dropout_and_goes_on_training(how: str) -> None:
    """B93's kind: modules that were in evaluation mode stay there."""
    model: Any = tiny_model("llama", fresh=True)
    expected = base(model, [1, 2], 9)
    model.model.norm = nn.Sequential(model.model.norm, Dropping())
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]

    def unharmed() -> None:
        assert [module.training for module in model.modules()] == modes

    drafter = ScriptedDrafter(lambda ask: [])
    decoder = SpecDecoder(model, drafter=drafter, strict=True, draft_tokens=None)
    unharmed()
    if how == "whole run":
        assert decoder.generate([1, 2], greedy(9)).token_ids == expected
    elif how == "abandoned":
        stream = decoder.stream([1, 2], greedy(9))
        assert next(stream).token_ids == expected[:1]
        stream.close()
    else:
        drafter.script = lambda ask: 1 // 0  # type: ignore[assignment]
        with pytest.raises(SpecdecError):
            decoder.generate([1, 2], greedy(9))
    unharmed()


def test_a_second_call_starts_anew() -> None:
    """B93: no state of the first is left; the same objects come out."""
    decoder = SpecDecoder(tiny_llama(), strict=True)
    prompt = [3, 4, 5] * 4
    first, second = (decoder.generate(prompt, greedy(15)) for _ in range(2))
    assert first.token_ids == second.token_ids
    assert first.stats.acceptance_histogram == second.stats.acceptance_histogram
    assert not decoder.target.runner._held


def test_repeated_calls_keep_no_memory() -> None:
    """B90's kind: tensors and bytes are flat after the first calls."""
    decoder = SpecDecoder(tiny_llama(), strict=True, capture=Capture.FIXED)

    seen = []
    for i in range(6):
        decoder.generate([ids(12, 83), [1, 2, 1, 2]], greedy(12))
        if i > 2:
            seen.append(live_tensors())
    assert len(set(seen)) == 1
