"""`specdec run`: penalties, lengths, log-probabilities and several samples each have an effect."""

from __future__ import annotations

import json
import math

import cli_support
import pytest
from cli_support import error_of, run, run_object, run_text

model = cli_support.model


def test_penalties_on_what_was_generated(model: str) -> None:
    """The digits 0 and 1 follow each other; a penalty above log(0.6/0.4) = 0.41 lets a 2 follow."""
    assert run_text(model, "-n", "5", prompt="0") == "10101"
    assert run_text(model, "-n", "3", "--presence-penalty", "0.5", prompt="0") == "102"
    assert run_text(model, "-n", "5", "--presence-penalty", "0.3", prompt="0") == "10101"
    assert run_text(model, "-n", "5", "--frequency-penalty", "0.3", prompt="0") == "10102"


def test_no_repeat_ngram_size(model: str) -> None:
    assert run_text(model, "-n", "3", "--no-repeat-ngram-size", "2", prompt="0") == "102"
    assert run_text(model, "-n", "3", "--no-repeat-ngram-size", "3", prompt="0") == "101"


def test_min_new_tokens(model: str) -> None:
    assert run_text(model, "-n", "5", prompt="y") == "z"
    assert run_text(model, "-n", "5", "--min-new-tokens", "3", prompt="y") == "zabcd"


def test_include_stop(model: str) -> None:
    assert run_text(model, "--stop", "efg") == "bcd"
    assert run_text(model, "--stop", "efg", "--include-stop") == "bcdefg"


def test_logprobs(model: str) -> None:
    value = run_object(model, "-n", "2", "--logprobs", "2")
    assert [token["token_id"] for token in value["logprobs"]] == value["token_ids"]
    for token, follower in zip(value["logprobs"], value["token_ids"], strict=True):
        assert token["logprob"] == pytest.approx(math.log(0.5), abs=1e-3)
        assert [one for one, _ in token["top"]] == [follower, follower + 1]
        assert token["top"][1][1] == pytest.approx(math.log(0.3), abs=1e-3)
    assert [token["top"] for token in run_object(model, "-n", "2", "--logprobs", "0")["logprobs"]] == [[], []]
    assert "logprobs" not in run_object(model, "-n", "2")


def test_samples(model: str) -> None:
    options = ["-n", "6", "--temperature", "1", "--seed", "1"]
    values = json.loads(run(model, *options, "--samples", "3", "--json").stdout)
    texts = [value["text"] for value in values]
    assert len({value["seed"] for value in values}) == 3
    assert texts[0] == run_text(model, *options)
    done = run(model, *options, "--samples", "3")
    assert done.stdout.split("\n---\n") == [*texts[:-1], texts[-1] + "\n"]
    assert f", {sum(value['stats']['new_tokens'] for value in values)} tokens, " in done.stderr
    again = run_text(model, *options[:-1], str(values[2]["seed"]))
    assert texts[2] == again


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--samples 0 --json", "--samples 0: give at least 1"),
        ("--samples 2 --trace", "--trace shows one text at a time; leave out --samples"),
        ("--samples 1.9", "1.9 is no whole number"),
        ("--logprobs 2", "--logprobs 2 shows in --json or --input only; add --json"),
        ("--logprobs -1 --json", "logprobs=-1 is not allowed"),
        ("--min-new-tokens -1", "min_new_tokens=-1 is not allowed"),
        ("--min-new-tokens x", "x is no whole number"),
        ("--presence-penalty x", "x is no number"),
        ("--frequency-penalty inf", "frequency_penalty=inf is not allowed"),
        ("--no-repeat-ngram-size -1", "no_repeat_ngram_size=-1 is not allowed"),
    ],
)
def test_wrong_values(model: str, args: str, words: str) -> None:
    assert words in error_of("run", "--target", model, "-p", "a", *args.split())
