"""`specdec chat`: a history that is fed once, commands, and how an answer and a conversation end."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cli_support
import pytest
from cli_support import TEMPLATE, cli, error_of, make_model
from typer.testing import Result

from specdec_core import SamplingParams, SpecDecoder
from specdec_core.rows.results import StreamChunk

model = cli_support.model
# A real template ends an answer as it began it, so that a turn only adds to what was there.
GROWING = (
    "{% for message in messages %}<{{ message.role }}>:{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>:{% endif %}"
)


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_model(tmp_path_factory.mktemp("models") / "growing", template=GROWING))


def chat(model: str, text: str, *args: str, code: int = 0) -> Result:
    done = cli("chat", "--target", model, "--device", "cpu", *args, stdin=text)
    assert done.exit_code == code, done.output
    return done


# --- turns ----------------------------------------------------------------------------------------


def test_answers_go_to_stdout_and_all_else_to_stderr(model: str) -> None:
    done = chat(model, "hi\n\n  \nbye", "-n", "4")
    assert done.stdout == "abcd\nabcd\n"
    assert done.stderr == "specdec: cut after 4 tokens; --max-new-tokens allows for more\n" * 2
    assert chat(model, "x\n").stdout == "abcdefghijklmnopqrstuvwxyz\n"
    assert chat(model, "x\n").stderr == ""
    assert chat(model, "").stdout == ""


def test_each_turn_says_what_the_whole_history_gives_cold(growing: str) -> None:
    """B21, B94."""
    options = ["--temperature", "1", "--seed", "5", "-n", "9", "--system", "be brief", "--ignore-eos"]
    answers = chat(growing, "hi\nand\nso\n", *options).stdout.splitlines()
    decoder = SpecDecoder.from_pretrained(growing, device="cpu")
    messages = [{"role": "system", "content": "be brief"}]
    params = SamplingParams(temperature=1, seed=5, max_new_tokens=9, ignore_eos=True)
    for said, answer in zip(("hi", "and", "so"), answers, strict=True):
        messages.append({"role": "user", "content": said})
        decoder.target.runner._prefixes._tokens.clear()
        result: Any = decoder.generate(messages, params)
        assert (result.text, result.stats.reused_tokens) == (answer, 0)
        messages.append({"role": "assistant", "content": answer})
    assert len(set(answers)) == 3


def test_a_turn_feeds_only_what_is_new(growing: str) -> None:
    done = chat(growing, "hello\nbye\n/stats\n", "-n", "5")
    first, second = "<user>:hello;<assistant>:", "abcde;<user>:bye;<assistant>:"
    _, _, last, every = done.stderr.splitlines()
    known = len(first) + 4  # the last token of an answer is not fed before the next turn
    both = len(first) + len(second)
    assert last.startswith("specdec: last turn: prompt_lookup / greedy / k=auto, ")
    assert last.endswith(f", {known} of {both} prompt tokens reused")
    assert every.startswith("specdec: all turns: ")
    assert every.endswith(f", {known} of {len(first) + both} prompt tokens reused")
    assert ", 10 tokens, " in every


def test_undo_and_reset(growing: str) -> None:
    def prompt_tokens(text: str) -> list[str]:
        lines = chat(growing, text, "-n", "1").stderr.splitlines()
        return [line.split(" of ")[1].split()[0] for line in lines if "last turn" in line]

    once = len("<user>:a;<assistant>:")
    twice = once + len("a;") + once
    assert prompt_tokens("a\n/stats\na\n/stats\n") == [str(once), str(twice)]
    assert prompt_tokens("a\na\n/undo\na\n/stats\n") == [str(twice)]
    assert prompt_tokens("a\na\n/reset\na\n/stats\n") == [str(once)]
    done = chat(growing, "/undo\n/stats\na\n/undo\n/reset\n/stats\n", "-n", "1")
    assert [line for line in done.stderr.splitlines() if "cut" not in line] == [
        "specdec: nothing was said yet",
        "specdec: nothing was generated yet",
        "specdec: taken back; turns left: 0",
        "specdec: the conversation begins anew",
        "specdec: nothing was generated yet",
    ]


def test_commands(model: str) -> None:
    done = chat(model, "/help\n/exit\nnot said\n")
    assert (done.stdout, done.stderr.count("\n")) == ("", 5)
    assert "/reset" in done.stderr
    done = chat(model, "/foo\nx\n", "-n", "2", code=1)
    assert done.stdout == "ab\n"
    assert done.stderr.startswith("specdec: error: no command /foo; /help lists them\n")
    assert chat(model, "/etc/passwd is a file\n", "-n", "2").stdout == "ab\n"


def test_a_backslash_joins_lines(growing: str) -> None:
    done = chat(growing, "a\\\nb\n/stats\n", "-n", "1")
    assert f" of {len('<user>:a.b;<assistant>:')} prompt" in done.stderr.splitlines()[-1]
    assert done.stdout == "a\n"


def test_sampling_options_have_their_effect(model: str) -> None:
    seeds = {chat(model, "x\n", "--temperature", "1", "--seed", str(s), "-n", "9").stdout for s in range(4)}
    assert len(seeds) > 1
    assert chat(model, "x\n", "--stop", "def").stdout == "abc\n"
    assert chat(model, "x\n", "--stop", "def", "--include-stop").stdout == "abcdef\n"


# --- what does not work ---------------------------------------------------------------------------


def test_without_a_chat_template_it_does_not_begin(tmp_path: Path) -> None:
    plain = make_model(tmp_path / "plain", template=None)
    assert "has no chat template" in error_of("chat", "--target", str(plain), stdin="a\n")
    refusing = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no\nsystem') }}{% endif %}" + TEMPLATE
    )
    picky = make_model(tmp_path / "picky", template=refusing)
    line = error_of("chat", "--target", str(picky), "--system", "s", stdin="a\n")
    assert line == "the target's chat template refuses these messages: no system"
    assert chat(str(picky), "a\n", "-n", "1").stdout == "a\n"


def test_a_full_context_is_one_line_and_how_to_go_on(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "short", template=GROWING)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 60}))
    done = chat(str(folder), f"a\n{'b' * 20}\nc\n/reset\nd\n", "-n", "12", code=1)
    assert done.stdout == "abcdefghijkl\nabcde\nabcdefghijkl\n"
    _, refused, ended, _, _ = done.stderr.splitlines()
    remedy = "/undo takes back the last turn, /reset begins anew"
    assert refused == (
        f"specdec: error: the context is full: it holds 60 tokens, and this makes it 74; {remedy}"
    )
    assert ended == f"specdec: the context is full: {remedy}"
    done = chat(str(folder), "a\n", "--ignore-eos")
    assert len(done.stdout) == 60 - len("<user>:a;<assistant>:") - 1 + 1
    assert done.stderr.startswith("specdec: the context is full: ")


# --- Ctrl-C ---------------------------------------------------------------------------------------


def interrupting(presses: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Press Ctrl-C behind the third chunk of the first answer."""
    stream, left = SpecDecoder.stream, [presses]

    def pressed(self: SpecDecoder, *args: Any, **options: Any) -> Iterator[StreamChunk]:
        for i, chunk in enumerate(stream(self, *args, **options)):
            while i == 2 and left[0]:
                left[0] -= 1
                os.kill(os.getpid(), signal.SIGINT)
            yield chunk

    monkeypatch.setattr(SpecDecoder, "stream", pressed)


def test_ctrl_c_stops_an_answer_and_keeps_the_conversation(
    growing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    interrupting(1, monkeypatch)
    done = chat(growing, "a\nb\n/stats\n", "-n", "5", "--drafter", "none")
    assert done.stdout == "abc\nabcde\n"
    stopped, _, last, _ = done.stderr.splitlines()
    assert stopped == "specdec: stopped"
    history = len("<user>:a;<assistant>:abc;<user>:b;<assistant>:")
    assert f" of {history} prompt tokens reused" in last
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_second_ctrl_c_leaves(growing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupting(2, monkeypatch)
    assert chat(growing, "a\nb\n", "-n", "5", "--drafter", "none", code=130).stdout == "ab"


def test_ctrl_c_at_the_prompt_leaves(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_core.cli import chat as module

    def pressed(*_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_line", pressed)
    done = chat(model, "", code=130)
    assert (done.stdout, done.stderr) == ("", "")
