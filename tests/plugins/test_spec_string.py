"""Texts such as `prompt_lookup:max_ngram=3,num_tokens=5` and the configs made from them."""

from __future__ import annotations

import contextlib
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, model_validator

from specdec_core.contract.errors import InvalidSpec, UsageError
from specdec_core.plugins.spec_string import ParsedSpec, make_config, parse_drafters, parse_verifier


class Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(description="a model")
    num_tokens: int = Field(4, ge=1, description="draft length")
    share: float = Field(0.5, description="a share")
    lazy: bool = Field(False, description="a switch")
    limit: int | None = Field(None, description="a limit")
    mode: Literal["fast", "wide"] = Field("fast", description="a mode")

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.limit is not None and self.limit < self.num_tokens:
            raise UsageError("limit is below num_tokens")
        return self


class Bare(BaseModel):
    """A config that forgot extra="forbid"."""

    strict_number: int = Field(1, strict=True)


class NoOptions(BaseModel):
    pass


class Aliased(BaseModel):
    lambda_: int = Field(1, alias="lambda")


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("prompt_lookup", [("prompt_lookup", {})]),
        ("a:x=1", [("a", {"x": "1"})]),
        ("a:x=1,y=2", [("a", {"x": "1", "y": "2"})]),
        ("a,b", [("a", {}), ("b", {})]),
        ("a:x=1,b", [("a", {"x": "1"}), ("b", {})]),
        ("a,x=1", [("a", {"x": "1"})]),
        ("a:x=1,y=2,b:z=3", [("a", {"x": "1", "y": "2"}), ("b", {"z": "3"})]),
        (
            "prompt_lookup:max_ngram=3,num_tokens=5,small_model:model=/a/b:c",
            [("prompt_lookup", {"max_ngram": "3", "num_tokens": "5"}), ("small_model", {"model": "/a/b:c"})],
        ),
        ("a:model=C:\\m,key=x=y:z", [("a", {"model": "C:\\m", "key": "x=y:z"})]),
        ("some-dist/a:x=1", [("some-dist/a", {"x": "1"})]),
        (" a : x = 1 , y=two words , b ", [("a", {"x": "1", "y": "two words"}), ("b", {})]),
    ],
)
def test_a_text_is_split_into_names_and_options(text: str, specs: list[tuple[str, dict[str, str]]]) -> None:
    assert parse_drafters(text) == [ParsedSpec(name, options) for name, options in specs]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "empty name"),
        ("  ", "empty name"),
        ("a,", "empty name"),
        ("a,,b", "empty name"),
        (":x=1", "empty name"),
        ("/a", "empty name"),
        ("dist/:x=1", "empty name"),
        ("x=1", "'x=1' comes before any drafter"),
        ("a:x", "option 'x' has no value; write a:x=VALUE"),
        ("a:x=", "option 'x' has no value"),
        ("a:x=1,y=", "option 'y' has no value"),
        ("a:", "an option has no name"),
        ("a:=1", "an option has no name; write a:option=1"),
        ("a:x=1,x=2", "option 'x' is given twice (1, 2)"),
    ],
)
def test_a_wrong_text_is_refused_with_the_text_and_the_remedy(text: str, part: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse_drafters(text)
    assert part in str(caught.value)
    assert repr(text) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_verifier_is_one() -> None:
    assert parse_verifier("rejection:x=1,y=2") == ParsedSpec("rejection", {"x": "1", "y": "2"})
    with pytest.raises(InvalidSpec, match="give one verifier, not 2"):
        parse_verifier("greedy,rejection")
    with pytest.raises(InvalidSpec, match="verifier '': empty name"):
        parse_verifier("")


NAMES = st.from_regex(r"[a-z][a-z0-9_]*", fullmatch=True)
VALUES = st.text("abc019:=/.- \\", min_size=1).map(str.strip).filter(bool)


@given(st.lists(st.tuples(NAMES, st.dictionaries(NAMES, VALUES)), min_size=1))
def test_what_is_written_is_read_back(specs: list[tuple[str, dict[str, str]]]) -> None:
    text = ",".join(
        name + ":" * bool(options) + ",".join(f"{key}={value}" for key, value in options.items())
        for name, options in specs
    )
    assert parse_drafters(text) == [ParsedSpec(name, options) for name, options in specs]


@given(st.text("ab:=,/ "))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidSpec):
        assert all(spec.name and all(spec.options.values()) for spec in parse_drafters(text))


def test_texts_become_the_types_of_the_fields() -> None:
    config = make_config(
        Config,
        {"model": "/m", "num_tokens": "5", "share": "0.25", "lazy": "true", "limit": "7", "mode": "wide"},
        "drafter 'x'",
    )
    assert config == Config(model="/m", num_tokens=5, share=0.25, lazy=True, limit=7, mode="wide")
    assert make_config(Bare, {"strict_number": "3"}, "drafter 'x'").strict_number == 3


def test_values_from_python_keep_their_types() -> None:
    assert make_config(Config, {"model": "/m", "num_tokens": 5}, "drafter 'x'").num_tokens == 5


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"num_tokens": "1.9"}, "num_tokens=1.9: input should be a valid integer"),
        ({"num_tokens": 1.9}, "num_tokens=1.9: input should be a valid integer"),
        ({"num_tokens": "x"}, "num_tokens=x: input should be a valid integer"),
        ({"num_tokens": "0"}, "num_tokens=0: input should be greater than or equal to 1"),
        ({"lazy": "maybe"}, "lazy=maybe: input should be a valid boolean"),
        ({"mode": "slow"}, "mode=slow: input should be 'fast' or 'wide'"),
        ({"limit": "2"}, "limit is below num_tokens"),
        ({"num_token": "3"}, "has no option 'num_token' (=3); did you mean 'num_tokens'? options:"),
    ],
)
def test_a_wrong_option_names_culprit_option_value_and_options(options: dict[str, object], part: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        make_config(Config, {"model": "/m", **options}, "drafter 'x'")
    message = str(caught.value)
    assert message.startswith("drafter 'x'")
    assert part in message
    assert message.endswith("options: model, num_tokens, share, lazy, limit, mode")
    assert "\n" not in message


def test_a_missing_option_is_named() -> None:
    with pytest.raises(
        InvalidSpec, match="drafter 'x': option 'model' is required; options: model, num_tokens"
    ):
        make_config(Config, {}, "drafter 'x'")


def test_an_unknown_option_is_refused_even_where_the_config_would_ignore_it() -> None:
    with pytest.raises(InvalidSpec, match="has no option 'y'"):
        make_config(Bare, {"y": "1"}, "drafter 'x'")
    with pytest.raises(InvalidSpec, match="it takes no options"):
        make_config(NoOptions, {"y": "1"}, "drafter 'x'")


def test_an_option_is_called_by_its_alias() -> None:
    assert make_config(Aliased, {"lambda": "3"}, "drafter 'x'").lambda_ == 3
    with pytest.raises(InvalidSpec, match=r"options: lambda$"):
        make_config(Aliased, {"lambda_": "3"}, "drafter 'x'")
