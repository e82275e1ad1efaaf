"""Tables that say the same without colours and cut nothing off."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

_GAP = 2


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print rows under the names of their columns; wraps in a terminal, one line a row elsewhere.

    right: columns to align on the right.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(highlight=False)
    if not sys.stdout.isatty():
        console.width = sum(_widths(columns, rows)) + _GAP * len(columns)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        print(line.rstrip())


def print_list(columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[Sequence[str]]) -> None:
    """Print rows in columns, and under each row its notes, which wrap in a terminal."""
    widths = _widths(columns, rows)
    print(_line(columns, widths))
    for row, below in zip(rows, notes, strict=True):
        print(_line(row, widths))
        for note in filter(None, below):
            print("\n".join(_wrapped(note, " " * 4)))


def print_text(text: str) -> None:
    """Print paragraphs, broken anew for a terminal but for those with indented lines or lists."""
    for i, paragraph in enumerate(text.split("\n\n")):
        lines = paragraph.splitlines()
        if not any(line.startswith((" ", "-", "*")) for line in lines):
            lines = _wrapped(" ".join(lines), "")
        print(("\n" if i else "") + "\n".join(lines))


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return (" " * _GAP).join(padded).rstrip()


def _wrapped(text: str, indent: str) -> list[str]:
    """Break a line for a terminal; leave it whole elsewhere."""
    if not sys.stdout.isatty():
        return [indent + text]
    width = max(shutil.get_terminal_size().columns, 40)
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
