"""What a plugin raises names it, unless it says enough itself, or is no fault of the plugin."""

from __future__ import annotations

import pytest
import torch

from specdec_core import DrafterError, PluginError, SpecdecError, UsageError
from specdec_core.contract.blame import blaming, blaming_drafter, described, one_line


class Mute(Exception):
    """Its text cannot be made."""

    def __str__(self) -> str:
        raise RuntimeError


def fault(error: BaseException) -> SpecdecError:
    return PluginError(f"it raised {described(error)}")


def test_what_is_raised_is_the_cause_of_an_error_that_names_the_plugin() -> None:
    cause = KeyError("weights")
    with pytest.raises(PluginError, match="it raised KeyError: 'weights'") as caught, blaming(fault):
        raise cause
    assert caught.value.__cause__ is cause


def test_a_generator_that_is_exhausted_in_a_plugin_is_a_fault_like_any() -> None:
    with pytest.raises(PluginError, match="it raised StopIteration"), blaming(fault):
        next(iter(()))


@pytest.mark.parametrize("error", [UsageError("not this"), MemoryError(), torch.OutOfMemoryError("full")])
def test_what_says_enough_goes_through_and_so_does_a_lack_of_memory(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, blaming(fault):
        raise error
    assert caught.value is error


def test_a_lack_of_memory_goes_through_whatever_is_caught() -> None:
    with pytest.raises(MemoryError), blaming(fault, passing=lambda _: False, catching=BaseException):
        raise MemoryError


@pytest.mark.parametrize("error", [UsageError("not now"), DrafterError("worn out"), ValueError("no")])
def test_in_mid_run_every_error_gets_the_name_of_the_drafter(error: Exception) -> None:
    words = rf"'d': observe raised {type(error).__name__}: "
    with pytest.raises(DrafterError, match=words) as caught, blaming_drafter("d", "observe"):
        raise error
    assert caught.value.drafter == "d"


def test_an_error_that_names_a_member_keeps_its_name() -> None:
    whole, member = blaming_drafter("a,b", "admit"), blaming_drafter("b", "admit")
    with pytest.raises(DrafterError) as caught, whole, member:
        raise ValueError("no")
    assert caught.value.drafter == "b"


def test_an_error_in_one_line() -> None:
    assert described(ValueError("one\n  two")) == "ValueError: one two"
    assert (described(ValueError()), described(Mute())) == ("ValueError", "Mute: (its text cannot be shown)")
    assert (described(UsageError("why")), one_line(UsageError("why"))) == ("UsageError: why", "why")
