"""`benchmarks/gpu_check.py` on the CPU at tiny sizes: every step runs, and the report says what came out."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cli_support import make_model

from specdec_core.bench import cost

FOLDER = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="benchmarks are not part of this tree")


@pytest.fixture(scope="module", autouse=True)
def _on_path() -> Iterator[None]:
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


def module(name: str) -> ModuleType:
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory, _on_path: None) -> tuple[int, list[dict[str, Any]], str]:
    """One run: its status, its lines and its report."""
    out = tmp_path_factory.mktemp("gpu_check")
    options = ["--tiny", "--device", "cpu", "--out", str(out), "--modes", "graphs,eager", "--no-tests"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "_CYCLES", 1)
        status = module("gpu_check").main(options)
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return status, lines, (out / "report.md").read_text()


def of(done: Any, step: str) -> list[dict[str, Any]]:
    return [line for line in done[1] if line["step"] == step]


def rows_of(done: Any, what: str, mode: str = "graphs") -> dict[str, dict[str, Any]]:
    """Figures by method."""
    [report] = [x["report"] for x in of(done, "bench") if (x["what"], x["mode"]) == (what, mode)]
    return {row["method"]: row for row in report["results"][0]["categories"][0]["methods"]}


DRAFTERS = ("synthetic:chance=0.6", "synthetic:chance=0.9", "truncated", "another_shape")


def test_every_step_runs(done: Any) -> None:
    assert done[0] == 0, of(done, "failed")
    steps = Counter(line["step"] for line in done[1])
    assert steps == {"environment": 1, "bandwidth": 1, "model": 1, "bench": 6}
    benches = [(x["mode"], x["what"]) for x in of(done, "bench")]
    kinds = ("plain", "speculation", "batch", "far")
    assert benches == [*(("graphs", kind) for kind in kinds), ("eager", "plain"), ("eager", "speculation")]
    assert list(rows_of(done, "plain")) == ["none", "hf"]
    assert list(rows_of(done, "plain", "eager")) == ["none"]
    methods = [f"{name}@{k}" for k in (2, 4, 6) for name in DRAFTERS]
    assert list(rows_of(done, "speculation")) == ["none", *methods]
    eager = list(rows_of(done, "speculation", "eager"))
    assert eager == ["none", *(f"{name}@4" for name in DRAFTERS[:3])]


def test_all_say_the_same(done: Any) -> None:
    for what, mode in (("plain", "graphs"), ("speculation", "graphs"), ("speculation", "eager")):
        assert all(row["same_ids"] == row["prompts"] == 1 for row in rows_of(done, what, mode).values())


def test_forwards_run_as_they_should(done: Any) -> None:
    captures = {(x["mode"], x["report"]["settings"]["capture"]) for x in of(done, "bench")}
    assert captures == {("graphs", "fixed"), ("eager", "off")}  # there are no graphs on a CPU


def test_costs_are_measured_for_every_width(done: Any) -> None:
    found = {}
    for x in of(done, "bench")[:4]:  # those of captured forwards
        found |= {(x["what"], one["batch"], x["slots"]): one["widths"] for one in x["report"]["costs"]}
    widths = [1, 2, 3, 4, 5, 7, 8, 16, 64]
    wanted = [("plain", 1, 256), ("batch", 3, 256), ("far", 1, 512), ("far", 3, 512)]
    assert all([m for m, _, _ in found[key]] == widths for key in wanted)
    assert all(found[key][0][2] == 1 for key in wanted)


def test_acceptance_is_what_was_asked_for(done: Any) -> None:
    rows = rows_of(done, "speculation")
    for k in (2, 4, 6):
        for name in ("truncated", "another_shape"):  # made to agree with the target
            assert rows[f"{name}@{k}"]["acceptance_by_depth"][0] > 0.6  # all, but where a row ends
            assert rows[f"{name}@{k}"]["cost_per_token"] > 0
    rounds = [sum(rows[f"{name}@{k}"]["rounds"] for k in (2, 4, 6)) for name in DRAFTERS[:2]]
    assert rounds[0] > rounds[1]


def test_the_report_has_marks_and_tables(done: Any) -> None:
    report = done[2]
    for text in (
        "plain decoding with graphs at least 5x eager transformers: ",
        "- not measured: tiny: one host transfer a round: -",
        "blocks of 64 at most 1.25x the time of one token",
        "met: tiny: the draft cost c of small_model with captured steps is measured: truncated: ",
        "speculation within 10% of the formula",
        "| tiny | transformers generate | ",
        "## Cost of a block, t_v(m)",
        "| tiny | graphs | synthetic:chance=0.9@6 |",
    ):
        assert text in report


def test_real_checkpoints_take_the_same_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With their own text, vocabulary and draft."""
    monkeypatch.setattr(cost, "_CYCLES", 1)
    folder = tmp_path / "model"
    make_model(folder)
    options = ["--tiny", "--device", "cpu", "--modes", "graphs", "--no-tests", "--out", str(tmp_path / "out")]
    assert module("gpu_check").main([*options, "--target", str(folder), "--draft", str(folder)]) == 0
    lines = [json.loads(text) for text in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    [report] = [x["report"] for x in lines if x["step"] == "bench" and x["what"] == "speculation"]
    rows = {row["method"]: row for row in report["results"][0]["categories"][0]["methods"]}
    assert {name.partition("@")[0] for name in rows} == {"none", *DRAFTERS[:2], "checkpoint"}
    assert rows["checkpoint@4"]["acceptance_rate"] > 0.5  # it is the same model


def test_the_tests_for_a_gpu_are_found() -> None:
    names = {Path(file).name for file in module("gpu_check").files_with_gpu_tests()}
    assert {"test_on_gpu.py", "test_decoder.py", "test_rng.py"} <= names
    assert len(names) < 10


def test_the_synthetic_drafter_is_right_as_often_as_it_should() -> None:
    models = module("gpu_models")
    drafter = models.Synthetic(models.SyntheticConfig(num_tokens=8, chance=0.7))
    text = [1 + i % 997 for i in range(4000)]
    drafter._rows[0] = [*text]
    right = Counter[int]()
    for start in range(1, 3001):
        chain = drafter.propose_for(0, text[:start], 4)
        assert chain == drafter.propose_for(0, text[:start], 4)
        right.update(d for d in range(4) if chain[d] == text[start + d])
    assert all(abs(right[d] / 3000 - 0.7) < 0.04 for d in range(4))
    assert drafter.propose_for(0, [*text, 5], 2)[0] in (5, 4)  # nothing is known behind the text


@pytest.mark.parametrize(("name", "read"), [("0.6B", 1.19e9), ("1.7B", 3.44e9), ("8B", 15.1e9)])
def test_shapes_are_those_that_were_published(name: str, read: float) -> None:
    """By the bytes that a forward reads; nothing is allocated."""
    models = module("gpu_models")
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        model = Qwen3ForCausalLM(models.SHAPES[name].config()).to(torch.bfloat16)
    model.tie_weights()
    assert models.bytes_read(model) == pytest.approx(read, rel=0.01)
    assert sum(w.nbytes for w in model.parameters()) == pytest.approx(models.SHAPES[name].bytes, rel=0.01)


def bench(what: str, **report: Any) -> dict[str, Any]:
    """A line of the record."""
    parts: dict[str, Any] = {"results": [], "costs": [], "waits": []}
    return {
        "step": "bench",
        "model": "M",
        "mode": "graphs",
        "what": what,
        "slots": 512,
        "report": parts | report,
    }


def figures(method: str, **values: Any) -> dict[str, Any]:
    numbers = ("seconds", "prefill_seconds", "target_seconds", "draft_seconds", "tokens_per_round")
    row = {"method": method, "prompts": 1, "same_ids": 1, "widths": {"1": 10}, "decode_speedup": 1.0}
    return {**dict.fromkeys((*numbers, "verify_cost"), 1.0), **row, **values}


def section(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"batch": 1, "categories": [{"methods": list(rows)}]}]


@pytest.mark.parametrize("met", [True, False])
def test_marks(met: bool) -> None:
    report = module("gpu_report")
    plain = figures("none", decode_tokens_per_second=100.0 if met else 99.0)
    hf = figures("hf", decode_tokens_per_second=20.0, target_seconds=None)
    draft = {
        "decode_tokens_per_second": 150.0,
        "decode_speedup": 1.09 if met else 0.89,
        "predicted_speedup": 1.0,
        "cost_per_token": 0.25,
    }
    waits = [
        {"method": "none", "counts": [1, 1], "places": ["a.py:1 (2)"]},
        {"method": "x@2", "counts": [1, 1 if met else 2], "places": ["b.py:2 (3)"]},
    ]
    lines = [
        {"step": "model", "model": "M", "bytes_read": 1e9},
        {"step": "bandwidth", "copy_terabytes_a_second": 1.0},
        bench("far", costs=[{"batch": 1, "widths": [[1, 0.01, 1.0], [64, 0.09, 9.0]]}]) | {"slots": 4096},
        bench(
            "plain",
            results=section(plain, hf),
            costs=[
                {"batch": 1, "widths": [[1, 0.01, 1.0], [64, 0.0125, 1.25 if met else 1.26]]},
                {"batch": 16, "widths": [[1, 0.01, 1.0], [64, 0.09, 9.0]]},
            ],
            waits=waits[:1],
        ),
        bench("speculation", results=section(plain, figures("x@2", **draft)), waits=waits[1:]),
    ]
    found = report.marks(lines)
    assert [mark.met for mark in found] == [met, met, met, True, met]
    assert "x: 0.250" in found[3].figures
    assert ("b.py:2" in found[1].figures) is not met
    assert {mark.met for mark in report.marks(lines[:2])} == {None}
    text = report.markdown(lines)
    assert ("| M | graphs | 100.0 | 10.00 | 100.00 | 10% |" in text) is met
    assert "| M | graphs | x@2 | 150.0 | " in text
    assert "| M | graphs | none | [1, 1] | a.py:1 (2) |" in text


def test_a_step_that_fails_or_comes_too_late_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    check = module("gpu_check").Check(tmp_path, minutes=1)

    def work() -> None:
        check.note("model", model="M", bytes_read=1)
        raise RuntimeError("out of luck\nand more")

    assert not check.step("transfers M", 0, work)
    assert not check.step("long", 61, lambda: pytest.fail("there is no time for it"))
    written = [json.loads(text) for text in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [x["step"] for x in written] == ["model", "failed", "skipped"]
    assert written[1]["reason"] == "RuntimeError: out of luck"
    report = (tmp_path / "report.md").read_text()
    assert "| transfers M | failed | RuntimeError: out of luck |" in report
    assert "| long | left out | " in report
    assert " s left, about 61 s needed |" in report


def test_a_checkout_that_is_not_installed_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where nothing can be installed."""

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "before")
    module("gpu_check").make_known(tmp_path)
    site = str(tmp_path / "site")
    assert sys.path[-1] == site
    assert os.environ["PYTHONPATH"] == f"before{os.pathsep}{site}"
    (found,) = metadata.distributions(path=[site])
    assert found.metadata["Name"] == "specdec-core"
    points = {point.value for point in found.entry_points.select(group="specdec")}
    assert points == {"specdec_drafters", "specdec_verifiers"}


def test_the_shell_takes_wheels_and_passes_the_rest(tmp_path: Path) -> None:
    """pip is told to use the folder alone, and what it unpacks comes last but for what was there."""
    said = tmp_path / "said"
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\necho "$PYTHONPATH|$*" >> {said}\nmkdir -p "{tmp_path}/out/packages"\n')
    fake.chmod(0o755)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "a.whl").touch()
    environ = {**os.environ, "PYTHON": str(fake), "PYTHONPATH": "before"}
    command = [
        str(FOLDER / "gpu_check.sh"),
        "--wheels",
        str(wheels),
        "--out",
        f"{tmp_path}/out",
        "--minutes",
        "3",
    ]
    subprocess.run(command, env=environ, check=True, timeout=60)
    pip, run = said.read_text().splitlines()
    assert pip.endswith(f"--no-index --no-deps --upgrade --target {tmp_path}/out/packages {wheels}/a.whl")
    path, _, rest = run.partition("|")
    assert path.split(":")[-2:] == [f"{tmp_path}/out/packages", "before"]
    assert rest == f"{FOLDER}/gpu_check.py --out {tmp_path}/out --minutes 3"
