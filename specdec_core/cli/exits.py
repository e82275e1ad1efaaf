"""How a command ends: its exit code, and the one line that says why it failed.

0 is fine, 1 a run that failed, 2 wrong use, 130 Ctrl-C. A closed stdout ends a command quietly.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from specdec_core.contract.errors import SpecdecError, UsageError

FAILED, WRONG_USE = 1, 2
_DEBUG = "specdec.debug"


def _remember_debug(context: typer.Context, wanted: bool) -> bool:
    context.meta[_DEBUG] = wanted
    return wanted


Debug = Annotated[
    bool,
    typer.Option(
        "--debug",
        help="Show tracebacks and library warnings, and stop where a drafter fails.",
        callback=_remember_debug,
        is_eager=True,
    ),
]


class SpecdecGroup(TyperGroup):
    """The command `specdec`: turns whatever a command raises into a line and an exit code."""

    def main(self, args: Sequence[str] | None = None, *_: Any, **options: Any) -> Any:
        """Run with `args`, or the arguments of the process, and exit."""
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # a narrow encoding must not end a run
                stream.reconfigure(errors="backslashreplace")
        try:
            code = super().main(args, **{**options, "standalone_mode": False})
        except SystemExit as error:
            code = 0 if isinstance(error.__context__, BrokenPipeError) else error.code
        except Exception as error:
            print(f"specdec: error: {one_line(error)}", file=sys.stderr)
            code = exit_code(error)
        sys.exit(code or 0)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _forget_stdout()
            return 0
        except Exception as error:
            if ctx.meta.get(_DEBUG) and not _is_control_flow(error):
                traceback.print_exception(error)
            raise


def exit_code(error: Exception) -> int:
    """Tell wrong use from a run that failed."""
    if _is_control_flow(error):
        return int(getattr(error, "exit_code", FAILED))
    return WRONG_USE if isinstance(error, UsageError) else FAILED


def one_line(error: Exception) -> str:
    """Say what went wrong in one line."""
    if hasattr(error, "format_message"):  # typer's own, wherever its release keeps the class
        text = " ".join(str(error.format_message()).split())
        return text[:1].lower() + text[1:].removesuffix(".")
    text = " ".join(str(error).split())
    if isinstance(error, SpecdecError):
        return text
    if isinstance(error, MemoryError) or "memory" in type(error).__name__.lower() or "allocate" in text:
        sentence = text.partition(". ")[0] or "nothing left"
        return f"out of memory: {sentence}; use a smaller model, a shorter prompt, or --dtype bfloat16"
    name = type(error).__name__
    return f"{name}: {text} (--debug shows where)" if text else f"{name} (--debug shows where)"


def _is_control_flow(error: Exception) -> bool:
    return hasattr(error, "format_message") or isinstance(error, (typer.Exit, typer.Abort))


def _forget_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not fail too."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # not a real file
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
