"""The demo pair in the package: it loads offline, fits the wheel, copies, and its drafts are good."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from specdec_core import SamplingParams, SpecDecoder, Stats
from specdec_core.demo import demo_folder
from specdec_core.model.loading import load_model

FOLDER = demo_folder()
DRAFTERS = ("prompt_lookup", "small_model", "early_exit", "tree_top2")
MOST_BYTES = 16 * 2**20
COPIED = (
    "The old clock in the village square stopped on a cold Sunday in March, and nobody knew why.",
    "Honey bees fly from flower to flower, carry pollen home, and store their honey for the winter.",
    "A quiet neighbour found seven yellow umbrellas under the bridge and took them to the market.",
)
ASKED = ("Write a short story about a beekeeper who loses a letter on a farm.", "What is rain?")


@functools.cache
def demo() -> tuple[Any, Any]:
    model, tokenizer = load_model(str(FOLDER), device="cpu", dtype="float32")
    return model, tokenizer


@functools.cache
def decoder(drafter: str) -> SpecDecoder:
    return SpecDecoder(*demo(), drafter=drafter, draft_tokens=4)


def chat(text: str) -> str:
    shown: str = demo()[1].apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return shown


def prompts() -> list[str]:
    return [chat(f"Repeat this text exactly:\n\n{COPIED[0]}"), *map(chat, ASKED)]


def pooled(drafter: str, tokens: int = 40) -> Stats:
    params = SamplingParams(max_new_tokens=tokens)
    return Stats.pooled(decoder(drafter).generate(prompt, params).stats for prompt in prompts())


def test_everything_fits_into_the_wheel() -> None:
    files = [file for file in FOLDER.parent.rglob("*") if file.is_file() and file.suffix != ".pyc"]
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES


def test_the_folder_is_named_without_heavy_imports() -> None:
    code = (
        "import sys, importlib.util as u; from pathlib import Path;"
        f"spec = u.spec_from_file_location('demo', {str(FOLDER.parent / '__init__.py')!r});"
        "module = u.module_from_spec(spec); spec.loader.exec_module(module);"
        "assert 'torch' not in sys.modules; print(module.demo_folder())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(FOLDER)


def test_it_loads_offline_in_about_a_second() -> None:
    code = (
        "import time, torch; from transformers import AutoTokenizer, Qwen3ForCausalLM;"
        "start = time.process_time();"
        f"AutoTokenizer.from_pretrained({str(FOLDER)!r});"
        f"Qwen3ForCausalLM.from_pretrained({str(FOLDER)!r}, dtype=torch.float32);"
        "print(time.process_time() - start)"
    )
    nowhere = {"HF_HUB_OFFLINE": "1", "HF_HOME": os.devnull, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | nowhere, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < 2  # seconds of CPU; well under one on an idle machine


@pytest.mark.parametrize(
    "text", ["Grüße, 你好 🙂", " a  b\t\r\n\n", "def f(x):\n    return x[::-1]", "\x00\u200d\ufeff", ""]
)
def test_the_tokenizer_round_trips(text: str) -> None:
    tokenizer = demo()[1]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_template_ends_where_the_answer_begins() -> None:
    assert chat("Hi") == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_target_and_draft_share_one_tokenizer() -> None:
    companions = decoder("prompt_lookup").target.companions
    assert json.loads((FOLDER / "specdec.json").read_text()) == {"draft": "../draft", "exit_layer": 2}
    assert companions["exit_layer"] == 2
    files = ("tokenizer.json", "tokenizer_config.json")
    for file in files:
        assert (FOLDER / file).read_text() == (FOLDER / companions["draft"] / file).read_text()


@pytest.mark.parametrize("text", COPIED)
def test_it_copies(text: str) -> None:
    result = decoder("prompt_lookup").generate(chat(f"Repeat this text exactly:\n\n{text}"))
    assert (result.text, result.finish_reason) == (text, "eos")


def test_prompt_lookup_shines_on_copies() -> None:
    stats = decoder("prompt_lookup").generate(prompts()[0]).stats
    assert stats.tokens_per_target_call >= 2.5


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_that_of_plain_decoding(drafter: str) -> None:
    params = SamplingParams(max_new_tokens=24)
    for prompt in prompts():
        plain = decoder("none").generate(prompt, params)
        assert decoder(drafter).generate(prompt, params).token_ids == plain.token_ids


@pytest.mark.parametrize(("drafter", "least"), [("early_exit", 0.4), ("small_model", 0.5)])
def test_drafts_are_accepted(drafter: str, least: float) -> None:
    assert pooled(drafter).acceptance_rate >= least


def test_the_tree_gives_more_than_its_chain() -> None:
    assert pooled("tree_top2:depth=4").tokens_per_target_call >= pooled("small_model").tokens_per_target_call


def test_the_training_forward_is_the_models_own() -> None:
    forward = pytest.importorskip("tools.demo_models.forward", reason="only in a checkout")
    model, tokenizer = demo()
    ids = torch.tensor([tokenizer(prompts()[0] + COPIED[1] * 8)["input_ids"]])
    with torch.inference_mode():
        states = forward.hidden_states(model, ids, torch.float32, (6,))
        torch.testing.assert_close(
            forward.logits(model, states[6]),
            model(input_ids=ids, use_cache=False).logits,
            atol=2e-3,
            rtol=1e-3,
        )
