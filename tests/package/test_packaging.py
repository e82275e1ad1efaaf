"""The built wheel: what is in it, what it says of itself, and that it works away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("specdec_core", "specdec_drafters", "specdec_verifiers")

USE_IT = """
import importlib, sys
from importlib.metadata import distribution
from pathlib import Path

site = Path(sys.argv[1])
for name in sys.argv[2:]:
    assert Path(importlib.import_module(name).__file__).is_relative_to(site), name
found = distribution("specdec-core")
assert Path(str(found.locate_file(""))) == site, found.locate_file("")
for entry in found.entry_points:
    entry.load()
    print(entry.group, entry.name)
"""


def run(*command: str, cwd: Path, pythonpath: str | None = None) -> str:
    """Run Python in a clean environment and return what it prints."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if pythonpath is not None:
        env["PYTHONPATH"] = pythonpath
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel from this checkout, without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder), cwd=ROOT)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def dist_info(wheel: zipfile.ZipFile, name: str) -> bytes:
    """Read a file of the wheel's dist-info folder."""
    (path,) = (entry for entry in wheel.namelist() if entry.endswith(f".dist-info/{name}"))
    return wheel.read(path)


def test_only_our_three_packages_reach_site_packages(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == set(PACKAGES)
    assert len(top) == len(PACKAGES) + 1


def test_every_package_is_whole(wheel: zipfile.ZipFile) -> None:
    sources = {
        "specdec_core": ROOT,
        "specdec_drafters": ROOT / "drafters",
        "specdec_verifiers": ROOT / "verifiers",
    }
    for package, base in sources.items():
        expected = {path.relative_to(base).as_posix() for path in (base / package).rglob("*.py")}
        packed = {name for name in wheel.namelist() if name.startswith(f"{package}/")}
        assert expected <= packed
        assert f"{package}/__init__.py" in packed
        assert f"{package}/py.typed" in packed
        assert not [name for name in packed if "__pycache__" in name or name.endswith(".pyc")]


def test_the_templates_of_new_plugins_are_packed(wheel: zipfile.ZipFile) -> None:
    folder = ROOT / "specdec_core" / "cli" / "templates"
    expected = {path.relative_to(ROOT).as_posix() for path in folder.rglob("*.txt")}
    assert len(expected) >= 6
    assert expected <= set(wheel.namelist())


def test_what_the_bench_reads_is_packed(wheel: zipfile.ZipFile) -> None:
    names = ("page.html.jinja", "questions.jsonl")
    assert {f"specdec_core/bench/{name}" for name in names} <= set(wheel.namelist())


def test_entry_points(wheel: zipfile.ZipFile) -> None:
    parser = ConfigParser(delimiters="=")
    parser.read_string(dist_info(wheel, "entry_points.txt").decode())
    assert {section: dict(parser[section]) for section in parser.sections()} == {
        "console_scripts": {"specdec": "specdec_core.cli:main"},
        "specdec": {"builtin-drafters": "specdec_drafters", "builtin-verifiers": "specdec_verifiers"},
        "pytest11": {"specdec": "specdec_core.testing.plugin"},
    }


def test_license_and_metadata(wheel: zipfile.ZipFile) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    metadata = message_from_bytes(dist_info(wheel, "METADATA"))
    assert dist_info(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert metadata["Name"] == "specdec-core"
    assert metadata["Version"] == project["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"


def test_unpacked_wheel_imports_and_its_entry_points_load(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    site = tmp_path / "site"
    wheel.extractall(site)
    printed = run("-c", USE_IT, str(site), *PACKAGES, cwd=tmp_path, pythonpath=str(site))
    assert sorted(printed.splitlines()) == [
        "console_scripts specdec",
        "pytest11 specdec",
        "specdec builtin-drafters",
        "specdec builtin-verifiers",
    ]
