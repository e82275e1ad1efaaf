"""The tree of errors."""

from __future__ import annotations

import pickle

import pytest

from specdec_core.contract import errors
from specdec_core.contract.errors import SpecdecError

CLASSES = [value for value in vars(errors).values() if isinstance(value, type)]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_is_in_the_tree_carries_one_line_and_survives_pickling(cls: type[SpecdecError]) -> None:
    error = cls("one\ntwo")
    assert isinstance(error, SpecdecError)
    assert str(error) == "one two"
    assert str(pickle.loads(pickle.dumps(error))) == "one two"
    assert f" {cls.__name__} " in f"{errors.__doc__}".replace("\n", " ")


def test_errors_about_a_value_are_value_errors() -> None:
    assert {cls.__name__ for cls in CLASSES if issubclass(cls, ValueError)} == {
        "UsageError",
        "InvalidParameter",
        "InvalidSpec",
        "UnknownPlugin",
        "AmbiguousPlugin",
        "IncompatiblePair",
        "UnsupportedModel",
    }
    assert issubclass(errors.DecoderBusy, RuntimeError)


def test_a_drafter_error_tells_drafter_and_rule() -> None:
    error = errors.DraftContractViolation("drafter 'x': id 9", drafter="x", rule="ids are below V")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.drafter, copy.rule) == ("x", "ids are below V")
