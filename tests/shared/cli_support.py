"""What the tests of the command line share: a model folder, and ways to run a command."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import markov_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from specdec_core.cli.app import app

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
AFTER_A = ALPHABET[1:]


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer of one token a byte, and an EOS."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = template
    return fast


def make_model(folder: Path, *, template: str | None = TEMPLATE, step: int = 1) -> Path:
    """Save a llama that says the alphabet on, and after it the EOS, and after that the alphabet again.

    A letter is followed by the next one with chance 1/2, by the two behind that with 0.3 and 0.2; the digits
    0 and 1 follow each other with 0.6, and 2 follows them with 0.4. `step` leaves letters out.
    """
    tokenizer = byte_tokenizer(template)
    vocab = len(tokenizer)

    def id_of(text: str) -> int:
        found: int = tokenizer.convert_tokens_to_ids(text)
        return found

    log_p = torch.full((vocab, vocab), -30.0)
    log_p[:, id_of("a")] = -20.0  # after everything else
    chain = [*ALPHABET[::step], "<end>"]
    for i, letter in enumerate(chain):
        for jump, chance in ((1, 0.5), (2, 0.3), (3, 0.2)):
            log_p[id_of(letter), id_of(chain[(i + jump) % len(chain)])] = math.log(chance)
    for current, other in (("0", "1"), ("1", "0")):
        log_p[id_of(current), id_of(other)] = math.log(0.6)
        log_p[id_of(current), id_of("2")] = math.log(0.4)
    model = markov_llama(log_p)
    model.config.eos_token_id = model.generation_config.eos_token_id = id_of("<end>")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the alphabet model."""
    return str(make_model(tmp_path_factory.mktemp("models") / "alphabet"))


def cli(*args: str, stdin: str | bytes | None = None) -> Result:
    """Run a command in this process."""
    return CliRunner().invoke(app, list(args), input=stdin)


def said(*args: str, stdin: str | bytes | None = None) -> str:
    """What a command that succeeds prints on stdout."""
    done = cli(*args, stdin=stdin)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def objects(*args: str) -> Any:
    """What a command prints with `--json`."""
    return json.loads(said(*args, "--json"))


def run(model: str, *args: str, prompt: str = "a") -> Result:
    """A run that succeeds."""
    done = cli("run", "--target", model, "-p", prompt, "--device", "cpu", *args)
    assert done.exit_code == 0, done.stderr
    return done


def run_text(model: str, *args: str, prompt: str = "a") -> str:
    """The text of a run, without the line break that ends it."""
    out = run(model, *args, prompt=prompt).stdout
    assert out.endswith("\n")
    return out[:-1]


def run_object(model: str, *args: str, prompt: str = "a") -> dict[str, Any]:
    """The object of a run with `--json`."""
    done = run(model, "--json", *args, prompt=prompt)
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def error_of(*args: str, stdin: str | bytes | None = None, code: int = 2) -> str:
    """The one line that a command fails with."""
    done = cli(*args, stdin=stdin)
    assert (done.exit_code, done.stdout) == (code, ""), (done.exit_code, done.output)
    [line] = done.stderr.splitlines()
    assert line.startswith("specdec: error: ")
    return line.removeprefix("specdec: error: ")


def process(*args: str, code: str = "from specdec_core.cli import main; main()", **env: str) -> Any:
    """Run a command in a process of its own; give what `subprocess.run` gives."""
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
