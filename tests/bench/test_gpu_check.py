"""`benchmarks/gpu_check.py` on the CPU at tiny sizes: every step runs, and the report says what came out."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cli_support import make_model

from specdec_core import RowDrafter, RowDrafterConfig, SpecDecoder
from specdec_core.testing.models import tiny_model

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
    status = module("gpu_check").main(options)
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    return status, lines, (out / "report.md").read_text()


def of(done: Any, step: str) -> list[dict[str, Any]]:
    return [line for line in done[1] if line["step"] == step]


def test_every_step_runs(done: Any) -> None:
    assert done[0] == 0, of(done, "failed")
    steps = Counter(line["step"] for line in done[1])
    assert steps == {"environment": 1, "bandwidth": 1, "plain": 2, "hf": 1, "cost": 4, "speculation": 15}
    assert of(done, "hf")[0]["same_text_as_ours"] is True
    assert all(line["same_text"] for line in of(done, "speculation"))
    assert {(x["mode"], x["drafter"], x["k"]) for x in of(done, "speculation")} == {
        *(("graphs", f"synthetic {chance}", k) for chance in (0.6, 0.9) for k in (2, 4, 6)),
        *(("graphs", f"small_model {name}", k) for name in ("truncated", "tiny-draft") for k in (2, 4, 6)),
        *(("eager", name, 4) for name in ("synthetic 0.6", "synthetic 0.9", "small_model truncated")),
    }


def test_costs_are_measured_for_every_width(done: Any) -> None:
    costs = of(done, "cost")
    assert {(x["batch"], x["slots"]) for x in costs} == {(1, 256), (3, 256), (1, 512), (3, 512)}
    for line in costs:
        assert set(line["ms"]) == {"1", "2", "3", "4", "5", "7", "8", "16", "64"}
        assert line["ratio"]["1"] == 1


def test_acceptance_is_what_was_asked_for(done: Any) -> None:
    for line in of(done, "speculation"):
        if line["drafter"].startswith("small_model"):  # made to agree with the target
            assert line["acceptance_by_depth"][0] > 0.6  # all, but where a row ends
        assert line["tokens_per_round"] == pytest.approx(1 + sum(line["acceptance_by_depth"]))
        assert line["c"] > 0
    by_chance = {
        (x["drafter"], x["k"]): x["tokens_per_round"]
        for x in of(done, "speculation")
        if x["mode"] == "graphs"
    }
    assert all(by_chance["synthetic 0.6", k] < by_chance["synthetic 0.9", k] for k in (2, 4, 6))


def test_the_report_has_marks_and_tables(done: Any) -> None:
    report = done[2]
    for text in (
        "plain decoding with graphs at least 5x eager transformers: ",
        "- not measured: tiny: one host transfer a round: -",
        "blocks of 64 at most 1.25x the time of one token",
        "speculation within 10% of the formula",
        "## Cost of a block, t_v(m)",
        "| tiny | graphs | synthetic 0.9 | 6 |",
    ):
        assert text in report


def test_real_checkpoints_take_the_same_way(tmp_path: Path) -> None:
    """With their own text, vocabulary and draft."""
    folder = tmp_path / "model"
    make_model(folder)
    options = ["--tiny", "--device", "cpu", "--modes", "graphs", "--no-tests", "--out", str(tmp_path / "out")]
    assert module("gpu_check").main([*options, "--target", str(folder), "--draft", str(folder)]) == 0
    lines = [json.loads(text) for text in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    drafted = {x["drafter"] for x in lines if x["step"] == "speculation"}
    assert drafted == {"synthetic 0.6", "synthetic 0.9", f"small_model {folder}"}


def test_the_tests_for_a_gpu_are_found() -> None:
    names = {Path(file).name for file in module("gpu_check").files_with_gpu_tests()}
    assert {"test_on_gpu.py", "test_decoder.py", "test_rng.py"} <= names
    assert len(names) < 10


def test_the_synthetic_drafter_is_right_as_often_as_it_should() -> None:
    models = module("gpu_models")
    config = models.SyntheticConfig(num_tokens=8, vocab_size=1000)
    text = [i % 997 for i in range(4000)]
    drafter = models.Synthetic(config)
    drafter.learn(text[:1], text[1:])
    drafter._rows[0] = [*text]
    drafter.chance = 0.7
    right = Counter[int]()
    for start in range(1, 3001):
        chain = drafter.propose_for(0, text[:start], 4)
        assert chain == drafter.propose_for(0, text[:start], 4)
        right.update(d for d in range(4) if chain[d] == text[start + d])
    assert all(abs(right[d] / 3000 - 0.7) < 0.04 for d in range(4))
    assert drafter.propose_for(0, [*text, 5], 2)[0] in (5, 6)  # nothing is known behind the text


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


def test_waits_are_counted_by_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA warns of them; those of the prompt's round, and of setting the mode, are left out."""
    modes: list[Any] = []

    def set_mode(mode: Any) -> None:
        modes.append(mode)
        warnings.warn("does not detect all synchronizing operations", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)

    class Waiting(RowDrafter):
        name = "waiting"

        def propose_row(self, tokens: Sequence[int], budget: int) -> list[int]:
            for _ in range(len(tokens) % 3):
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            return []

    decoder = SpecDecoder(tiny_model(), drafter=Waiting(RowDrafterConfig(num_tokens=2)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts, places = module("gpu_measure").transfers_a_round(decoder, [1, 2, 3, 4], 20)
    assert counts == [2, 0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert modes == ["warn", 0]
    assert len(places) == 1
    assert places[0].startswith(__file__)


def line(step: str, **values: Any) -> dict[str, Any]:
    return {"step": step, "model": "M", "mode": "graphs", **values}


@pytest.mark.parametrize("met", [True, False])
def test_marks(met: bool) -> None:
    report = module("gpu_report")
    lines = [
        line("plain", rate=100.0 if met else 99.0),
        line("hf", rate=20.0),
        line("transfers", drafter="none", transfers_a_round=1.0, counts=[1, 1], places=["a.py:1 (2)"]),
        line("transfers", drafter="x", transfers_a_round=1.5, counts=[1, 1 if met else 2], places=["b.py:2"]),
        line("cost", batch=1, slots=4096, ratio={"64": 9.0}),
        line("cost", batch=1, slots=512, ratio={"64": 1.25 if met else 1.26}),
        line("cost", batch=16, slots=512, ratio={"64": 9.0}),
        line(
            "speculation",
            drafter="small_model x",
            k=2,
            c=0.25,
            measured_over_predicted=1.09 if met else 0.89,
            plain_rate=1,
        ),
    ]
    found = report.marks(lines)
    assert [mark.met for mark in found] == [met, met, met, True, met]
    assert "0.250" in found[3].figures
    assert ("b.py:2" in found[1].figures) is not met
    assert {mark.met for mark in report.marks([line("environment")])} == {None}


def test_a_step_that_fails_or_comes_too_late_is_told_and_the_rest_goes_on(tmp_path: Path) -> None:
    check = module("gpu_check").Check(tmp_path, minutes=1)

    def lines() -> Iterator[dict[str, Any]]:
        yield {"drafter": "x", "transfers_a_round": 1.0, "counts": [1], "places": []}
        raise RuntimeError("out of luck\nand more")

    assert not check.measure("transfers", 0, lines, model="M")
    assert not check.step("long", 61, lambda: pytest.fail("there is no time for it"))
    written = [json.loads(text) for text in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [x["step"] for x in written] == ["transfers", "failed", "skipped"]
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
