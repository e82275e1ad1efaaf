"""The measurements on disk: lines of JSON that are only ever added to, so that a second start goes on.

A line is a unit: what all methods did with one group of prompts in one repeat. A unit is written whole or not
at all, so the ratios within it are of runs that followed each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specdec_core.contract.errors import InvalidParameter

Key = tuple[int, float, int, str]  # batch, temperature, repeat, group


class Record:
    """Settings, and what was measured under them; in memory alone without a file.

    Raises:
        InvalidParameter: the file cannot be used, or holds measurements under other settings; names them.
    """

    def __init__(self, file: str | None, *, overwrite: bool = False) -> None:
        self._path = None if file is None else Path(file).expanduser()
        self.name = file or "memory"
        self.lines: list[dict[str, Any]] = []
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if overwrite:
                self._path.write_text("", encoding="utf-8")
            elif self._path.exists():
                self._load(self._path)
            self._path.open("a", encoding="utf-8").close()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidParameter(f"--output {file}: {error}; name a file that can be written") from error

    def _load(self, path: Path) -> None:
        """Read what is there; a last line that was cut off in mid-write is taken away."""
        raw = path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw) and not raw.lstrip().startswith(b'{"kind"'):
            raise InvalidParameter(f"--output {path}: no measurements of specdec bench; name another file")
        for number, line in enumerate(whole.decode("utf-8").splitlines(), start=1):
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if not isinstance(value, dict) or "kind" not in value:
                raise InvalidParameter(
                    f"--output {path} line {number}: no measurement of specdec bench; name another file, or "
                    "begin anew with --overwrite"
                )
            self.lines.append(value)
        if len(whole) < len(raw):
            with path.open("r+b") as file:
                file.truncate(len(whole))

    def add(self, kind: str, **values: Any) -> None:
        """Add a line, and have it on disk."""
        line = {"kind": kind, **values}
        self.lines.append(line)
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def of(self, kind: str) -> Iterator[dict[str, Any]]:
        """Give the lines of a kind, in order."""
        return (line for line in self.lines if line["kind"] == kind)

    def agree(self, settings: dict[str, Any]) -> None:
        """Note the settings, or insist that they are those of the file.

        Raises:
            InvalidParameter: one differs; names it and both values.
        """
        known = next(self.of("settings"), None)
        given = json.loads(json.dumps(settings))
        if known is None:
            self.add("settings", **given)
            return
        for name in [*given, *(set(known) - set(given) - {"kind"})]:
            before, now = known.get(name), given.get(name)
            if before != now:
                raise InvalidParameter(
                    f"--output {self.name} was measured with {name} {_shown(before)}, and now it is "
                    f"{_shown(now)}; use the same settings, another file, or --overwrite"
                )

    def units(self) -> dict[Key, dict[str, Any]]:
        """Give every unit measured so far."""
        return {
            (unit["batch"], unit["temperature"], unit["repeat"], unit["group"]): unit
            for unit in self.of("unit")
        }


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else text[:197] + "..."
