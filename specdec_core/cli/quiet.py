"""Keep stdout for what was asked for: no progress bars, no library warnings, no stray prints.

What specdec itself warns of appears as one line each on stderr.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import TextIO

_SILENCE = {  # read when the libraries are imported
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "TORCH_LOGS": "-all",
}


class _OneLine(logging.Handler):
    """Prints a record as one line, on whatever stderr is then."""

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        print(f"specdec: {record.levelname.lower()}: {text}", file=sys.stderr)


@contextmanager
def quiet(*, offline: bool = False, debug: bool = False) -> Iterator[TextIO]:
    """Silence libraries, and send what they or plugins print to stderr; give the real stdout.

    offline: keep Hugging Face libraries off the network, in a drafter's own loading too.
    debug: let libraries warn.
    """
    with ExitStack() as stack:
        out = sys.stdout
        stack.enter_context(redirect_stdout(sys.stderr))
        stack.enter_context(_logging(logging.WARNING if debug else logging.ERROR))
        stack.enter_context(_environment({"HF_HUB_OFFLINE": "1"} if offline else {}))
        if not debug:
            unset = {name: value for name, value in _SILENCE.items() if name not in os.environ}
            stack.enter_context(_environment(unset))
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        yield out


@contextmanager
def silent_transformers(*, debug: bool = False) -> Iterator[None]:
    """Stop transformers from logging and drawing bars, also where it was imported before."""
    if debug:
        yield
        return
    from transformers.utils import logging as library

    level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(level)
        if bars:
            library.enable_progress_bar()


@contextmanager
def _logging(level: int) -> Iterator[None]:
    """Print what specdec warns of, and of loggers that nobody set up what is at least of this level."""
    logger, handler = logging.getLogger("specdec"), _OneLine(logging.WARNING)
    last = logging.lastResort
    before = last.level if last else level
    logger.addHandler(handler)
    if last:
        last.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        if last:
            last.setLevel(before)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables for a while."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
