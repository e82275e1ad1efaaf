"""Whose fault it is: what a plugin raises becomes an error that names the plugin.

Plugins are listed without torch, so nothing here imports it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from specdec_core.contract.errors import DrafterError, SpecdecError


def described(error: BaseException) -> str:
    """Type and text of an exception, in one line."""
    text = _text(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def one_line(error: BaseException) -> str:
    """Type and text of an exception, in one line; the text alone of specdec's own errors."""
    return _text(error) if isinstance(error, SpecdecError) else described(error)


def _text(error: BaseException) -> str:
    try:
        return " ".join(str(error).split())[:400]
    except Exception:  # its `__str__` is a plugin's
        return "(its text cannot be shown)"


def copied(error: Exception) -> Exception:
    """Give an error like this one, with the same cause and place, for another caller; or else itself."""
    try:
        other = copy.copy(error)
    except Exception:  # not every error can be copied
        return error
    other.__cause__ = error.__cause__
    return other.with_traceback(error.__traceback__)


def is_ours(error: BaseException) -> bool:
    """Whether it is an error of specdec's own, which says what is wrong."""
    return isinstance(error, SpecdecError)


@contextmanager
def blaming(
    fault: Callable[[BaseException], SpecdecError],
    *,
    passing: Callable[[BaseException], bool] = is_ours,
    catching: type[BaseException] = Exception,
) -> Iterator[None]:
    """Turn what a plugin raises into an error that names it, chained to the cause.

    A lack of memory is no plugin's fault: `MemoryError` and `torch.OutOfMemoryError` go through as they are.

    Args:
        fault: makes the error that names the plugin, of what it raised.
        passing: which errors say enough, and go through too.
        catching: what is caught at all.
    """
    try:
        yield
    except catching as error:
        if passing(error) or _is_lack_of_memory(error):
            raise
        raise fault(error) from error


def blaming_drafter(name: str, call: str) -> AbstractContextManager[None]:
    """Turn what a drafter raises in mid-run into a `DrafterError` with its name, if it is none yet."""

    def fault(error: BaseException) -> DrafterError:
        return DrafterError(f"drafter {name!r}: {call} raised {described(error)}", drafter=name)

    return blaming(fault, passing=_names_a_drafter)


def _names_a_drafter(error: BaseException) -> bool:
    return isinstance(error, DrafterError) and bool(error.drafter)


def _is_lack_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")  # where it was not imported, it cannot have raised
    return isinstance(error, (MemoryError, getattr(torch, "OutOfMemoryError", MemoryError)))
