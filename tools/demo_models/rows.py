"""Rows of the demo corpus: read, write, show as training text, and key for the held-out split."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

WRITTEN = ("story", "qa", "help", "code", "edit")
BY_RULE = ("copy", "fix", "replace", "rename", "sort", "count")
KINDS = WRITTEN + BY_RULE
END_OF_TURN, END_OF_TEXT = "<|im_end|>", "<|endoftext|>"


class Row(TypedDict):
    """One task and its answer."""

    kind: str
    prompt: str
    answer: str


def read_rows(path: Path) -> list[Row]:
    """Read JSON lines, compressed with xz or not."""
    open_text = lzma.open if path.suffix == ".xz" else open
    with open_text(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write JSON lines."""
    with path.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def number_of(text: str) -> int:
    """Give a text a number that is the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def chat_prompt(prompt: str) -> str:
    """Show a question as the chat template does, up to where the answer begins."""
    return f"<|im_start|>user\n{prompt}{END_OF_TURN}\n<|im_start|>assistant\n"


def as_text(row: Row, form: float) -> str:
    """Show a row as chat, as a plain prompt with its answer, or as a plain answer.

    `form` in [0, 1) decides; the plain forms teach the model to go on without a chat template.
    """
    if form < 0.65:
        return chat_prompt(row["prompt"]) + row["answer"] + END_OF_TURN + "\n"
    if form < 0.92 or row["kind"] in BY_RULE:
        return row["prompt"] + "\n\n" + row["answer"] + END_OF_TEXT
    return row["answer"] + END_OF_TEXT
