"""`specdec run --input`: each row equals its single run, and nothing is lost or repeated."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import cli_support
import pytest
from cli_support import cli, error_of, run_object
from typer.testing import Result

from specdec_core import SamplingParams, SpecDecoder
from specdec_core.contract.errors import SpecdecError

model = cli_support.model
ROWS: list[dict[str, Any]] = [
    {"prompt": "abc"},
    {"prompt": "abcdefabcdefab", "max_new_tokens": 20, "temperature": 1.0, "seed": 3, "ignore_eos": True},
    {"id": "x", "prompt": "m", "stop": "pq"},
    {"prompt": "hello", "temperature": 0.7, "top_k": 5, "max_new_tokens": 1},
    {"id": 4, "prompt": "0", "repetition_penalty": 3.0, "max_new_tokens": 5},
    {"prompt": "a" * 40, "max_new_tokens": 0},
    {"prompt": "0101", "temperature": 1.0, "stop": ["2", "a"], "include_stop": True},
]


class Files:
    """An input, and an output that is read back."""

    def __init__(self, folder: Path, rows: list[Any]) -> None:
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"
        lines = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
        self.input.write_bytes(b"".join(line + b"\n" for line in lines))

    @property
    def args(self) -> list[str]:
        return ["--input", str(self.input), "--output", str(self.output)]

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.output.read_text().splitlines()]

    def by_line(self) -> dict[int, dict[str, Any]]:
        rows = self.read()
        assert len({row["line"] for row in rows}) == len(rows)
        return {row["line"]: row for row in rows}


def batch(model: str, files: Files, *args: str, code: int = 0, drafter: str = "prompt_lookup") -> Result:
    done = cli("run", "--target", model, "--device", "cpu", "--drafter", drafter, *files.args, *args)
    assert (done.exit_code, done.stdout) == (code, ""), done.output
    return done


# --- rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_batch", ["1", "3", "8"])
def test_each_row_equals_its_single_run(model: str, tmp_path: Path, max_batch: str) -> None:
    files = Files(tmp_path, ROWS)
    done = batch(model, files, "-n", "12", "--seed", "9", "--max-batch", max_batch)
    assert done.stderr.startswith("specdec: prompt_lookup / greedy+match / k=")
    rows = files.by_line()
    for i, row in enumerate(ROWS, 1):
        options = {"max_new_tokens": 12, "seed": 9} | row
        prompt = options.pop("prompt")
        alone = run_object(model, *_as_options(options), prompt=prompt)
        names = ("text", "token_ids", "finish_reason", "seed")
        assert {name: rows[i][name] for name in names} == {name: alone[name] for name in names}
        assert rows[i].get("id") == row.get("id")
        assert rows[i]["stats"]["new_tokens"] == len(alone["token_ids"])
        assert (rows[i]["stats"]["total_seconds"] > 0) == (i != 6)


def _as_options(row: dict[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            yield option
        elif name != "id":
            values = value if isinstance(value, list) else [value]
            yield from itertools.chain.from_iterable((option, str(one)) for one in values)


def test_messages_ids_and_chat(model: str, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = [{"messages": messages}, {"prompt": "u"}]
    files = Files(tmp_path, [*rows, {"prompt": [64, 65]}])
    batch(model, files, "-n", "1")
    found = files.by_line()
    lengths = [found[i]["stats"]["prompt_tokens"] for i in (1, 2, 3)]
    assert lengths == [len("<system>s<user>u:"), 1, 2]
    assert found[3]["text"] == "c"
    files = Files(tmp_path, rows)
    batch(model, files, "-n", "1", "--chat", "--overwrite")
    assert [row["stats"]["prompt_tokens"] for row in files.by_line().values()] == [17, len("<user>u:")]


def test_several_samples_and_logprobs(model: str, tmp_path: Path) -> None:
    files = Files(tmp_path, [{"prompt": "a", "n": 3, "temperature": 1, "seed": 1}, {"prompt": "a"}])
    batch(model, files, "-n", "4", "--logprobs", "2", "--max-batch", "2")
    rows = files.by_line()
    samples = rows[1]["samples"]
    assert len({sample["seed"] for sample in samples}) == len(samples) == 3
    assert samples[0]["text"] == run_object(model, "-n", "4", "--temperature", "1", "--seed", "1")["text"]
    assert [token["token_id"] for token in rows[2]["logprobs"]] == rows[2]["token_ids"]
    assert [len(token["top"]) for token in samples[2]["logprobs"]] == [2] * 4


def test_a_row_is_written_as_it_ends_and_the_next_takes_its_place(model: str, tmp_path: Path) -> None:
    rows = [{"prompt": "x", "max_new_tokens": n} for n in (60, 3, 3, 3, 0, 3)]
    files = Files(tmp_path, rows)
    batch(model, files, "--max-batch", "2", "--ignore-eos", drafter="none")
    assert [row["line"] for row in files.read()][-1] == 1
    assert [row["line"] for row in files.read() if row["line"] not in (1, 5)] == [2, 3, 4, 6]


def test_requests_are_taken_as_places_become_free(model: str) -> None:
    decoder = SpecDecoder.from_pretrained(model, device="cpu", max_batch=2, drafter="none")
    taken: list[int] = []

    def requests() -> Iterator[tuple[int, str, SamplingParams]]:
        for i in itertools.count():
            taken.append(i)
            yield i, "a" if i != 3 else "", SamplingParams(max_new_tokens=2 + i)

    finished = decoder.finished(requests(), [SamplingParams()])
    key, result = next(finished)
    assert key == 0
    assert len(taken) <= 5  # one that has ended, two that have places, one that waits, one in its hands
    assert not isinstance(result, SpecdecError)
    assert result.text == "bc"
    rest = [next(finished) for _ in range(3)]
    assert sorted(key for key, _ in rest) == [1, 2, 3]
    assert len(taken) <= 9
    [refused] = [result for key, result in rest if key == 3]
    assert isinstance(refused, SpecdecError)
    finished.close()
    assert decoder.generate("a", SamplingParams(max_new_tokens=2)).text == "bc"


def test_stdin_and_stdout(model: str) -> None:
    args = ["run", "--target", model, "--device", "cpu", "-n", "2", "--input", "-"]
    done = cli(*args, stdin='\n{"prompt": "a"}\n{"prompt": ""}')
    assert done.exit_code == 1
    refused, row = map(json.loads, done.stdout.splitlines())
    assert (row["line"], row["text"]) == (2, "bc")
    assert refused == {"line": 3, "error": "the prompt is empty; give at least one token"}
    assert "specdec: error: stdin line 3: the prompt is empty" in done.stderr


# --- bad rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"nonsense", "not JSON: Expecting value"),
        (b"[" * 100_000, "not JSON that can be read: nested too deep"),
        (b'{"prompt": "\xff"}', "not UTF-8 text (byte 12)"),
        (b'{"prompt": "\\ud800"}', "holds half a surrogate pair"),
        (b'["a"]', "not a JSON object"),
        (b'{"text": "a"}', 'needs either "prompt" or "messages"'),
        (b'{"prompt": "a", "messages": []}', 'needs either "prompt" or "messages"'),
        (b'{"prompt": ""}', "the prompt is empty"),
        (b'{"prompt": []}', "the prompt is empty"),
        (b'{"prompt": 3}', '"prompt" must be text'),
        (b'{"prompt": ["a", "b"]}', '"prompt" must be text'),
        (b'{"prompt": [1, true]}', '"prompt" must be text'),
        (b'{"prompt": [1, 70000]}', "the prompt holds the token id 70000"),
        (b'{"messages": []}', '"messages" must be a list of objects'),
        (b'{"messages": [{"content": "a"}]}', '"messages" must be a list of objects, each with a "role"'),
        (b'{"prompt": "a", "id": 1.5}', "id=1.5 is not allowed"),
        (b'{"prompt": "a", "id": "first"}', "id 'first' is that of line 1"),
        (
            b'{"prompt": "a", "max_tokens": 3}',
            "unknown key 'max_tokens'; known: id, prompt, messages, max_new",
        ),
        (b'{"prompt": "a", "self": 3}', "unknown key 'self'"),
        (b'{"prompt": "a", "constraint": "x"}', "unknown key 'constraint'"),
        (b'{"prompt": "a", "temperature": -1}', "temperature=-1 is not allowed"),
        (b'{"prompt": "a", "max_new_tokens": "many"}', "max_new_tokens='many' is not allowed"),
        (b'{"prompt": "a", "logit_bias": {"70000": 1}}', "logit_bias holds the token id 70000"),
        (
            json.dumps({"prompt": "a" * 600}).encode(),
            "the prompt has 600 tokens; the target's context holds 512",
        ),
    ],
)
def test_a_bad_row_is_reported_by_its_line_and_the_rest_completes(
    model: str, tmp_path: Path, line: bytes, words: str
) -> None:
    files = Files(tmp_path, [{"prompt": "a", "id": "first"}, b"", line, {"prompt": "b"}])
    done = batch(model, files, "-n", "2", code=1)
    rows = files.by_line()
    assert (rows[1]["text"], rows[4]["text"]) == ("bc", "cd")
    assert words in rows[3]["error"]
    reports = [line for line in done.stderr.splitlines() if "error" in line]
    assert reports == [
        f"specdec: error: {files.input} line 3: {rows[3]['error']}",
        f"specdec: error: 1 of 3 rows failed; {files.output} holds the error of each",
    ]


def test_a_verifier_that_does_not_sample_refuses_rows_that_do(model: str, tmp_path: Path) -> None:
    files = Files(tmp_path, [{"prompt": "a"}, {"prompt": "a", "temperature": 1}])
    batch(model, files, "-n", "2", "--verifier", "greedy", code=1)
    assert "temperature=1.0 needs a verifier that samples" in files.by_line()[2]["error"]
    assert files.by_line()[1]["text"] == "bc"


def test_messages_without_a_template_are_bad_rows(tmp_path: Path) -> None:
    plain = str(cli_support.make_model(tmp_path / "plain", template=None))
    files = Files(tmp_path, [{"messages": [{"role": "user", "content": "a"}]}, {"prompt": "a"}])
    batch(plain, files, "-n", "1", code=1)
    assert "no chat template" in files.by_line()[1]["error"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--output", "x"], "--output needs --input FILE"),
        (["--max-batch", "2"], "--max-batch needs --input FILE"),
        (["--overwrite"], "--overwrite needs --input FILE"),
        (["--input", "IN", "-p", "a"], "--input goes without --prompt"),
        (["--input", "IN", "--json"], "--input goes without --prompt"),
        (["--input", "IN", "--trace"], "--input goes without --prompt"),
        (["--input", "IN", "--max-batch", "0"], "--max-batch 0: it must be"),
        (["--input", "IN", "--max-batch", "x"], "x is no whole number"),
        (["--input", "IN", "--overwrite"], "--overwrite needs --output FILE"),
        (["--input", "IN", "--output", "IN"], "is the input; name another file"),
        (["--input", "IN", "--output", "/no/such/folder/x"], "no file can be written there"),
        (["--input", "/no/such/file"], "--input /no/such/file: No such file"),
        (["--input", "IN", "--temperature", "-1"], "temperature=-1.0 is not allowed"),
        (["--input", "IN", "--drafter", "nix"], "no drafter 'nix'"),
    ],
)
def test_wrong_use_is_one_line(model: str, tmp_path: Path, args: list[str], words: str) -> None:
    files = Files(tmp_path, [{"prompt": "a"}])
    given = [arg.replace("IN", str(files.input)) if arg == "IN" else arg for arg in args]
    assert words in error_of("run", "--target", model, *given)
    assert not Path("x").exists()


# --- resuming -------------------------------------------------------------------------------------


def generated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record which lines are generated from now on."""
    lines: list[int] = []
    original = SpecDecoder.finished

    def recorded(self: SpecDecoder, requests: Any) -> Any:
        def watched() -> Iterator[Any]:
            for entry, *rest in requests:
                lines.append(entry.line)
                yield entry, *rest

        return original(self, watched())

    monkeypatch.setattr(SpecDecoder, "finished", recorded)
    return lines


def without_times(files: Files) -> dict[int, dict[str, Any]]:
    rows = files.by_line()
    for row in rows.values():
        assert row.pop("settings")["drafter"] == "prompt_lookup"
        for name in ("total_seconds", "reused_tokens"):
            row["stats"].pop(name)
    return rows


def test_an_output_cut_anywhere_is_gone_on_with(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(tmp_path, ROWS)
    options = ["-n", "6", "--seed", "2", "--draft-tokens", "10"]  # auto depends on timings
    batch(model, files, *options)
    whole, expected = files.output.read_bytes(), without_times(files)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (0, 1, 9, 12, ends[0] - 1, ends[0], ends[0] + 5, ends[3] + 40, len(whole) - 1):
        files.output.write_bytes(whole[:cut])
        files.output.chmod(0o640)
        with monkeypatch.context() as patch:
            lines = generated(patch)
            batch(model, files, *options)
        assert without_times(files) == expected
        assert len(lines) == len(ROWS) - sum(end <= cut for end in ends)
        assert files.output.stat().st_mode & 0o777 == 0o640
        assert [file.name for file in tmp_path.iterdir() if "part" in file.name] == []
    before = files.output.read_bytes()
    monkeypatch.setattr(SpecDecoder, "from_pretrained", None)
    done = batch(model, files, *options)
    assert done.stderr.startswith("specdec: nothing to do: all rows of ")
    assert files.output.read_bytes() == before


def test_rows_with_an_id_are_known_by_it(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(tmp_path, [{"id": "a", "prompt": "a"}, {"prompt": "b"}, {"id": 3, "prompt": "c"}])
    batch(model, files, "-n", "1")
    rows = [{"id": "3", "prompt": "x"}, {"prompt": "b"}, {"id": 3, "prompt": "c"}, {"id": "a", "prompt": "a"}]
    files = Files(tmp_path, rows)
    lines = generated(monkeypatch)
    done = batch(model, files, "-n", "1")
    assert lines == [1]
    first, last = done.stderr.splitlines()
    assert first == f"specdec: 3 rows of {files.input} stand in {files.output}; 1 to go"
    assert last.endswith(", 1 round, without the 3 rows that were there")


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ([], ["--temperature", "0.5"], "no temperature, and this run has temperature=0.5"),
        (["--temperature", "0.5"], [], "temperature=0.5, and this run has no temperature"),
        (["--stop", "x"], ["--stop", "y"], "stop=['x'], and this run has stop=['y']"),
        ([], ["-n", "3"], "max_new_tokens=2, and this run has max_new_tokens=3"),
        ([], ["--drafter", "none"], "drafter=prompt_lookup, and this run has drafter=none"),
        ([], ["--verifier", "greedy"], "verifier=auto, and this run has verifier=greedy"),
        ([], ["--draft-tokens", "2"], "draft_tokens=auto, and this run has draft_tokens=2"),
        ([], ["--chat"], "no mode, and this run has mode=chat"),
        ([], ["--dtype", "float32"], "no dtype, and this run has dtype=float32"),
        ([], ["--target", "/other"], "/alphabet, and this run has target=/other"),
    ],
)
def test_a_run_that_is_set_otherwise_does_not_go_on(
    model: str, tmp_path: Path, before: list[str], now: list[str], words: str
) -> None:
    files = Files(tmp_path, [{"prompt": "a"}, {"prompt": "b"}])
    given = ["run", "--target", model, *files.args, "-n", "2"]
    assert cli(*given, *before).exit_code == 0
    kept = files.output.read_bytes()
    error = error_of(*given, *now)
    assert error.startswith(f"--output {files.output}: line 1 was made with ")
    assert f"{words}; set it back, name another file, or add --overwrite" in error
    assert files.output.read_bytes() == kept
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_what_does_not_change_the_text_may_change(model: str, tmp_path: Path) -> None:
    files = Files(tmp_path, [{"prompt": "a"}, {"prompt": "b"}])
    batch(model, files, "-n", "2")
    files.output.write_bytes(files.output.read_bytes().splitlines(True)[0])
    linked = tmp_path / "linked"
    linked.symlink_to(model)
    batch(str(linked), files, "-n", "2", "--max-batch", "1")
    assert sorted(files.by_line()) == [1, 2]


def test_a_row_that_was_changed_is_not_taken_for_done(model: str, tmp_path: Path) -> None:
    batch(model, Files(tmp_path, [{"prompt": "a"}, {"prompt": "b"}]), "-n", "1")
    for other in ({"prompt": "c"}, {"prompt": "b", "seed": 1}):
        files = Files(tmp_path, [{"prompt": "a"}, other])
        error = error_of("run", "--target", model, *files.args, "-n", "1")
        assert error.startswith(
            f"{files.input} line 2 is not what it was when its row in {files.output} was made"
        )


def test_refused_rows_are_tried_again(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch(model, Files(tmp_path, [{"prompt": "a"}, {"prompt": ""}, b"x"]), "-n", "1", code=1)
    files = Files(tmp_path, [{"prompt": "a"}, {"prompt": "b"}, b"x"])
    lines = generated(monkeypatch)
    batch(model, files, "-n", "1", code=1)
    assert lines == [2]
    rows = files.by_line()
    assert (rows[1]["text"], rows[2]["text"]) == ("b", "c")
    assert "not JSON" in rows[3]["error"]


def test_overwrite_begins_anew(model: str, tmp_path: Path) -> None:
    files = Files(tmp_path, [{"prompt": "a"}])
    files.output.write_text("something else\n")
    batch(model, files, "-n", "2", "--overwrite")
    batch(model, files, "-n", "3", "--overwrite")
    assert [row["text"] for row in files.read()] == ["bcd"]


@pytest.mark.parametrize("content", [b"my notes", b'{"a": 1}\n', b'{"line": "1"}\n', b"[]\n", b"\xff\n"])
def test_a_file_that_holds_something_else_is_left_alone(model: str, tmp_path: Path, content: bytes) -> None:
    files = Files(tmp_path, [{"prompt": "a"}])
    files.output.write_bytes(content)
    line = error_of("run", "--target", model, *files.args)
    assert "line 1 is no row of an earlier run; name another file, or add --overwrite" in line
    assert files.output.read_bytes() == content


def test_ctrl_c_keeps_what_is_done(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(tmp_path, [{"prompt": "a"}] * 5)
    original = SpecDecoder.finished

    def interrupted(self: SpecDecoder, *args: Any) -> Any:
        yield from itertools.islice(original(self, *args), 2)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SpecDecoder, "finished", interrupted)
        done = batch(model, files, "-n", "2", "--max-batch", "1", code=130)
    assert done.stderr == "specdec: stopped: 2 rows written; the same command goes on from there\n"
    assert sorted(files.by_line()) == [1, 2]
    batch(model, files, "-n", "2")
    assert sorted(files.by_line()) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_a_killed_process_loses_and_repeats_nothing(model: str, tmp_path: Path) -> None:
    rows = [{"prompt": "abcdefgh"[: 1 + i % 8], "max_new_tokens": 20 + 7 * i % 60} for i in range(200)]
    files = Files(tmp_path, rows)
    options = ["--ignore-eos", "--temperature", "1", "--seed", "4", "--device", "cpu"]
    command = ["run", "--target", model, *files.args, *options]
    code = "from specdec_core.cli import main; main()"
    written: list[int] = []
    for least in (20, 90):
        process = subprocess.Popen([sys.executable, "-c", code, *command], stderr=subprocess.DEVNULL)
        until = time.monotonic() + 120
        while not files.output.exists() or files.output.read_bytes().count(b"\n") < least:
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.005)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        written.append(files.output.read_bytes().count(b"\n"))
    assert written[1] < 200
    kept = files.output.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    assert cli(*command).exit_code == 0
    assert files.output.read_bytes().startswith(kept)
    found = without_times(files)
    assert sorted(found) == list(range(1, 201))
    anew = Files(tmp_path, rows)
    anew.output = tmp_path / "anew.jsonl"
    assert cli("run", "--target", model, *anew.args, *options).exit_code == 0
    assert {i: row["token_ids"] for i, row in found.items()} == {
        i: row["token_ids"] for i, row in anew.by_line().items()
    }


# --- progress -------------------------------------------------------------------------------------


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal, True), (StringIO, False)])
def test_a_bar_is_drawn_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, stream: type[StringIO], shown: bool
) -> None:
    from specdec_core.cli.batch import _progress

    monkeypatch.setenv("TERM", "xterm")
    err = stream()
    monkeypatch.setattr(sys, "stderr", err)
    with _progress(3) as advance:
        for _ in range(3):
            advance()
    assert ("3/3" in err.getvalue()) is shown
    assert bool(err.getvalue()) is shown
