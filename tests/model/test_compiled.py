"""Compiled forwards: the same text from few graphs, and a way on where nothing can be compiled."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import known
from support import ScriptedDrafter, base, greedy, planted
from tiny import tiny_model

from specdec_core import SpecDecoder
from specdec_core import target as target_module
from specdec_core.model import compiled as module
from specdec_core.model.compiled import Compiled, keep_on_disk, why_not_compiled

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


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("optimize", ["compile", "fuse,compile"])
def test_text_is_the_same_and_graphs_are_few(traced: None, optimize: str) -> None:
    model = tiny_model("llama")
    said = base(model, PROMPT, 40)
    drafter = tree_drafter(said) if optimize == "compile" else "prompt_lookup"
    decoder = SpecDecoder(model, drafter=drafter, strict=True, optimize=optimize)
    known_graphs = module._graphs()
    for length in (24, 9, 30):  # blocks of other widths
        assert decoder.generate(PROMPT, greedy(length)).token_ids == said[:length]
    compiled: Any = decoder.target.runner.compiled
    assert compiled.works
    assert 0 < module._graphs() - known_graphs <= 4


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
    assert module._graphs() - known_graphs <= 4


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
