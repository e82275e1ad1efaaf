"""The probe: what a model that fails it may still do, that it finds faults, and that it finds no others."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from harness import View, admit, check_tree, known, random_tokens
from packaging.version import Version
from support import ScriptedDrafter, base, greedy, planted

from specdec_core import IncompatiblePair, SpecDecoder, UnsupportedModel
from specdec_core.engine.target import Target
from specdec_core.model.probe import probe
from specdec_core.model.runner import Runner
from specdec_core.testing.models import tiny_model

Forward = Callable[..., Any]
takes_masks = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.2"), reason="mpt refuses a 4D mask, and so is refused"
)


def patched(change: Callable[[Forward, dict[str, Any]], Any], name: str = "llama", **options: Any) -> Any:
    """A model whose forward is changed: `change(forward, arguments)`."""
    model = tiny_model(name, fresh=True, **options)
    forward = model.forward

    @functools.wraps(forward)
    def changed(**arguments: Any) -> Any:
        return change(forward, arguments)

    model.forward = changed  # type: ignore[method-assign]
    return model


# --- positions from slots --------------------------------------------------------------------------


@takes_masks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_positions_from_slots_leave_chains_only(dtype: torch.dtype) -> None:
    """B77: ALiBi over slots. In half precision too, where rounding must not hide it."""
    target = Target(tiny_model("mpt", dtype=dtype), None, max_rows=2)
    assert not target.probed.trees
    assert "differ from a plain pass" in target.probed.reason


@takes_masks
def test_a_tree_drafter_and_a_chains_only_target_do_not_fit() -> None:
    trees = ScriptedDrafter(lambda ask: [], depth=2, nodes=4, trees=True)
    with pytest.raises(
        IncompatiblePair, match="'scripted' drafts trees, and mpt can check chains only: logits"
    ):
        SpecDecoder(tiny_model("mpt"), drafter=trees, draft_tokens=None)


@takes_masks
def test_chains_of_a_chains_only_target_are_right_in_a_ragged_batch() -> None:
    model = tiny_model("mpt")
    rng = random.Random(0)
    prompts = [random_tokens(rng, length) for length in (1, 3, 9, 30)]
    ahead = known(*([*prompt, *base(model, prompt, 40)] for prompt in prompts))
    chain = planted([-1, 0, 1, 2], [0, 1, 2], ahead)  # three right, one wrong
    drafter = ScriptedDrafter(chain, depth=4)
    decoder = SpecDecoder(
        model, drafter=drafter, max_batch=3, strict=True, prefill_chunk=8, draft_tokens=None
    )
    results = decoder.generate(prompts, greedy(20))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == base(model, prompt, 20)
    assert any(result.stats.accepted_tokens > 10 for result in results)


# --- windows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "cohere"])
def test_a_window_that_the_model_does_not_heed_is_not_applied(name: str) -> None:
    """A config may name a window that its architecture knows nothing of."""
    model = tiny_model(name, sliding_window=4, use_sliding_window=True)
    target = Target(model, None, max_rows=1)
    assert target.runner.plan.distinct == (None,)
    text = random_tokens(random.Random(1), 20)
    admit(target.runner, {0: text})
    parents = [-1, -1, 1]
    logits = target.runner.extend(View({0: text}), torch.tensor([[5, 6, 7]]), torch.tensor([parents]))
    check_tree(model, logits[0], text, [5, 6, 7], parents)
    early = target.early_layers(1)
    assert early.plan.distinct == (None,)  # type: ignore[attr-defined]


@pytest.mark.parametrize("window", [8, 4096])
def test_a_window_that_the_model_heeds_is_applied_however_long_it_is(window: int) -> None:
    model = tiny_model("mistral", window=window)
    target = Target(model, None, max_rows=1)
    assert target.runner.plan.distinct == (window,)
    assert model.config.sliding_window == window


def test_a_window_that_cannot_be_checked_is_refused() -> None:
    """It is a part of the model, not only of its config, and may be of another meaning."""
    model: Any = tiny_model("llama", fresh=True, sliding_window=4096)
    model.model.layers[0].self_attn.sliding_window = 4096
    with pytest.raises(UnsupportedModel, match=r"llama cannot be checked in blocks: .*its windows"):
        SpecDecoder(model)
    assert model.config.sliding_window == 4096


def test_a_window_of_another_meaning_is_found() -> None:
    """One position more or less than its config says: prompts of the probe reach beyond a small window."""

    def wider(forward: Forward, arguments: dict[str, Any]) -> Any:
        plain = "attention_mask" not in arguments
        model.config.sliding_window += plain
        try:
            return forward(**arguments)
        finally:
            model.config.sliding_window -= plain

    model = patched(wider, "mistral", window=4096)
    model.model.layers[0].self_attn.sliding_window = 4096
    with pytest.raises(UnsupportedModel, match="its windows"):
        probe(Runner(model))


# --- faults ----------------------------------------------------------------------------------------


def test_forgotten_positions_are_found() -> None:
    def forget(forward: Forward, arguments: dict[str, Any]) -> Any:
        return forward(**arguments | {"position_ids": None})

    with pytest.raises(UnsupportedModel, match="differ from a plain pass"):
        probe(Runner(patched(forget)))


def test_a_forgotten_mask_is_found() -> None:
    def forget(forward: Forward, arguments: dict[str, Any]) -> Any:
        return forward(**arguments | {"attention_mask": None})

    with pytest.raises(UnsupportedModel, match="cannot be checked in blocks"):
        probe(Runner(patched(forget)))


def test_a_raising_forward_counts_as_failed() -> None:
    def fail(forward: Forward, arguments: dict[str, Any]) -> Any:
        if "attention_mask" in arguments:
            raise NotImplementedError("no masks here")
        return forward(**arguments)

    with pytest.raises(UnsupportedModel, match="raised NotImplementedError: no masks here"):
        probe(Runner(patched(fail)))


def test_nan_is_found() -> None:
    def spoil(forward: Forward, arguments: dict[str, Any]) -> Any:
        output = forward(**arguments)
        if "attention_mask" in arguments:
            output.logits[:, 0, 3] = float("nan")
        return output

    with pytest.raises(UnsupportedModel, match="by inf of their spread"):
        probe(Runner(patched(spoil)))


def test_a_fault_that_needs_a_filled_cache_is_found() -> None:
    """Such as a model that reads the cache by itself, a little: the first block of a row would be right."""

    def drift(forward: Forward, arguments: dict[str, Any]) -> Any:
        output = forward(**arguments)
        positions = arguments.get("position_ids")
        if positions is not None and positions.max() > 4 and arguments["input_ids"].shape[1] > 5:
            output = SimpleNamespace(logits=output.logits * 1.001)
        return output

    model = patched(drift)
    with pytest.raises(UnsupportedModel, match=r"differ from a plain pass by 0\.00"):
        probe(Runner(model))


# --- no false alarms -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_sound_models_pass_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    assert probe(Runner(tiny_model(name, dtype=dtype))).trees


@pytest.mark.parametrize(("dtype", "noise"), [(torch.float32, 5e-4), (torch.bfloat16, 0.02)])
def test_rounding_that_depends_on_sizes_is_no_fault(dtype: torch.dtype, noise: float) -> None:
    """As on a GPU with TF32 matrix products: no two passes agree further than their rounding."""
    generator = torch.Generator().manual_seed(0)

    def blur(forward: Forward, arguments: dict[str, Any]) -> Any:
        logits = forward(**arguments).logits
        blurred = torch.randn(logits.shape, generator=generator).to(dtype) * noise * logits.std()
        return SimpleNamespace(logits=logits + blurred)

    assert probe(Runner(patched(blur, dtype=dtype))).trees


def test_the_probe_leaves_nothing_behind() -> None:
    model = tiny_model("gemma2", window=8)
    before = model.config.to_dict()
    runner = Runner(model)
    probe(runner)
    assert model.config.to_dict() == before
    assert (runner.cache.places, len(runner.cache)) == (0, 0)
