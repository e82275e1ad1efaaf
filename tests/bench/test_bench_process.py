"""Programs as methods of a bench: what they are asked, what becomes of their answers, how they may fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cli_support
import pytest
from cli_support import cli, error_of, objects

model = cli_support.model

PROGRAM = """
import json, sys
log = open(sys.argv[1], "a")
way = sys.argv[2]

def told():
    line = sys.stdin.readline()
    log.write(line)
    log.flush()
    return json.loads(line) if line else None

def answer(**values):
    print(json.dumps(values), flush=True)

told()
if way == "ends":
    sys.exit("out of luck")
answer(error="no such model") if way == "refuses" else answer(versions={"peer": "1.2"}, max_batch=1)
while (call := told()) is not None:
    if way == "fails":
        answer(error="RuntimeError: half way")
    elif way == "talks":
        print("hello", flush=True)
    else:
        [ids] = call["prompts"]
        count = call["max_new_tokens"]
        answer(token_ids=[[(ids[-1] + i + 1) % 256 for i in range(count)]])
"""


class Peer:
    """The program in a file, and what it was told."""

    def __init__(self, folder: Path, model: str) -> None:
        self.file, self.log, self._model = folder / "peer program.py", folder / "told.jsonl", model
        self.file.write_text(PROGRAM)
        questions = [
            {"question_id": i, "category": "c", "turns": [[64, 65, 64 + i]]} for i in range(2)
        ]  # letters
        self.questions = folder / "questions.jsonl"
        self.questions.write_text("\n".join(map(json.dumps, questions)))

    def bench(self, way: str = "", *more: str) -> list[str]:
        command = f"process:peer={sys.executable} '{self.file}' {self.log} '{way}'"
        fixed = ["--target", self._model, "--device", "cpu", "-n", "4", "--ignore-eos"]
        return ["bench", *fixed, "--questions", str(self.questions), "-m", command, *more]

    def told(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@pytest.fixture
def peer(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> Peer:
    monkeypatch.setattr("specdec_core.bench.cost._CYCLES", 1)
    return Peer(tmp_path, model)


def test_a_program_is_measured_beside_the_others(peer: Peer, model: str) -> None:
    report = objects(*peer.bench("", "--batch-size", "1,2", "-m", "hf"))
    rows = {row["method"]: row for row in report["results"][0]["categories"][0]["methods"]}
    assert list(rows) == ["none", "process:peer", "hf"]
    own = rows["process:peer"]
    assert (own["prompts"], own["new_tokens"], own["same_ids"]) == (2, 8, 2)
    assert own["speedup"] > 0
    assert own["tokens_per_second"] == pytest.approx(8 / own["seconds"])
    unknown = ("forwards", "acceptance_rate", "mean_drafted", "decode_tokens_per_second", "decode_speedup")
    assert [own[name] for name in unknown] == [None] * len(unknown)
    assert "predicted_speedup" not in own
    assert report["skipped"] == {"process:peer at batch 2": "it takes 1 prompt at a time"}
    settings = report["settings"]
    assert settings["process:peer"] == {"peer": "1.2"}
    assert [name for name in settings["methods"] if "peer program.py" in name]
    jobs = [told for told in peer.told() if "target" in told]
    calls = [told for told in peer.told() if "prompts" in told]
    assert len(jobs) == 1 + 3  # and anew for each repeat
    assert all(
        job == {**jobs[0], "target": model, "revision": None, "device": "cpu", "dtype": "float32"}
        for job in jobs
    )
    assert len(calls) == 2 + 3 * (1 + 2)  # each time warmed up
    assert {tuple(call["prompts"][0]) for call in calls} == {(64, 65, 64), (64, 65, 65)}
    assert all(call["eos_token_ids"] == [] and call["temperature"] == 0 for call in calls)


def test_a_version_that_changed_is_another_measurement(peer: Peer, tmp_path: Path) -> None:
    output = str(tmp_path / "out.jsonl")
    objects(*peer.bench("", "--output", output))
    peer.file.write_text(PROGRAM.replace("1.2", "1.3"))
    said = error_of(*peer.bench("", "--output", output))
    assert 'was measured with process:peer {"peer": "1.2"}, and now it is {"peer": "1.3"}' in said


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("refuses", "process:peer: no such model"),
        ("ends", "process:peer ended with code 1: out of luck"),
        ("fails", "process:peer failed on 1: process:peer: RuntimeError: half way"),
        ("talks", "process:peer failed on 1: process:peer said 'hello', which is no line of JSON"),
    ],
)
def test_a_program_that_fails_ends_the_bench(peer: Peer, way: str, words: str) -> None:
    assert error_of(*peer.bench(way), code=1).startswith(words)


def test_a_program_that_is_not_there(peer: Peer) -> None:
    said = error_of(*peer.bench("", "-m", "process:other=/nowhere/python x.py"), code=1)
    assert said == "process:other: /nowhere/python: No such file or directory"


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("process:", "write process:NAME=COMMAND"),
        ("process:x=", "write process:NAME=COMMAND"),
        ("process:=python", "write process:NAME=COMMAND"),
        ("process:x='a", "No closing quotation in its command"),
    ],
)
def test_wrong_methods(method: str, words: str) -> None:
    assert words in error_of("bench", "-m", method)


def test_one_name_for_two_programs() -> None:
    said = error_of("bench", "-m", "process:x=a", "-m", "process:x=b")
    assert said == "method 'process:x' is given twice; keep one"


def test_compare_takes_programs(peer: Peer, model: str) -> None:
    """And lets them end."""
    method = next(word for word in peer.bench() if word.startswith("process:"))
    done = cli(
        "compare", "none", method, "--target", model, "--device", "cpu", "-p", "ab", "--raw", "-n", "4"
    )
    assert done.exit_code == 0, done.stderr
    assert "say the same: 1 prompts" in done.stdout
