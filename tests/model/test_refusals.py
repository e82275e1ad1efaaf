"""Targets that cannot be served are refused when a decoder is built, by name of what stands in the way."""

from __future__ import annotations

import re
from typing import Any

import pytest
from harness import distance, plain
from support import base, greedy
from transformers import T5Config, T5ForConditionalGeneration

from specdec_core import InvalidParameter, SpecDecoder, UnsupportedModel
from specdec_core.model.runner import Runner
from specdec_core.testing.models import tiny_model

STATEFUL = {  # layer types by name, or, in older transformers, the class of the layer
    "bamba": "linear_attention|mamba",
    "falcon_h1": "hybrid|FalconH1Mixer",
    "jamba": "linear_attention|mamba",
    "lfm2": "conv",
    "mamba": "linear_attention|mamba|MambaBlock",
    "mamba2": "linear_attention|mamba|Mamba2Block",
    "qwen3_next": "linear_attention",
    "recurrent_gemma": "linear_attention|recurrent",
    "rwkv": "RwkvBlock",
}


@pytest.mark.parametrize("drafter", ["prompt_lookup", "none"])
@pytest.mark.parametrize("name", STATEFUL)
def test_recurrent_and_hybrid_targets_are_refused_whatever_drafts(name: str, drafter: str) -> None:
    """B27, B28: the guard is on the target."""
    model = tiny_model(name)
    with pytest.raises(UnsupportedModel) as raised:
        SpecDecoder(model, drafter=drafter)
    message = str(raised.value)
    assert re.search(rf" has .*layers .*\b({STATEFUL[name]})\b", message)
    assert message.startswith(name)
    assert "cannot be rolled back" in message


def test_a_drafters_own_model_is_refused_the_same_way() -> None:
    with pytest.raises(UnsupportedModel, match="mamba has"):
        Runner(tiny_model("mamba"))


def test_an_encoder_decoder_is_refused() -> None:
    config = T5Config(vocab_size=97, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModel, match="t5 is an encoder-decoder model"):
        SpecDecoder(T5ForConditionalGeneration(config))


def test_layers_without_a_state_are_not_blamed() -> None:
    """nemotron_h lists its MLPs as layers too."""
    model = tiny_model("llama", fresh=True)
    model.config.layer_types = ["linear_attention", "mlp"]
    with pytest.raises(UnsupportedModel, match=r"layers of type linear_attention, whose"):
        Runner(model)
    model.config.layer_types = ["full_attention", "mlp"]
    assert Runner(model).plan.distinct == (None,)


def test_gpt_neo_with_local_attention_is_refused_and_without_is_right() -> None:
    local = tiny_model("gpt_neo", attention_types=[[["global", "local"], 1]], window_size=8)
    with pytest.raises(UnsupportedModel, match="gpt_neo has local attention layers"):
        SpecDecoder(local)
    model = tiny_model("gpt_neo")
    result = SpecDecoder(model).generate([3, 4, 5] * 5, greedy(24))
    assert result.token_ids == base(model, [3, 4, 5] * 5, 24)


@pytest.mark.parametrize("name", ["bart", "bloom", "falcon", "openai-gpt"])
def test_models_that_do_not_take_masks_or_positions_are_refused_by_name(name: str) -> None:
    """B77: some raise in the probe, which counts as failed; some come out wrong."""
    model = tiny_model(name, **({"alibi": True} if name == "falcon" else {}))
    with pytest.raises(UnsupportedModel, match=f"^{name} cannot be checked in blocks: .*(raised|differ)"):
        SpecDecoder(model)


LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 24,
}


def test_a_longrope_context_ends_where_its_angles_change() -> None:
    """Beyond, one position turns every other of the forward: drafts and other rows would change a text."""
    model: Any = tiny_model("phi3", rope_parameters=LONG_ROPE, original_max_position_embeddings=24)
    text = [3, 4, 5] * 9
    beyond, within = (plain(model, text[:n])[22] for n in (25, 24))
    assert distance(beyond, within) > 0.01  # or this test says nothing
    decoder = SpecDecoder(model)
    result = decoder.generate([3, 4, 5] * 5, greedy(20))
    assert result.token_ids == base(model, [3, 4, 5] * 5, 24 - 15)
    assert result.finish_reason == "context"
    with pytest.raises(InvalidParameter, match="24"):
        decoder.generate([1] * 25, greedy(1))
