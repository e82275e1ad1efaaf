"""Methods as users write them."""

from __future__ import annotations

import re

import pytest

from specdec_core import SpecdecError
from specdec_core.bench.methods import MethodSpec, Run, parse_method, parse_methods


def test_a_drafter_with_its_length_and_verifier() -> None:
    assert parse_method("prompt_lookup", 3, "greedy") == MethodSpec(
        "prompt_lookup", "prompt_lookup", draft_tokens=3, verifier="greedy"
    )
    spec = parse_method("small_model:model=/a/b,temperature=1@4@block")
    assert (spec.drafter, spec.draft_tokens, spec.verifier) == (
        "small_model:model=/a/b,temperature=1",
        4,
        "block",
    )
    assert parse_method("x@auto", 3).draft_tokens == "auto"
    assert parse_method("x@match@2").verifier == "match"


def test_references() -> None:
    assert parse_method("hf").reference
    spec = parse_method("hf:prompt_lookup:num_tokens=4")
    assert (spec.drafter, spec.options) == ("prompt_lookup", {"num_tokens": "4"})
    assert parse_method("hf:assistant:model=a/b").options == {"model": "a/b"}


def test_plain_decoding_comes_first_and_once() -> None:
    assert [spec.text for spec in parse_methods(["hf", "a@2"])] == ["none", "hf", "a@2"]
    assert [spec.text for spec in parse_methods(["hf", "none"])] == ["none", "hf"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a@2@3", "write DRAFTER, DRAFTER@K, DRAFTER@VERIFIER or DRAFTER@K@VERIFIER"),
        ("a@", "write DRAFTER, DRAFTER@K, DRAFTER@VERIFIER or DRAFTER@K@VERIFIER"),
        ("hf:lookup", "no such reference; there are hf, hf:prompt_lookup"),
        ("hf:prompt_lookup:tokens=4", "has no option 'tokens'; options: num_tokens, max_ngram"),
        ("hf:prompt_lookup:num_tokens=0", "num_tokens must be a whole number of at least 1"),
        ("hf:prompt_lookup:num_tokens=x", "num_tokens must be a whole number of at least 1"),
        ("hf:assistant", "write hf:assistant:model=ID_OR_PATH"),
        ("hf:assistant:model=a,schedule=b", "schedule is constant, heuristic"),
        ("", "empty name"),
    ],
)
def test_wrong_methods(text: str, words: str) -> None:
    with pytest.raises(SpecdecError, match=re.escape(words)):
        parse_method(text)


def test_a_method_given_twice() -> None:
    with pytest.raises(SpecdecError, match="'a' is given twice"):
        parse_methods(["a", "b", "a"])


def test_a_run_survives_json() -> None:
    run = Run(1.0, [[1, 2]], 2, widths={3: 1})
    value = run.to_dict() | {"widths": {"3": 1}}
    assert Run.of(value) == run
    assert run.new_tokens == 2
