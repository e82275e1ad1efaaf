"""The command as a whole: help, version, exit codes, and that no message names a flag that is not there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cli_support import cli, error_of, process, said

from specdec_core.cli.app import command

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("specdec_core", "specdec_drafters", "specdec_verifiers")
COMMANDS = ["run", "chat", "bench", "compare", "drafters", "drafters show", "verifiers", "verifiers show"]
COMMANDS += ["plugins", "new", "new drafter", "new verifier", "theory"]


def test_version() -> None:
    assert said("--version") == f"specdec {metadata.version('specdec-core')}\n"


@pytest.mark.parametrize("name", ["", *COMMANDS])
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_of_every_command(name: str, option: str) -> None:
    text = said(*name.split(), option)
    assert f"Usage: specdec {name}".strip() in text.replace("root", "specdec")
    assert "--help" in text


def test_without_a_command_it_helps() -> None:
    assert said().strip() == said("--help").strip()


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["run", "--help"], ["drafters", "-h"], []])
def test_help_imports_neither_torch_nor_plugins(args: list[str]) -> None:
    code = (
        "import sys\n"
        "from specdec_core.cli import main\n"
        "try: main()\n"
        "finally: print([name for name in ('torch', 'transformers', 'specdec_drafters', 'specdec_verifiers')"
        " if name in sys.modules], file=sys.stderr)"
    )
    done = process(*args, code=code)
    assert (done.returncode, done.stderr) == (0, "[]\n")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["rnu"], "no such command 'rnu'. Did you mean 'run'?"),
        (["--no-such-option"], "no such option: --no-such-option"),
        (["drafters", "shwo"], "no such command 'shwo'. Did you mean 'show'?"),
        (["drafters", "show"], "missing argument 'NAME'"),
        (["plugins", "extra"], "got unexpected extra argument"),
    ],
)
def test_wrong_use_is_one_line(args: list[str], words: str) -> None:
    assert words in error_of(*args)


def test_ctrl_c_anywhere_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_core.plugins.registry import Registry

    def interrupted(**_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Registry, "discover", interrupted)
    done = cli("plugins")
    assert (done.exit_code, done.output) == (130, "")


# --- flags ----------------------------------------------------------------------------------------


def _flags(group: Any) -> Iterator[str]:
    """Every flag of a command and of its subcommands."""
    yield from ("-h", "--help")
    for parameter in group.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for sub in getattr(group, "commands", {}).values():
        yield from _flags(sub)


def _texts() -> Iterator[tuple[Path, str]]:
    """Every text in the sources, and the lines of the documentation that call the command."""
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None
        for file in Path(str(spec.origin)).parent.rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield file, node.value
    for file in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
            if "specdec " in line:
                yield file, line.partition("specdec ")[2]


def test_every_flag_that_a_message_names_is_there() -> None:
    known = set(_flags(command()))
    known |= {"--specdec-", "--specdec-drafter", "--specdec-verifier", "--specdec-target"}  # pytest's
    known |= {"--error-unmatch", "--porcelain", "--untracked-files"}  # git's
    named = [
        (file.name, flag) for file, text in _texts() for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)
    ]
    assert len(named) > 40  # the search finds them
    assert [(file, flag) for file, flag in named if flag not in known] == []
