"""Decoders over one model in several threads: each as if it were alone, and the model stays as it is."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ROUNDING, View, admit, distance, random_tokens
from support import base, greedy
from torch import nn

from specdec_core import SpecDecoder
from specdec_core.model import grouped
from specdec_core.model.runner import Runner
from specdec_core.testing.models import tiny_model

PROMPT = [3, 4, 5, 6] * 4
NEW = 24


def together(*works: Callable[[], object]) -> None:
    """Run these beside each other; the first of them says how long, the others go on until it has ended."""
    problems: list[BaseException] = []
    ended = threading.Event()

    def run(work: Callable[[], object], leads: bool) -> None:
        try:
            while True:
                work()
                if leads or ended.is_set():
                    return
        except BaseException as problem:
            problems.append(problem)
        finally:
            if leads:
                ended.set()

    threads = [threading.Thread(target=run, args=(work, i == 0)) for i, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


def says(decoder: SpecDecoder, expected: list[int]) -> Callable[[], None]:
    def say() -> None:
        assert decoder.generate(PROMPT, greedy(NEW)).token_ids == expected

    return say


def several(times: int, work: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(times):
            work()

    return run


# --- nobody meets another's forward ----------------------------------------------------------------


def test_the_head_is_applied_beside_a_plain_decoder() -> None:
    """It was a hook on the target's first layer, and so what other threads' forwards returned there."""
    model: Any = tiny_model(attention="sdpa", fresh=True, layers=3)
    said = base(model, PROMPT, NEW)
    one, other = (SpecDecoder(model, drafter="none") for _ in range(2))
    states = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.lm_head(model.model.norm(states))

    def apply() -> None:
        assert distance(other.target.head(states), expected) < ROUNDING

    together(several(4, says(one, said)), apply)


def test_states_are_those_of_ones_own_forward() -> None:
    """Hooks on the model's layers saw every thread's."""
    model: Any = tiny_model(attention="sdpa", fresh=True, layers=3)
    rng = random.Random(0)
    texts = [random_tokens(rng, length) for length in (20, 30)]
    with torch.no_grad():
        expected = [model(torch.tensor([text]), output_hidden_states=True).hidden_states for text in texts]

    def gather(number: int) -> None:
        runner = Runner(model, hidden_layers=(0, 2), reuse_prefixes=False)
        for _ in range(10):
            admit(runner, {0: texts[number]})
            found = runner.forward(View({0: texts[number]})).hidden
            runner.release([0])
            for layer in (0, 2):
                assert distance(found[layer], expected[number][layer]) < ROUNDING

    together(several(4, lambda: gather(0)), lambda: gather(1))


def test_weights_that_are_brought_when_they_are_needed(tmp_path: Path) -> None:
    """Accelerate's hooks put them into the model, and so into another thread's."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model(fresh=True)
    said = base(model, PROMPT, NEW)
    places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places |= {"model.layers.0": "disk", "model.layers.1": "disk"}
    spread = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=tmp_path)
    assert spread.model.layers[0].mlp.up_proj.weight.is_meta
    decoders = [SpecDecoder(spread, drafter="none") for _ in range(2)]
    together(several(2, says(decoders[0], said)), says(decoders[1], said))
    assert spread.model.layers[0].mlp.up_proj.weight.is_meta


def test_hooks_of_accelerate_meet_one_thread_at_a_time() -> None:
    """They may move weights about; what they keep meanwhile is in the hook, which replicas share."""
    hooks = pytest.importorskip("accelerate.hooks")
    inside: list[int] = []
    most = [0]

    class Busy(hooks.ModelHook):  # type: ignore[misc, name-defined]
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inside.append(1)
            most[0] = max(most[0], len(inside))
            time.sleep(0.002)
            return args, kwargs

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            inside.pop()
            return output

    model = tiny_model(fresh=True)
    hooks.add_hook_to_module(model, Busy())
    decoders = [SpecDecoder(model, drafter=drafter) for drafter in ("none", "early_exit:layer=1")]
    said = base(model, PROMPT, NEW)
    together(says(decoders[0], said), says(decoders[1], said))
    assert most == [1]


# --- decoders are built beside one that runs -------------------------------------------------------


@pytest.mark.parametrize(("name", "window"), [("llama", None), ("qwen3", 8)])
def test_decoders_are_built_beside_one_that_generates(name: str, window: int | None) -> None:
    """It switched the attention and the windows of the running model; and found ours there for its own."""
    model: Any = tiny_model(name, window=window, attention="sdpa", fresh=True)
    said = base(model, PROMPT, NEW)
    decoder = SpecDecoder(model)

    def build() -> None:
        built = SpecDecoder(model, drafter="none")
        assert built.target.runner.plan.group == 2
        assert built.target.config._attn_implementation == grouped.NAME

    together(several(8, build), says(decoder, said))
    assert model.config._attn_implementation == "sdpa"


# --- nothing is changed ----------------------------------------------------------------------------


def everything(model: nn.Module) -> list[Any]:
    """All that a model is: its modules, what each holds, and its config."""
    found: list[Any] = []
    for module in model.modules():
        for name, value in vars(module).items():
            inside = [*value.items()] if isinstance(value, dict) else []
            found.append(
                (name, value if isinstance(value, bool) else id(value), *((k, id(v)) for k, v in inside))
            )
    config: Any = model.config
    return [*found, config.to_dict(), config._attn_implementation]


@pytest.fixture
def watched() -> tuple[Any, list[Any]]:
    """A model in training mode with windows, and what it was inside of each forward of anybody."""
    model: Any = tiny_model("qwen3", window=8, attention="sdpa", fresh=True, layers=3)
    seen: list[Any] = []
    model.model.layers[1].register_forward_hook(lambda *_: seen.append(everything(model)))
    model.train()
    model.model.norm.eval()
    return model, seen


@pytest.mark.parametrize("optimize", ["none", "fuse"])
@pytest.mark.parametrize("drafter", ["prompt_lookup", "early_exit:layer=1"])
def test_the_model_is_what_it_was_before_within_and_after(
    watched: tuple[Any, list[Any]], drafter: str, optimize: str
) -> None:
    """Attention, windows, mode, hooks and modules: while a decoder is built, while it runs, and later."""
    model, seen = watched
    before = everything(model)
    decoder = SpecDecoder(model, drafter=drafter, optimize=optimize)
    built = len(seen)
    decoder.target.runner.hidden_layers = (1,)
    decoder.generate(PROMPT, greedy(NEW))
    hidden = torch.randn(2, 32)
    decoder.target.head(hidden)
    decoder.target.final_norm(hidden)
    assert len(seen) > built > 0
    assert all(state == before for state in seen)
    assert everything(model) == before
    del decoder
    assert everything(model) == before
