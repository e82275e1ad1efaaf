"""`specdec run --json-schema` and `--regex`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import cli_support
import pytest
from cli_support import cli, error_of, run_object, run_text

pytest.importorskip("llguidance")

model = cli_support.model
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ann", "bob"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}


def test_the_text_is_json_of_the_schema(model: str, tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA), encoding="utf-8")
    for schema in (str(file), json.dumps(SCHEMA)):
        said = run_object(model, "--json-schema", schema, "--seed", "3", "--temperature", "1", "-n", "400")
        assert said["finish_reason"] == "eos"
        found = json.loads(said["text"])
        assert list(found) == ["name", "size"]
        assert found["name"] in ("ann", "bob")


def test_the_text_matches_the_regex(model: str) -> None:
    text = run_text(model, "--regex", "abc[x-z]{2}[0-9]")
    assert re.fullmatch("abc[x-z]{2}[0-9]", text)


def test_each_row_of_a_file_keeps_it(model: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "k", "temperature": 1.0}\n', encoding="utf-8")
    done = cli("run", "--target", model, "--device", "cpu", "--input", str(file), "--regex", "[xy]{3}[0-9]")
    assert done.exit_code == 0, done.stderr
    texts = [json.loads(line)["text"] for line in done.stdout.splitlines()]
    assert len(texts) == 2
    assert all(re.fullmatch("[xy]{3}[0-9]", text) for text in texts)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            ["--json-schema", "{}", "--regex", "a"],
            "--json-schema and --regex go one at a time; leave one out",
        ),
        (
            ["--json-schema", "no/such.json"],
            "--json-schema no/such.json: No such file or directory; name a file",
        ),
        (["--json-schema", "{oops"], "the JSON schema {oops is no JSON: "),
        (["--json-schema", '{"type": "foo"}'], 'json_schema({"type": "foo"}): Invalid type: foo'),
        (["--regex", "[0-9"], "regex([0-9): "),
    ],
)
def test_mistakes_show_before_a_target_is_loaded(options: list[str], error: str) -> None:
    assert error_of("run", "--target", "no/such/model", "-p", "a", *options).startswith(error)


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    line = error_of("run", "--target", "no/such/model", "-p", "a", "--regex", "a")
    assert line.endswith("pip install 'specdec-core[grammar]'")
