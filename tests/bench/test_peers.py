"""`benchmarks/peers.py`: contenders side by side, and one that is not installed is told and left out."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from specdec_core.demo import TARGET

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "peers.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(TARGET), "--limit", "1", "--repeats", "1", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.skipif(importlib.util.find_spec("economize") is not None, reason="economize is installed here")
def test_contenders_that_run_and_one_that_does_not(tmp_path: Path) -> None:
    output = tmp_path / "peers.jsonl"
    options = [
        "--contenders",
        "specdec@3",
        "hf",
        "economize",
        "--max-new-tokens",
        "8",
        "--output",
        str(output),
    ]
    done = run(*options)
    assert done.returncode == 1, done.stderr
    assert "economize failed: ModuleNotFoundError: No module named 'economize'" in done.stdout
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    found = {
        line["contender"]: line for line in lines if line["kind"] == "result" and line["category"] == "all"
    }
    assert list(found) == ["specdec@3", "hf"]
    assert all(line["same_ids"] == line["prompts"] == 6 for line in found.values())
    pairs = [line for line in lines if line["kind"] == "run" and line["category"] == "qa"]
    own, theirs = (next(line for line in pairs if line["contender"] == name) for name in found)
    [category] = [
        line
        for line in lines
        if line["kind"] == "result" and line["category"] == "qa" and line["contender"] == "hf"
    ]
    assert category["ratio"] == pytest.approx(theirs["seconds"] / own["seconds"])


@pytest.mark.parametrize("contender", ["nobody", "hf@3", "specdec@0", "specdec@"])
def test_what_is_no_contender_is_told(contender: str) -> None:
    spec = importlib.util.spec_from_file_location("peers_worker", SCRIPT.parent / "peers_worker.py")
    assert spec is not None
    assert spec.loader is not None
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    with pytest.raises(ValueError, match=f"{contender!r} is no contender"):
        worker.parse(contender)
