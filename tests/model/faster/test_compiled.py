"""Compiled forwards: the same text from few graphs, and a way on where nothing can be compiled."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ROUNDING, View, admit, distance, known
from support import ScriptedDrafter, base, greedy, planted

from specdec_core import SpecDecoder
from specdec_core.engine import target as target_module
from specdec_core.model.faster import compiled as module
from specdec_core.model.faster.compiled import Compiled, keep_on_disk, why_not_compiled
from specdec_core.model.faster.packed import why_not_packed
from specdec_core.model.graphs import Capture
from specdec_core.model.runner import Runner
from specdec_core.testing.models import tiny_model

PROMPT = [3, 4, 5, 6] * 4


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Start without compiled graphs, and leave no trace in the user's folders."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace forwards as compiling does, and run what was traced as it is: quick, and needs no compiler."""
    monkeypatch.setattr(target_module, "why_not_compiled", lambda device: "")
    monkeypatch.setattr(target_module, "Compiled", lambda model: Compiled(model, backend="eager"))


def tree_drafter(said: list[int]) -> ScriptedDrafter:
    tree = planted([-1, -1, 1, 1, 3], [1, 3, 4], known([*PROMPT, *said]))
    return ScriptedDrafter(tree, depth=3, nodes=5, trees=True)


def test_the_seconds_of_compiling_are_no_cost_of_a_round(
    traced: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing would be drafted any more, once a draft was compiled for."""

    def slow(graph: Any, inputs: Any) -> Any:
        time.sleep(0.5)
        return graph.forward

    monkeypatch.setattr(target_module, "Compiled", lambda model: Compiled(model, backend=slow))  # type: ignore[arg-type]
    model = tiny_model("llama")
    decoder = SpecDecoder(
        model, drafter="prompt_lookup", draft_tokens="auto", optimize="compile", strict=True
    )
    for _ in range(2):
        assert decoder.generate(PROMPT, greedy(40)).token_ids == base(model, PROMPT, 40)
    length: Any = decoder.session._length
    line = length._costs.line("greedy", 1)
    assert line(0) < 0.25
    assert line(4) < 0.25


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("optimize", ["compile", "fuse,compile", "pack,fuse,compile"])
def test_text_is_the_same_and_graphs_are_few(traced: None, optimize: str) -> None:
    model = tiny_model("llama")
    said = base(model, PROMPT, 40)
    drafter = tree_drafter(said) if optimize == "compile" else "prompt_lookup"
    decoder = SpecDecoder(model, drafter=drafter, strict=True, optimize=optimize, draft_tokens=None)
    known_graphs = module._graphs()
    for length in (24, 9, 30):  # blocks of other widths
        assert decoder.generate(PROMPT, greedy(length)).token_ids == said[:length]
    compiled: Any = decoder.target.runner.compiled
    assert compiled.works
    assert 0 < module._graphs() - known_graphs <= 2


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(why_not_packed("cpu", torch.float32)), reason="oneDNN is not here")
def test_packed_weights_are_traced_as_one_call_each(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def watched(graph: Any, inputs: Any) -> Any:
        calls.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return aot_eager(graph, inputs)

    aot_eager = torch._dynamo.lookup_backend("aot_eager")
    monkeypatch.setattr(target_module, "why_not_compiled", lambda device: "")
    monkeypatch.setattr(target_module, "Compiled", lambda model: Compiled(model, backend=watched))  # type: ignore[arg-type]
    model = tiny_model("llama")
    decoder = SpecDecoder(model, drafter="none", strict=True, optimize="pack,fuse,compile")
    counters, known_graphs = torch._dynamo.utils.counters, module._graphs()
    breaks = sum(counters["graph_break"].values())
    assert decoder.generate(PROMPT, greedy(8)).token_ids == base(model, PROMPT, 8)
    assert module._graphs() == known_graphs + 1
    assert sum(counters["graph_break"].values()) == breaks
    layers = model.config.num_hidden_layers
    assert sum("packed_linear" in call for call in calls) == 4 * layers + 1  # qkv, o, gate and up, down; head
    assert not any(call.endswith("linear") and "packed" not in call for call in calls)


@pytest.mark.filterwarnings("default")
def test_states_are_gathered_in_compiled_forwards_too() -> None:
    """Hooks are there once, and traced; other layers are another graph."""
    model = tiny_model("llama", layers=3)
    plain, fast = Runner(model), Runner(model, capture=Capture.FIXED)
    fast.compiled = Compiled(fast.model, backend="eager")
    counters, known_graphs = torch._dynamo.utils.counters, module._graphs()
    breaks, text = sum(counters["graph_break"].values()), [3, 4, 5] * 4
    for runner in (plain, fast):
        admit(runner, {0: text})
    for layers in ((0, 2), (1, 3)):
        plain.hidden_layers = fast.hidden_layers = layers
        for token in (5, 7, 9):
            expected, found = (runner.forward(View({0: text})) for runner in (plain, fast))
            assert distance(found.logits.whole, expected.logits.whole) < ROUNDING
            for layer in layers:
                assert distance(found.hidden[layer][:, -1], expected.hidden[layer][:, -1]) < ROUNDING
            text.append(token)
    assert fast.compiled.works
    assert module._graphs() - known_graphs == 2
    assert sum(counters["graph_break"].values()) == breaks


class Scaled(torch.nn.Module):
    def __init__(self, scale: int) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Named(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


@pytest.mark.filterwarnings("default")
def test_models_of_one_class_are_told_apart_and_changes_are_seen_when_told() -> None:
    outer = torch.nn.Sequential(Scaled(2))
    models = [Compiled(one, backend="eager") for one in (Named(outer), Named(torch.nn.Sequential(Scaled(3))))]
    x = torch.ones(2)
    assert [float(one(x=x)[0]) for one in models * 2] == [2, 3, 2, 3]
    outer[0] = Scaled(5)
    models[0].check()
    assert float(models[0](x=x)[0]) == 5


@pytest.mark.filterwarnings("default")
def test_written_weights_are_seen_and_another_module_starts_anew(traced: None) -> None:
    model = tiny_model("llama", fresh=True)
    decoder = SpecDecoder(model, drafter="none", strict=True, optimize="fuse,compile")
    decoder.generate(PROMPT, greedy(4))
    compiled: Any = decoder.target.runner.compiled
    known = compiled._compiled
    with torch.no_grad():
        model.model.norm.weight.mul_(-1)
    assert decoder.generate(PROMPT, greedy(8)).token_ids == base(model, PROMPT, 8)
    assert compiled._compiled is known
    model.model.norm = decoder.target.model.model.norm = torch.nn.LayerNorm(model.config.hidden_size)
    said = SpecDecoder(model, drafter="none").generate(PROMPT, greedy(8)).token_ids
    assert decoder.generate(PROMPT, greedy(8)).token_ids == said
    assert compiled._compiled is not known


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_longer_view_is_no_new_graph_each_time(traced: None) -> None:
    model = tiny_model("llama", context=2048)
    decoder = SpecDecoder(model, drafter="none", optimize="compile")
    known_graphs = module._graphs()
    for length in (200, 300, 600, 900, 1200, 1500, 1800):
        decoder.generate([(7 * i) % 97 for i in range(length)], greedy(3, ignore_eos=True))
    compiled: Any = decoder.target.runner.compiled
    assert compiled.works
    assert module._graphs() - known_graphs == 1


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    assert "no C++ compiler is here (g++" in why_not_compiled(torch.device("cpu"))
    model = tiny_model("llama")
    with caplog.at_level(logging.WARNING, "specdec"):
        decoder = SpecDecoder(model, optimize="compile")
    [record] = caplog.records
    assert record.getMessage().startswith("optimize=compile has no effect here: no C++ compiler")
    assert decoder.target.runner.compiled is None
    assert decoder.generate(PROMPT, greedy(8)).token_ids == base(model, PROMPT, 8)


def test_a_named_compiler_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda name: name if name == "icpx" else None)
    monkeypatch.setenv("CXX", "icpx")
    assert why_not_compiled(torch.device("cpu")) == ""
    monkeypatch.setenv("CXX", "absent")
    assert "(absent)" in why_not_compiled(torch.device("cpu"))


@pytest.mark.filterwarnings("default")
def test_a_failure_is_told_once_and_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("this backend is broken")

    monkeypatch.setattr(target_module, "why_not_compiled", lambda device: "")
    monkeypatch.setattr(target_module, "Compiled", lambda model: Compiled(model, backend=broken))  # type: ignore[arg-type]
    model = tiny_model("llama")
    decoder = SpecDecoder(model, drafter="none", strict=True, optimize="compile")
    with caplog.at_level(logging.WARNING, "specdec"):
        assert decoder.generate(PROMPT, greedy(8)).token_ids == base(model, PROMPT, 8)
    announced, failed = [record.getMessage() for record in caplog.records]
    assert announced.startswith("compiling the forward of LlamaForCausalLM, which may take minutes")
    assert "cannot be compiled and runs as it is" in failed
    assert "this backend is broken" in failed
    assert "\n" not in failed


def test_what_is_compiled_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_on_disk()
    assert module.os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path), "the user's choice"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    keep_on_disk()
    assert module.os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "specdec" / "inductor")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(bool(why_not_compiled(torch.device("cpu"))), reason="no compiler is here")
def test_inductor() -> None:
    model = tiny_model("llama")
    decoder = SpecDecoder(model, drafter="prompt_lookup", strict=True, optimize="compile")
    assert decoder.generate(PROMPT, greedy(24)).token_ids == base(model, PROMPT, 24)
    compiled: Any = decoder.target.runner.compiled
    assert compiled.works
