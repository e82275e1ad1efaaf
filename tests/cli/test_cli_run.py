"""`specdec run`: where the prompt comes from, and what is printed: stdout holds the text alone."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import cli_support
import pytest
from cli_support import error_of, make_model, run, run_object, said

from specdec_core import SamplingParams, SpecDecoder
from specdec_core.rows.results import StreamChunk

model = cli_support.model


# --- what is printed ------------------------------------------------------------------------------


def test_stdout_is_the_text_and_stderr_one_line_of_statistics(model: str) -> None:
    done = run(model, "--draft-tokens", "10", prompt="abcdefghijabc")
    assert done.stdout == "defghijklmnopqrstuvwxyz\n"
    [line] = done.stderr.splitlines()
    assert line.startswith("specdec: prompt_lookup / greedy / k=10, acceptance 70% (7/10), mean acceptance")
    assert " mean acceptance length 1.41, 24 tokens, " in line
    assert line.endswith(" tokens/s, 17 rounds")


def test_the_line_names_options_and_depth_and_says_where_nothing_was_drafted(model: str) -> None:
    line = run(model, "--drafter", "prompt_lookup:max_ngram=4,num_tokens=6", "--draft-tokens", "5").stderr
    assert line.startswith(
        "specdec: prompt_lookup(num_tokens=6, max_ngram=4) / greedy / k=5, nothing drafted"
    )
    assert " / k=auto, " in run(model, "-n", "3").stderr
    assert run(model, "-n", "1").stderr.endswith(" 1 round\n")


def test_json_has_all_there_is_to_know(model: str) -> None:
    value = run_object(model, "--seed", "7", "-n", "3")
    assert list(value) == [
        *("text", "token_ids", "finish_reason", "seed", "target", "device", "dtype", "drafter", "verifier"),
        "stats",
    ]
    assert (value["text"], value["finish_reason"], value["seed"]) == ("bcd", "length", 7)
    assert len(value["token_ids"]) == 3
    assert (value["target"], value["device"], value["dtype"]) == (model, "cpu", "float32")
    assert value["drafter"] == {
        "name": "prompt_lookup",
        "config": {"num_tokens": 20, "max_ngram": 3, "min_ngram": 1},
    }
    assert value["verifier"] == {"name": "greedy", "config": {}, "lossless": True}
    assert value["stats"]["new_tokens"] == 3
    assert value["stats"]["acceptance_histogram"] == [3]


def test_a_lossy_verifier_says_so(model: str) -> None:
    assert "/ typical (lossy) /" in run(model, "--verifier", "typical", "--temperature", "1").stderr


class Recorder(StringIO):
    """A stdout that knows what had reached its reader."""

    flushed = ""

    def flush(self) -> None:
        self.flushed = self.getvalue()


def test_text_reaches_the_reader_before_the_next_round(model: str) -> None:
    from specdec_core.cli.run import _generate

    out = Recorder()
    result = object()

    class Fake:
        tokenizer = None

        def stream(self, *_: Any, **__: Any) -> Iterator[StreamChunk]:
            for chunk in ("one ", "two "):
                yield StreamChunk(chunk, [])
                assert out.flushed.endswith(chunk)
            yield StreamChunk("three", [], result)  # type: ignore[arg-type]

    assert _generate(Fake(), "a", None, out, trace=False) is result  # type: ignore[arg-type, comparison-overlap]
    assert out.flushed == "one two three\n"


def test_a_stream_gives_what_a_round_committed_before_the_next_begins(model: str) -> None:
    decoder = SpecDecoder.from_pretrained(model)
    rounds: list[int] = []
    chunks = decoder.stream(
        "abcdefabc",
        SamplingParams(max_new_tokens=6),
        watch=lambda done: rounds.append(len(done.outcome.tokens[0])),
    )
    seen = [(len(rounds), chunk.text) for chunk in chunks]
    assert seen == [(1, "defg"), (2, "h"), (3, "i")]
    assert rounds == [4, 1, 1]


def test_libraries_keep_quiet_and_specdec_warns_in_one_line(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import warnings

    from transformers.utils import logging as library

    before = (library.get_verbosity(), library.is_progress_bar_enabled())
    original = SpecDecoder.stream

    def noisy(self: SpecDecoder, *args: Any, **options: Any) -> Any:
        print("a plugin prints")
        warnings.warn("a library warns", stacklevel=1)
        assert not library.get_logger("transformers.noise").isEnabledFor(logging.WARNING)
        assert not library.is_progress_bar_enabled()
        logging.getLogger("nobody.set.up").warning("somebody warns")
        logging.getLogger("specdec").warning("one\nthing")
        return original(self, *args, **options)

    monkeypatch.setattr(SpecDecoder, "stream", noisy)
    done = run(model, "-n", "1")
    assert done.stdout == "b\n"
    assert done.stderr.splitlines()[:-1] == ["a plugin prints", "specdec: warning: one thing"]
    assert logging.getLogger("specdec").handlers == []
    assert (library.get_verbosity(), library.is_progress_bar_enabled()) == before


# --- where the prompt comes from ------------------------------------------------------------------


def test_a_file_is_the_prompt_but_for_its_last_line_break(model: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    for content, tokens in (
        (b"x\na", 3),
        (b"x\na\n", 3),
        (b"x\r\na\r\n", 4),
        (b"a\n\n", 2),
        (b"\xef\xbb\xbfa", 1),
    ):
        file.write_bytes(content)
        value = json.loads(said("run", "--target", model, "-f", str(file), "-n", "1", "--json"))
        assert value["stats"]["prompt_tokens"] == tokens


@pytest.mark.parametrize("more", [[], ["-f", "-"]])
def test_stdin_is_the_prompt(model: str, more: list[str]) -> None:
    assert said("run", "--target", model, "-n", "3", *more, stdin="abc\n") == "def\n"


def test_stdin_is_not_read_where_there_is_a_prompt(model: str) -> None:
    assert said("run", "--target", model, "-n", "3", "-p", "a", stdin="xyz") == "bcd\n"


def test_messages_in_a_file_are_a_chat(model: str, tmp_path: Path) -> None:
    file = tmp_path / "messages.json"
    file.write_text('[{"role": "system", "content": "be brief"}, {"role": "user", "content": "x"}]')
    args = ["run", "--target", model, "-f", str(file), "-n", "1", "--json"]
    chat = json.loads(said(*args))["stats"]["prompt_tokens"]
    assert chat == len("<system>be brief<user>x:")
    assert json.loads(said(*args, "--chat"))["stats"]["prompt_tokens"] == chat
    assert json.loads(said(*args, "--raw"))["stats"]["prompt_tokens"] == len(file.read_text())


def test_chat_wraps_the_prompt_once_and_raw_does_not(model: str) -> None:
    assert run_object(model, "-n", "1", "--chat")["stats"]["prompt_tokens"] == len("<user>a:")
    assert run_object(model, "-n", "1", "--raw")["stats"]["prompt_tokens"] == len("a")
    assert run_object(model, "-n", "1")["stats"]["prompt_tokens"] == len("a")


def test_a_tokenizer_without_chat_template_is_an_error(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "plain", template=None)
    line = error_of("run", "--target", str(folder), "--chat", "-p", "a")
    assert "has no chat template" in line
