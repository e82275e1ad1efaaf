"""`early_exit`: the target's own first layers, over the target's own cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drafting import early, plain, says, tree
from support import ids

from specdec_core import SamplingParams, SpecDecoder, UsageError
from specdec_core.testing.models import tiny_model


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "cohere"])
@pytest.mark.parametrize("layer", [1, 2, 3])
def test_every_exit(architecture: str, layer: int) -> None:
    target, prompts = tiny_model(architecture, layers=4), [ids(1), ids(11)]
    decoder = SpecDecoder(target, drafter=early(layer), strict=True, draft_tokens=None)
    assert says(decoder, prompts, 20) == [plain(target, tuple(prompt), 20) for prompt in prompts]


@pytest.mark.parametrize("layer", [0, 4, 5, -1])
def test_an_exit_that_is_none(layer: int) -> None:
    for drafter in (early(layer), tree(layer=layer)):
        with pytest.raises(UsageError, match=f"layer={layer} .* 1 to 3"):
            SpecDecoder(tiny_model("llama", layers=4), drafter=drafter, draft_tokens=None)


def test_a_target_of_one_layer_has_none() -> None:
    with pytest.raises(UsageError, match="no early exit"):
        SpecDecoder(tiny_model("llama", layers=1), drafter="early_exit")


@pytest.mark.parametrize(("layers", "chosen"), [(2, 1), (3, 1), (6, 2)])
def test_the_default_is_a_third_of_the_layers(layers: int, chosen: int) -> None:
    drafter = early()
    SpecDecoder(tiny_model("llama", layers=layers), drafter=drafter, draft_tokens=None)
    assert layers_of(drafter) == chosen


def test_a_target_may_ship_its_exit(tmp_path: Path) -> None:
    target = tiny_model("llama", layers=4, fresh=True)
    target.config._name_or_path = str(tmp_path)
    (tmp_path / "specdec.json").write_text(json.dumps({"exit_layer": 3}))
    for drafter in (early(), tree()):
        SpecDecoder(target, drafter=drafter, draft_tokens=None)
        assert layers_of(drafter) == 3
    chosen = early(2)
    SpecDecoder(target, drafter=chosen, draft_tokens=None)
    assert layers_of(chosen) == 2


def test_the_prompt_is_read_once() -> None:
    target, prompt, n = tiny_model("llama", layers=3), ids(40), 12
    fed: list[int] = []
    layer: Any = target.model.layers[0]
    decoder = SpecDecoder(
        target, drafter=early(2, num_tokens=3), strict=True, prefill_chunk=16, draft_tokens=None
    )
    hook = layer.register_forward_pre_hook(lambda _, args: fed.append(args[0].shape[1]))
    try:
        result = decoder.generate(prompt, SamplingParams(max_new_tokens=n))
    finally:
        hook.remove()
    assert fed[:3] == [16, 16, 8]
    assert max(fed[3:]) == 1 + 3  # the pending token and its draft
    assert result.stats.acceptance_histogram[0] >= 1


def test_nothing_of_the_target_is_copied() -> None:
    target, drafter = tiny_model("llama", layers=3), early(2)
    decoder = SpecDecoder(target, drafter=drafter, draft_tokens=None)
    runner: Any = drafter.draft_model.cached
    assert runner.cache is decoder.target.runner.cache
    assert {id(p) for p in runner.model.parameters()} <= {id(p) for p in target.parameters()}


def layers_of(drafter: Any) -> int:
    return int(drafter.draft_model.cached.model.config.num_hidden_layers)
