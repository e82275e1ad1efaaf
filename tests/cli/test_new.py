"""`specdec new`: a package that is complete, and keeps every contract as it is written."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from cli_support import error_of, said

PARROT = {".gitignore", "README.md", "pyproject.toml", "specdec_parrot.py", "tests/test_parrot.py"}


def files_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["drafter", "verifier"])
def test_a_package_is_written(tmp_path: Path, kind: str) -> None:
    text = said("new", kind, "parrot", "--into", str(tmp_path))
    folder = tmp_path / "specdec-parrot"
    assert f"pip install -e '{folder}[test]'" in text
    assert f"specdec run --{kind} parrot" in text
    assert files_of(folder) == PARROT
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["name"] == "specdec-parrot"
    assert project["project"]["entry-points"] == {"specdec": {"parrot": "specdec_parrot"}}
    assert project["tool"]["pytest"]["ini_options"]["addopts"] == [f"--specdec-{kind}=parrot"]
    for file in PARROT:
        assert "$" not in (folder / file).read_text().replace("$ ", "")
    code = (folder / "specdec_parrot.py").read_text()
    ast.parse(code)
    own = [line for line in code.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(own) < 60


def install(folder: Path, site: Path, name: str) -> None:
    """Put a package on the path as a wheel would, without building one: its module and its metadata."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = site / f"specdec_{name}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    points = "\n".join(f"{k} = {v}" for k, v in project["entry-points"]["specdec"].items())
    (info / "entry_points.txt").write_text(f"[specdec]\n{points}\n")
    (site / f"specdec_{name}.py").write_text((folder / f"specdec_{name}.py").read_text())


@pytest.mark.parametrize(("kind", "name"), [("drafter", "parrot"), ("verifier", "row_drafter")])
def test_it_passes_its_own_tests_and_the_kit_as_it_is(tmp_path: Path, kind: str, name: str) -> None:
    """`pytest` in the package, in a process of its own; `row_drafter` is also a name that modules import."""
    said("new", kind, name, "--into", str(tmp_path))
    folder = tmp_path / f"specdec-{name.replace('_', '-')}"
    install(folder, tmp_path / "site", name)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{kind} {name} keeps " in done.stdout
    assert "none is broken" in done.stdout
    own = 2 if kind == "drafter" else 1
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed > own + 8


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("My-Drafter", "is not allowed: small letters, digits and _, a letter first; 'my_drafter' would do"),
        ("9", "is not allowed"),
        ("../evil", "is not allowed"),
        ("auto", "is kept by specdec for itself"),
        ("class", "is a word of Python; choose another, such as class_drafter"),
        ("prompt_lookup", "is used by specdec-core "),
    ],
)
def test_a_bad_name_is_one_line(tmp_path: Path, name: str, words: str) -> None:
    assert words in error_of("new", "drafter", name, "--into", str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    said("new", "drafter", "parrot", "--into", str(tmp_path))
    module = tmp_path / "specdec-parrot" / "specdec_parrot.py"
    module.write_text("mine")
    assert "is there already; remove it" in error_of("new", "drafter", "parrot", "--into", str(tmp_path))
    assert module.read_text() == "mine"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    line = error_of("new", "verifier", "strict", "--into", str(tmp_path / "none"))
    assert "cannot be written: No such file or directory; name another --into FOLDER" in line
