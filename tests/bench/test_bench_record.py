"""The measurements on disk: resumed, never mixed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec_core import SpecdecError
from specdec_core.bench.record import Record


def add(record: Record, repeat: int) -> None:
    record.add("unit", batch=1, temperature=0.0, repeat=repeat, group="g", category="c", runs={})


def test_a_second_start_knows_what_was_measured(tmp_path: Path) -> None:
    file = str(tmp_path / "new" / "out.jsonl")
    first = Record(file)
    first.agree({"repeats": 3})
    add(first, 1)
    second = Record(file)
    second.agree({"repeats": 3})
    add(second, 2)
    assert list(Record(file).units()) == [(1, 0.0, 1, "g"), (1, 0.0, 2, "g")]
    assert len(Path(file).read_text().splitlines()) == 3


def test_a_line_cut_off_in_mid_write_is_taken_away(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    record = Record(str(file))
    add(record, 1)
    whole = file.read_text()
    file.write_text(whole + whole[: len(whole) // 2])
    again = Record(str(file))
    assert list(again.units()) == [(1, 0.0, 1, "g")]
    assert file.read_text() == whole
    add(again, 2)
    assert [json.loads(line)["repeat"] for line in file.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({"repeats": 5, "dtype": "float32"}, "measured with repeats 3, and now it is 5"),
        ({"repeats": 3, "dtype": "bfloat16"}, 'with dtype "float32", and now it is "bfloat16"'),
        ({"repeats": 3}, 'with dtype "float32", and now it is null'),
        ({"repeats": 3, "dtype": "float32", "new": 1}, "with new null, and now it is 1"),
    ],
)
def test_settings_that_differ_are_named(tmp_path: Path, now: dict[str, Any], words: str) -> None:
    file = str(tmp_path / "out.jsonl")
    Record(file).agree({"repeats": 3, "dtype": "float32"})
    with pytest.raises(SpecdecError, match=words):
        Record(file).agree(now)
    Record(file, overwrite=True).agree(now)


@pytest.mark.parametrize("text", ["a diary\n", '{"other": 1}\n', "a diary without an end"])
def test_a_foreign_file_is_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "diary"
    file.write_text(text)
    with pytest.raises(SpecdecError, match="no measurement"):
        Record(str(file))
    assert file.read_text() == text


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(SpecdecError, match="--output"):
        Record(str(tmp_path))
