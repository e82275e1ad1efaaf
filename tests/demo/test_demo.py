"""The demo pair: small, trained, and found by every drafter without options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import cli

from specdec_core import SamplingParams, SpecDecoder
from specdec_core.demo import DRAFT, TARGET
from specdec_core.model.loading import load_model

DRAFTERS = ("prompt_lookup", "small_model", "early_exit", "tree_top2")
QUOTE = (
    "The old lighthouse keeper climbed the stairs with a lantern in his hand. He counted ships on grey water "
    "and wrote their names in a small book."
)
ASK = [{"role": "user", "content": f"Repeat this text exactly:\n\n{QUOTE}"}]
MOST_BYTES = 16e6


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    return load_model(str(TARGET), device="cpu")


def test_the_pair_fits_into_the_wheel() -> None:
    size = sum(file.stat().st_size for file in TARGET.parent.rglob("*") if file.is_file())
    assert size <= MOST_BYTES


def test_it_computes_in_float32_where_nothing_else_is_asked_for(demo: tuple[Any, Any]) -> None:
    model, tokenizer = demo
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    draft, _ = load_model(str(DRAFT), device="cpu")
    assert draft.num_parameters() < model.num_parameters() / 2


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_every_drafter_finds_its_part_and_says_what_transformers_says(
    demo: tuple[Any, Any], drafter: str
) -> None:
    model, tokenizer = demo
    decoder = SpecDecoder(model, tokenizer, drafter=drafter, draft_tokens=None)
    result = decoder.generate(ASK, SamplingParams(max_new_tokens=48))
    ids = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    plain = model.generate(ids, do_sample=False, max_new_tokens=48)[0, ids.shape[1] :].tolist()
    assert result.token_ids == plain[: len(result.token_ids)]
    assert result.stats.accepted_tokens > 0


def test_it_copies() -> None:
    decoder = SpecDecoder.from_pretrained(str(TARGET), drafter="prompt_lookup", device="cpu")
    result = decoder.generate(ASK, SamplingParams(max_new_tokens=96))
    assert result.text.strip() == QUOTE
    assert result.finish_reason == "eos"
    assert result.stats.tokens_per_target_call >= 2.5


def test_run_without_a_target_takes_it_and_says_so() -> None:
    said = {
        cli("run", "--drafter", drafter, "-n", "16", "-p", "Once upon a time").stdout for drafter in DRAFTERS
    }
    assert len(said) == 1
    line, _ = cli("run", "-n", "4", "-p", "Once upon a time").stderr.splitlines()
    assert "demo model" in line
    assert "--target" in line


def test_models_lists_the_pair_and_what_is_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--some--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = {model["name"]: model for model in json.loads(cli("models", "--json").stdout)}
    assert set(found) == {str(TARGET), str(DRAFT), "some/model"}
    assert found["some/model"] | {"megabytes": 0} == {
        "name": "some/model",
        "type": "llama",
        "megabytes": 0,
        "causal": True,
        "note": "",
    }
    listed = cli("models").stdout
    assert str(TARGET) in listed
    assert "some/model" in listed


def test_training_runs_the_same_network(demo: tuple[Any, Any]) -> None:
    forward = pytest.importorskip("tools.demo_models.forward", reason="not in this checkout")
    model, _ = demo
    ids = torch.randint(3, model.config.vocab_size, (2, 150), generator=torch.Generator().manual_seed(0))
    last = model.config.num_hidden_layers
    with torch.no_grad():
        hidden = forward.hidden_states(model, ids, torch.float32, (2, last))
        theirs = model(ids, output_hidden_states=True)
    torch.testing.assert_close(hidden[2], theirs.hidden_states[2], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(forward.logits(model, hidden[last]), theirs.logits, atol=1e-3, rtol=1e-4)
