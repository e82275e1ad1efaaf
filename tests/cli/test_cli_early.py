"""What is wrong with a drafter or a verifier is told before the slow libraries are imported."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cli_support import process

_CODE = """
import json, sys
from specdec_core.cli import main
try:
    main()
finally:
    print(json.dumps([name for name in ("torch", "transformers") if name in sys.modules]))
"""


@pytest.mark.parametrize(
    ("args", "words", "imported"),
    [
        (["--drafter", "a::b"], "option ':b' has no value", []),
        (["--drafter", "nix"], "no drafter 'nix'", ["torch"]),
        (["--verifier", "nix"], "no verifier 'nix'", ["torch"]),
        (["--drafter", "small_model:depth=2"], "has no option 'depth'", ["torch"]),
    ],
)
def test_names_and_options_are_checked_first(args: list[str], words: str, imported: list[str]) -> None:
    done: Any = process("run", "--target", "/none", "-p", "a", *args, code=_CODE, SPECDEC_PLUGINS="")
    assert done.returncode == 2
    assert words in done.stderr
    assert set(json.loads(done.stdout)) <= set(imported)
