"""`benchmarks/peers.py` and `benchmarks/batch_equality.py`: what is no peer is told; ids by batch size."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specdec_core.bench.record import Record

FOLDER = Path(__file__).parents[2] / "benchmarks"
JOB = {"target": "x", "revision": None, "device": "cpu", "dtype": "float32", "threads": 1}
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="benchmarks are not part of this tree")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def told(peer: str) -> tuple[int, dict[str, Any]]:
    """What a peer says to a job."""
    command = [sys.executable, str(FOLDER / "peers.py"), peer]
    done = subprocess.run(
        command, input=json.dumps(JOB), capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.skipif(importlib.util.find_spec("economize") is not None, reason="economize is installed here")
def test_a_peer_that_is_not_installed_is_told() -> None:
    assert told("economize@3") == (1, {"error": "ModuleNotFoundError: No module named 'economize'"})


def test_what_is_no_peer_is_told() -> None:
    code, answer = told("nobody")
    assert code == 1
    assert answer["error"].startswith("ValueError: 'nobody' is no peer; use economize, flashspec")


@pytest.mark.parametrize("peer", ["economize@0", "economize@", "flashspec@x", "hf@3"])
def test_lengths_are_checked(peer: str) -> None:
    with pytest.raises(ValueError, match=f"{peer!r} is no peer"):
        script("peers").parse(peer)


def test_lengths() -> None:
    assert script("peers").parse("economize@3") == ("economize", 3)
    assert script("peers").parse("flashspec") == ("flashspec", None)


# --- batches --------------------------------------------------------------------------------------


def record_of(file: Path, **changed: list[int]) -> str:
    """Two prompts alone and together, twice; at batch 4 with copies, which say something else."""
    ids = {"p1": [1, 2], "p2": [3]}
    record = Record(str(file))
    for repeat in (1, 2):
        for batch, groups in ((1, [["p1"], ["p2"]]), (2, [["p1", "p2"]]), (4, [["p1", "p2"] * 2])):
            for group in groups:
                said = [ids[name] for name in group[:2]] + [[9]] * (len(group) - 2)
                if batch == 2 and repeat == 2:
                    said = [changed.get(name, row) for name, row in zip(group, said, strict=True)]
                run = {"seconds": 1.0, "token_ids": said, "forwards": 1}
                record.add(
                    "unit", batch=batch, temperature=0.0, repeat=repeat, prompts=group, runs={"none": run}
                )
    return str(file)


def test_rows_that_say_what_they_say_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script("batch_equality").main(record_of(tmp_path / "same.jsonl")) == 0
    assert json.loads(capsys.readouterr().out) == {"method": "none", "different": []}


def test_a_row_that_says_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script("batch_equality").main(record_of(tmp_path / "other.jsonl", p2=[4])) == 1
    found = json.loads(capsys.readouterr().out)["different"]
    assert found == ["p2 at batch 2, repeat 2, temperature 0"]
