"""`specdec run`: what is wrong is one line, and how a run ends."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import cli_support
import pytest
from cli_support import cli, error_of, process
from typer.testing import CliRunner

from specdec_core import SpecDecoder
from specdec_core.cli.app import app
from specdec_core.rows.results import StreamChunk

model = cli_support.model


# --- what is wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("-n 1.9", "'--max-new-tokens' / '-n': 1.9 is no whole number"),
        ("-n -1", "max_new_tokens=-1 is not allowed"),
        ("--temperature warm", "'--temperature': warm is no number"),
        ("--temperature -1", "temperature=-1.0 is not allowed"),
        ("--temperature nan", "temperature=nan is not allowed"),
        ("--top-k -1", "top_k=-1 is not allowed"),
        ("--top-k 1.5", "'--top-k': 1.5 is no whole number"),
        ("--top-p 0", "top_p=0.0 is not allowed"),
        ("--min-p 2", "min_p=2.0 is not allowed"),
        ("--repetition-penalty 0", "repetition_penalty=0.0 is not allowed"),
        ("--seed x", "'--seed': x is no whole number"),
        ("--draft-tokens -1", "--draft-tokens -1: it must be auto or a whole number of at least 0"),
        ("--draft-tokens 1.9", "--draft-tokens 1.9: it must be auto"),
        ("--draft-tokens x", "--draft-tokens x: it must be auto"),
        ("--drafter promt_lookup", "no drafter 'promt_lookup'; did you mean 'prompt_lookup'? known: "),
        ("--drafter prompt_lookup:n=1", "drafter 'prompt_lookup' has no option 'n' (=1)"),
        ("--drafter prompt_lookup:max_ngram=1.9", "drafter 'prompt_lookup': max_ngram=1.9: "),
        ("--verifier gredy", "no verifier 'gredy'; did you mean 'greedy'?"),
        ("--verifier greedy --temperature 1", "temperature=1.0 needs a verifier that samples, and 'greedy'"),
        ("--device nowhere", "device='nowhere' is unknown"),
        ("--dtype int3", "dtype='int3' is unknown"),
        ("--revision main", "revision='main' needs a hub id"),
        ("--file also", "--prompt and --file are both given"),
        ("--no-such-option", "no such option: --no-such-option"),
        ("--seed", "option '--seed' requires an argument"),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(model: str, args: str, words: str) -> None:
    assert words in error_of("run", "--target", model, "-p", "a", *args.split())


def test_a_drafter_is_checked_before_the_target_is_loaded() -> None:
    assert "no drafter 'nix'" in error_of("run", "--target", "/no/such/model", "-p", "a", "--drafter", "nix")


def test_a_missing_target_is_named_with_the_remedy(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert error_of("run", "--target", str(missing), "-p", "a").startswith(
        f"target '{missing}' does not exist"
    )
    missing.write_text("")
    assert "is a file; name a model folder" in error_of("run", "--target", str(missing), "-p", "a")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the prompt is empty"),
        (b"\n", "the prompt is empty"),
        (b"\xff\xfe", "is not UTF-8 text (byte 0)"),
        (b'[{"rol": "user"}]', "number 0 has no role"),
    ],
)
def test_a_file_that_is_no_prompt(model: str, tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "prompt"
    file.write_bytes(content)
    line = error_of("run", "--target", model, "-f", str(file))
    assert words in line
    assert str(file) in line


def test_no_prompt_at_all(model: str, tmp_path: Path) -> None:
    args = ["run", "--target", model]
    assert "the prompt is empty (--prompt)" in error_of(*args, "-p", "")
    assert "the prompt is empty (stdin)" in error_of(*args, stdin="")
    assert "No such file" in error_of(*args, "-f", str(tmp_path / "missing"))
    assert "directory" in error_of(*args, "-f", str(tmp_path))


def test_a_terminal_is_not_waited_for(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_core.cli import prompt

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(prompt.sys, "stdin", Terminal())
    with pytest.raises(ValueError, match="no prompt; give --prompt TEXT or --file FILE, or pipe text in"):
        prompt.read_prompt(None, None, None)


def test_a_model_that_cannot_be_served_fails_without_a_traceback(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    tokenizer = cli_support.byte_tokenizer()
    config = MambaConfig(vocab_size=len(tokenizer), hidden_size=8, num_hidden_layers=1, state_size=4)
    MambaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert "amba" in error_of("run", "--target", str(tmp_path), "-p", "a", code=1)


# --- how it ends ----------------------------------------------------------------------------------


def raising(error: BaseException) -> Any:
    def stream(*_: Any, **__: Any) -> Iterator[StreamChunk]:
        yield StreamChunk("begun", [])
        raise error

    return stream


def test_ctrl_c_ends_it_with_130(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpecDecoder, "stream", raising(KeyboardInterrupt()))
    done = cli("run", "--target", model, "-p", "a")
    assert (done.exit_code, done.stdout, done.stderr) == (130, "begun", "")


@pytest.mark.parametrize(
    "args",
    [
        ["theory", "--acceptance", "0.8"],
        ["--help"],
        pytest.param(["run", "--target", "MODEL", "-p", "a"], marks=pytest.mark.slow),
    ],
)
def test_a_closed_pipe_ends_it_quietly(model: str, args: list[str]) -> None:
    code = (
        "import os\n"
        "read, write = os.pipe(); os.dup2(write, 1); os.close(read); os.close(write)\n"
        "from specdec_core.cli import main; main()"
    )
    done = process(*(arg.replace("MODEL", model) for arg in args), code=code)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("a b\nc"), "RuntimeError: a b c (--debug shows where)"),
        (ZeroDivisionError(), "ZeroDivisionError (--debug shows where)"),
        (MemoryError(), "out of memory: nothing left; use a smaller model"),
        (
            RuntimeError("CPU: can't allocate memory: you tried. Error 12"),
            "out of memory: CPU: can't allocate",
        ),
    ],
)
def test_what_nobody_foresaw_is_one_line_and_exit_code_1(
    model: str, monkeypatch: pytest.MonkeyPatch, error: Exception, line: str
) -> None:
    monkeypatch.setattr(SpecDecoder, "stream", raising(error))
    done = cli("run", "--target", model, "-p", "a")
    assert (done.exit_code, done.stdout) == (1, "begun")
    assert done.stderr.startswith(f"specdec: error: {line}")
    assert done.stderr.count("\n") == 1
    debugged = cli("run", "--target", model, "-p", "a", "--debug")
    assert "Traceback" in debugged.stderr
    assert debugged.stderr.splitlines()[-1] == done.stderr.rstrip("\n")


def test_a_narrow_encoding_does_not_end_a_run(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(*_: Any, **__: Any) -> Iterator[StreamChunk]:
        yield StreamChunk("caf\u00e9", [])
        raise RuntimeError

    monkeypatch.setattr(SpecDecoder, "stream", stream)
    done = CliRunner(charset="ascii").invoke(app, ["run", "--target", model, "-p", "a"])
    assert done.stdout == "caf\\xe9"


@pytest.mark.parametrize(
    ("command", "words"),
    [("run", "no prompt; give --prompt TEXT"), ("chat", "there is no stdin to read from")],
)
def test_a_closed_stdin_is_one_line(command: str, words: str) -> None:
    closed = "import sys; sys.stdin = None; from specdec_core.cli import main; main()"
    done = process(command, code=closed)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert words in line


def test_a_wrong_name_is_one_line_without_a_target_too() -> None:
    assert "no drafter 'nix'" in error_of("run", "-p", "a", "--drafter", "nix")
