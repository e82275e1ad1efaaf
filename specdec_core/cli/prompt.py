"""Where a prompt comes from: an option, a file or stdin; text or chat messages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import typer

from specdec_core.contract.errors import InvalidParameter, UsageError

Messages = list[dict[str, Any]]


def read_prompt(text: str | None, file: str | None, chat: bool | None) -> str | Messages:
    """Give the prompt as text, or as messages for the target's chat template.

    chat: True wraps text as one user message, False takes all input as text; None: messages where the file
    or stdin is a JSON list of them.

    Raises:
        UsageError: no prompt, two of them, an empty or an unreadable one.
    """
    if text is not None and file is not None:
        raise UsageError("--prompt and --file are both given; keep one")
    if text is not None:
        prompt, name = text, "--prompt"
    else:
        prompt, name = _read(file)
    if not prompt:
        raise InvalidParameter(f"the prompt is empty ({name}); give at least one token")
    messages = None if text is not None or chat is False else _messages(prompt, name)
    if messages is not None:
        return messages
    return [{"role": "user", "content": prompt}] if chat else prompt


def _read(file: str | None) -> tuple[str, str]:
    """Read a file or stdin, without its last line break; give its text and its name."""
    if file is None or file == "-":
        if sys.stdin is None or (file is None and sys.stdin.isatty()):
            raise UsageError("no prompt; give --prompt TEXT or --file FILE, or pipe text in")
        content, name = typer.get_binary_stream("stdin").read(), "stdin"
    else:
        content, name = _content(file), file
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"{name} is not UTF-8 text (byte {error.start}); convert it") from error
    return text.removesuffix("\n").removesuffix("\r"), name


def _content(file: str) -> bytes:
    try:
        return Path(file).expanduser().read_bytes()
    except OSError as error:
        raise InvalidParameter(f"--file {file}: {error.strerror or error}; name a text file") from error


def _messages(text: str, name: str) -> Messages | None:
    """Recognise a JSON list of objects, and insist that they are messages."""
    if not text.lstrip().startswith("["):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    if not found or not all(isinstance(item, dict) for item in found):
        return None
    for i, message in enumerate(found):
        if not isinstance(message.get("role"), str):
            raise InvalidParameter(
                f"{name} is a JSON list of objects, but number {i} has no role and so is no chat message; "
                "add it, or take all of it as text with --raw"
            )
    return list(found)
