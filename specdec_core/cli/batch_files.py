"""JSON lines in and out: what a row asks for, and which rows an output file holds already."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import typer

from specdec_core.cli.batch_settings import Settings, difference, digest_of
from specdec_core.contract.errors import InvalidParameter, UsageError
from specdec_core.contract.sampling_params import SamplingParams

_OPTIONS = [name for name in SamplingParams.model_fields if name not in ("constraint", "logits_processors")]
_HEAD = b'{"line": '


@dataclass(frozen=True)
class Entry:
    """One row of the input; without params it is wrong, and `error` says how."""

    line: int
    id: str | int | None = None
    prompt: Any = None
    params: SamplingParams | None = None
    error: str = ""
    digest: str = ""  # of what the row asks for

    @property
    def key(self) -> str:
        """What a row is known by in the output."""
        return _key(self.line, self.id)


class InputFile:
    """The rows of a file, or of stdin: read anew each time, so that none are held.

    Raises:
        InvalidParameter: it cannot be read.
    """

    def __init__(self, name: str, params: SamplingParams, *, chat: bool | None) -> None:
        self.name = "stdin" if name == "-" else name
        self._path, self._params, self._chat = Path(name).expanduser(), params, chat
        self._held = typer.get_binary_stream("stdin").read().splitlines(True) if name == "-" else None
        if self._held is None:
            try:
                self._path.open("rb").close()
            except OSError as error:
                raise InvalidParameter(f"--input {name}: {error.strerror}; name a file") from error

    def entries(self) -> Iterator[Entry]:
        """Give every row but empty lines, wrong ones too."""
        lines: dict[str, int] = {}
        for number, raw in enumerate(self._lines(), 1):
            if not raw.strip():
                continue
            entry = parse(number, raw, self._params, self._chat)
            first = lines.setdefault(entry.key, number)
            if first != number:
                error = entry.error or f"id {entry.id!r} is that of line {first}; ids must differ"
                entry = Entry(number, error=error)
            yield entry

    def _lines(self) -> Iterator[bytes]:
        if self._held is not None:
            yield from self._held
            return
        with self._path.open("rb") as file:
            yield from file


def parse(number: int, raw: bytes, params: SamplingParams, chat: bool | None) -> Entry:
    """Read a row; `params` are what it does not set itself."""
    identity = None
    try:
        row = _object(raw)
        identity = row.pop("id", None)
        digest = digest_of(row)
        if not (identity is None or type(identity) in (int, str)):
            wrong, identity = identity, None
            raise InvalidParameter(f"id={wrong!r} is not allowed: it must be text or a whole number")
        prompt = _prompt(row, chat)
        unknown = sorted(set(row) - set(_OPTIONS))
        if unknown:
            known = ", ".join(["id", "prompt", "messages", *_OPTIONS])
            raise InvalidParameter(f"unknown key {unknown[0]!r}; known: {known}")
        return Entry(number, identity, prompt, params.replace(**row), digest=digest)
    except UsageError as error:
        return Entry(number, identity, error=str(error))


def _object(raw: bytes) -> dict[str, Any]:
    try:
        row = json.loads(raw.decode("utf-8-sig"))
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"not UTF-8 text (byte {error.start})") from error
    except UnicodeEncodeError as error:
        raise InvalidParameter("holds half a surrogate pair, which is no character") from error
    except ValueError as error:
        raise InvalidParameter(f"not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidParameter("not JSON that can be read: nested too deep") from error
    if not isinstance(row, dict):
        raise InvalidParameter('not a JSON object; write {"prompt": TEXT}')
    return row


def _prompt(row: dict[str, Any], chat: bool | None) -> Any:
    """Take the prompt out of a row."""
    if ("prompt" in row) == ("messages" in row):
        raise InvalidParameter('needs either "prompt" or "messages"')
    if "messages" in row:
        messages = row.pop("messages")
        if chat is False:
            raise InvalidParameter('holds "messages", and --raw takes text; leave one out')
        if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
            raise InvalidParameter('"messages" must be a list of objects, each with a "role"')
        return messages
    prompt = row.pop("prompt")
    if isinstance(prompt, str) and prompt:
        return [{"role": "user", "content": prompt}] if chat else prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt) and not chat:
        return prompt
    if prompt in ("", []):
        raise InvalidParameter("the prompt is empty; give at least one token")
    raise InvalidParameter('"prompt" must be text, or without --chat a list of token ids')


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str)


class OutputFile:
    """Where rows are written: a file that may hold some already, or stdout.

    Raises:
        UsageError: it cannot be written to.
    """

    def __init__(self, name: str | None, *, overwrite: bool, other_than: str) -> None:
        self.name = name or "stdout"
        self._path = None if name is None or name == "-" else Path(name).expanduser().resolve()
        self.keeps = self._path is not None
        self._overwrite = overwrite
        if overwrite and not self.keeps:
            raise UsageError("--overwrite needs --output FILE")
        if self._path and (self._path.is_dir() or not self._path.parent.is_dir()):
            raise InvalidParameter(f"--output {name}: no file can be written there; name one in a folder")
        if self._path and self._path == Path(other_than).expanduser().resolve():
            raise InvalidParameter(f"--output {name} is the input; name another file")

    def done(self, settings: Settings) -> dict[str, str]:
        """Give the keys of the rows that stand there, and the digest of what each was asked for.

        A half-written last row is taken out, and so are rows that were refused: they may be right by now.

        Raises:
            InvalidParameter: it holds something else, or rows that were made with other settings.
        """
        if self._path is None or self._overwrite or not self._path.is_file():
            return {}
        done: dict[str, str] = {}
        kept = self._path.with_name(f".{self._path.name}.part")
        try:
            with self._path.open("rb") as file, kept.open("wb") as copy:
                for number, raw in enumerate(file, 1):
                    row = _written(raw, where := f"--output {self.name}: line {number}")
                    if row is not None and "error" not in row:
                        _check_settings(row.get("settings"), settings, where)
                        done[_key(row["line"], row.get("id"))] = str(row.get("input", ""))
                        copy.write(raw)
            if kept.stat().st_size != self._path.stat().st_size:
                shutil.copymode(self._path, kept)
                os.replace(kept, self._path)
        finally:
            kept.unlink(missing_ok=True)
        return done

    @contextmanager
    def opened(self, out: TextIO) -> Iterator[TextIO]:
        """Open it to write behind what is there."""
        if self._path is None:
            yield out
            return
        mode: Literal["w", "a"] = "w" if self._overwrite else "a"
        with self._path.open(mode, encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            yield file


def _check_settings(made: Any, now: Settings, where: str) -> None:
    changed = difference(made, now) if isinstance(made, dict) else ""
    if changed:
        raise InvalidParameter(f"{where} {changed}; set it back, name another file, or add --overwrite")


def _written(raw: bytes, where: str) -> dict[str, Any] | None:
    """Read a row that was written; None for half a row."""
    if not raw.endswith(b"\n") and (raw.startswith(_HEAD) or _HEAD.startswith(raw)):
        return None
    try:
        row = json.loads(raw)
    except ValueError:
        row = None
    if not isinstance(row, dict) or type(row.get("line")) is not int:
        raise InvalidParameter(f"{where} is no row of an earlier run; name another file, or add --overwrite")
    return row


def _key(line: int, identity: str | int | None) -> str:
    return f"line {line}" if identity is None else f"id {identity!r}"
