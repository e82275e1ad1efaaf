"""The first layers as a model of their own, and the head alone: both as the model itself does them."""

from __future__ import annotations

import copy
import functools
import random
from types import MethodType
from typing import Any

import pytest
import torch
from harness import ROUNDING, View, admit, check_tree, counted, distance, outcome, plain, random_tokens
from support import base, greedy
from torch import Tensor, nn

from specdec_core import InvalidParameter, SpecDecoder, UnsupportedModel
from specdec_core.engine.target import Target
from specdec_core.model.layers import BlockStates, blocks_of, final_norm, first_layers, head_of
from specdec_core.model.replica import Replica
from specdec_core.testing.models import tiny_model

LAYERS = 4
IDS = torch.tensor([random_tokens(random.Random(0), 20), random_tokens(random.Random(1), 20)])
MODELS: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.3},
    "gemma2": {"window": 8, "final_logit_softcapping": 5.0},
    "gpt2": {},
    "gpt_neo": {"attention_types": [[["global"], LAYERS]], "num_layers": LAYERS},
    "granite": {"logits_scaling": 3.0},
    "llama": {},
    "opt": {},
    "phi": {},
    "qwen3": {"window": 8},
    "starcoder2": {"window": 8},
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    """A model of four layers, with whatever its architecture does to the logits."""
    return tiny_model(request.param, layers=LAYERS, **MODELS[request.param])


@torch.no_grad()
def own_head(model: Any, hidden: Tensor) -> Tensor:
    """Final norm, head, scale and soft cap, spelled out by architecture."""
    config = model.config
    parts = {"gpt2": "ln_f", "gpt_neo": "ln_f", "opt": "decoder.final_layer_norm", "phi": "final_layernorm"}
    norm = model.base_model.get_submodule(parts.get(config.model_type, "norm"))
    logits: Tensor = model.lm_head(norm(hidden))
    if config.model_type == "cohere":
        logits = logits * config.logit_scale
    if config.model_type == "granite":
        logits = logits / config.logits_scaling
    if config.model_type == "gemma2":
        logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
    return logits


@torch.no_grad()
def states(model: Any) -> tuple[Tensor, ...]:
    """HF's hidden states, the last one without the final norm."""
    kept: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        kept.append(output[0] if isinstance(output, tuple) else output)

    handle = blocks_of(model)[-1].register_forward_hook(keep)
    found = model(input_ids=IDS, output_hidden_states=True, use_cache=False).hidden_states
    handle.remove()
    return (*found[:-1], kept[0])


def test_the_first_layers_and_the_models_own_head(model: Any) -> None:
    """B06, at every exit."""
    hidden = states(model)
    for exit_layer in range(1, LAYERS + 1):
        short = first_layers(model, exit_layer)
        with torch.no_grad():
            logits = short(input_ids=IDS, use_cache=False).logits
        assert distance(logits, own_head(model, hidden[exit_layer])) < ROUNDING
    assert distance(logits, torch.stack([plain(model, row) for row in IDS.tolist()])) < ROUNDING


def test_the_head_alone(model: Any) -> None:
    """Applied to what the last block gives, of any shape, it makes the model's own logits."""
    hidden = states(model)
    expected = torch.stack([plain(model, row) for row in IDS.tolist()])
    assert distance(head_of(model)(hidden[LAYERS]), expected) < ROUNDING
    assert distance(head_of(model)(hidden[LAYERS][0, 3]), expected[0, 3]) < ROUNDING
    nested = hidden[LAYERS].reshape(2, 5, 2, 2, -1)
    assert head_of(model)(nested).shape == (2, 5, 2, 2, 97)
    assert distance(head_of(model)(hidden[2]), own_head(model, hidden[2])) < ROUNDING


def test_the_final_norm_gives_what_the_head_reads(model: Any) -> None:
    """It is the model's own module where that is all there is, of any shape."""
    hidden, norm = states(model)[LAYERS], final_norm(model)
    with torch.no_grad():
        expected = model.base_model(input_ids=IDS, use_cache=False).last_hidden_state
    assert distance(norm(hidden), expected) < ROUNDING
    assert distance(norm(hidden[0, 3]), expected[0, 3]) < ROUNDING
    assert "whole" not in repr(norm) or model.config.model_type == "opt"
    assert not norm(hidden.requires_grad_()).requires_grad


def test_the_final_norm_of_a_model_that_does_more() -> None:
    """What stands behind the norm is done too."""
    model = tiny_model("opt", layers=LAYERS, fresh=True, hidden_size=32, word_embed_proj_dim=16)
    with torch.no_grad():
        expected = model.base_model(input_ids=IDS, use_cache=False).last_hidden_state
    assert expected.shape[-1] == 16
    hidden = states(model)[LAYERS]
    assert distance(final_norm(model)(hidden), expected) < ROUNDING


def test_the_head_takes_more_states_than_a_context_has() -> None:
    model = tiny_model("gpt2", context=16)
    hidden = torch.randn(3, 40, 32)
    assert distance(head_of(model)(hidden), own_head(model, hidden)) < ROUNDING


def test_states_of_blocks_are_gathered_in_forwards_that_ask(model: Any) -> None:
    hidden, replica = states(model), Replica(model)
    hooks, layers = count_hooks(replica.model), BlockStates((0, 2, LAYERS))
    for _ in range(2):  # once more is once
        layers.install(blocks_of(replica.model))
    with torch.no_grad():
        replica.model(input_ids=IDS, use_cache=False)
        with layers.gathered() as gathered:
            assert gathered == {}
            replica.model(input_ids=IDS, use_cache=False)
        replica.model(input_ids=96 - IDS, use_cache=False)
    assert sorted(gathered) == [0, 2, LAYERS]
    for layer, state in gathered.items():
        assert distance(state, hidden[layer]) < ROUNDING
    assert count_hooks(replica.model) == hooks + 3
    layers.remove()
    assert count_hooks(replica.model) == hooks == count_hooks(model)


def count_hooks(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


def test_the_whole_model_is_untouched(model: Any) -> None:
    config, said = copy.deepcopy(model.config.to_dict()), generated(model)
    parts = [*model.modules()]
    short = first_layers(model, 2)
    with torch.no_grad():
        short(input_ids=IDS, use_cache=False)
    head_of(model)(torch.randn(3, 32))
    assert model.config.to_dict() == config
    assert [*model.modules()] == parts
    assert generated(model) == said
    assert short.config.num_hidden_layers == 2
    assert len(blocks_of(short)) == 2
    own = {id(weight) for weight in model.parameters()}
    assert {id(weight) for weight in short.parameters()} < own  # shared, none copied
    assert {id(buffer) for buffer in short.buffers()} <= {id(buffer) for buffer in model.buffers()}


def generated(model: Any) -> list[int]:
    """What transformers' own generate says; the mask of ones is for models that would guess one."""
    ids = model.generate(IDS[:1], attention_mask=torch.ones_like(IDS[:1]), max_new_tokens=12, do_sample=False)
    found: list[int] = ids[0].tolist()
    return found


@pytest.mark.parametrize("exit_layer", [1, 2, 3])
def test_early_layers_borrow_the_targets_cache(model: Any, exit_layer: int) -> None:
    """They feed behind what the target holds, and the target is none the worse for it."""
    target = Target(model, None, max_rows=3, chunk=8)
    early: Any = target.early_layers(exit_layer)
    texts = {0: IDS[0, :12].tolist(), 2: IDS[1, :3].tolist()}
    admit(target.runner, texts)
    admit(early, texts)
    parents = [[-1, -1, 1, 2]] * 2
    tokens = IDS[:, 16:].tolist()
    for _ in range(2):
        drafts = [torch.tensor(tokens), torch.tensor(parents)]
        got = early.extend(View(texts), drafts[0][:, :2], drafts[1][:, :2])
        got = torch.cat([got, early.extend(View(texts), drafts[0][:, 2:], drafts[1], 2)], dim=1)
        for row, text, drafted in zip(got, texts.values(), tokens, strict=True):
            check_tree(early.model, row, text, drafted, parents[0])
        whole = target.runner.extend(View(texts), *drafts)
        for row, text, drafted in zip(whole, texts.values(), tokens, strict=True):
            check_tree(model, row, text, drafted, parents[0])
        done = outcome({0: [1, 2], 2: []})
        target.runner.keep(done)
        early.keep(done)
        texts = {0: [*texts[0], *tokens[0][1:3], 5], 2: [*texts[2], 6]}
        assert early.held(0) == target.runner.held(0) == len(texts[0]) - 1
        assert early.held(2) == target.runner.held(2) == len(texts[2]) - 1


def test_chunks_that_the_target_was_fed_are_not_fed_again() -> None:
    """A borrower knows at once what the shared slots hold."""
    target = Target(tiny_model(layers=LAYERS), None, max_rows=1, chunk=4)
    early: Any = target.early_layers(2)
    text = {0: IDS[0].tolist()}
    admit(target.runner, text)
    admit(early, text)
    for _ in target.runner.prefill(View(text)):
        assert early.held(0) == target.runner.held(0)
    with counted(early.model) as calls:
        early.extend(View(text))
    assert len(calls) == 1


@pytest.mark.parametrize("exit_layer", [-1, 0, 4, 5])
def test_an_exit_that_is_none_names_those_there_are(exit_layer: int) -> None:
    """B06."""
    target = Target(tiny_model(layers=LAYERS), None, max_rows=1)
    with pytest.raises(
        InvalidParameter, match=f"layer={exit_layer} is no early exit of this target; use 1 to 3"
    ):
        target.early_layers(exit_layer)


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    model: Any = tiny_model(fresh=True)
    model.config.num_hidden_layers = 3
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM has no list of 3 layers"):
        first_layers(model, 1)


def test_the_layers_are_those_of_the_text_model() -> None:
    """A vision tower may have as many, and come first."""
    model: Any = tiny_model(fresh=True, layers=3)
    parts = dict(model._modules)
    model._modules.clear()
    model.vision = nn.ModuleList([nn.Identity() for _ in range(3)])
    model._modules.update(parts)
    assert blocks_of(model) == list(model.model.layers)
    with torch.no_grad():
        assert first_layers(model, 2)(input_ids=IDS, use_cache=False).logits.shape == (2, 20, 97)


@pytest.mark.parametrize("hooked", ["accelerate", "a bound method", "a compiled forward"])
def test_a_forward_that_hangs_on_the_model_is_not_the_short_ones(hooked: str) -> None:
    """`device_map` and `model.forward = torch.compile(model.forward)` leave the model itself in it."""
    model: Any = tiny_model(fresh=True, layers=LAYERS)
    expected = own_head(model, states(model)[1])
    if hooked == "accelerate":
        hooks = pytest.importorskip("accelerate.hooks")
        hooks.add_hook_to_module(model, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
        hooks.add_hook_to_module(model.model, hooks.AlignDevicesHook(execution_device="cpu"))
    elif hooked == "a bound method":
        model.forward = MethodType(type(model).forward, model)
    else:
        bound = model.forward
        model.forward = functools.wraps(bound)(lambda **arguments: bound(**arguments))
    with torch.no_grad():
        logits = first_layers(model, 1)(input_ids=IDS, use_cache=False).logits
        assert distance(logits, expected) < ROUNDING
        assert distance(head_of(model)(states(model)[LAYERS]), model(input_ids=IDS).logits) < ROUNDING
    said = base(model, IDS[0].tolist(), 16)
    assert SpecDecoder(model).generate(IDS[0].tolist(), greedy(16)).token_ids == said


def test_accelerates_hooks_work_for_the_short_model_too() -> None:
    """They may be what brings weights to the device."""
    hooks = pytest.importorskip("accelerate.hooks")
    seen: list[nn.Module] = []

    class Watch(hooks.ModelHook):  # type: ignore[misc, name-defined]
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(module)
            return args, kwargs

    model: Any = tiny_model(fresh=True, layers=LAYERS)
    hooks.add_hook_to_module(model.model, Watch())
    short: Any = first_layers(model, 2)
    with torch.no_grad():
        short(input_ids=IDS, use_cache=False)
    assert seen == [short.model]
    assert seen != [model.model]
