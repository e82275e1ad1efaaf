"""What is wrong with a drafter or a verifier is told before the slow libraries are imported."""

from __future__ import annotations

import json
from typing import Any

from cli_support import process

_CODE = """
import json, sys
from specdec_core.cli.app import command
for args in json.loads(sys.argv[1]):
    try:
        command().main(["run", "--target", "/none", "-p", "a", *args], prog_name="specdec")
    except SystemExit as end:
        print(json.dumps([end.code, [name for name in ("torch", "transformers") if name in sys.modules]]))
"""
# Arguments, words of the error, what may be imported by then; all in one process, so that never shrinks.
_WRONG: list[tuple[list[str], str, set[str]]] = [
    (["--drafter", "a::b"], "option ':b' has no value", set()),
    (["--drafter", "nix"], "no drafter 'nix'", {"torch"}),
    (["--verifier", "nix"], "no verifier 'nix'", {"torch"}),
    (["--drafter", "small_model:depth=2"], "has no option 'depth'", {"torch"}),
]


def test_names_and_options_are_checked_first() -> None:
    done: Any = process(json.dumps([args for args, _, _ in _WRONG]), code=_CODE, SPECDEC_PLUGINS="")
    said, errors = done.stdout.splitlines(), done.stderr.splitlines()
    assert len(said) == len(errors) == len(_WRONG), done.stdout + done.stderr
    for line, error, (_, words, may) in zip(said, errors, _WRONG, strict=True):
        code, imported = json.loads(line)
        assert code == 2
        assert words in error
        assert set(imported) <= may
