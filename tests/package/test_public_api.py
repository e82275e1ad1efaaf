"""What the package exports: complete, sorted, importable, and light to import."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import specdec_core


def test_all_is_sorted_as_the_linter_sorts_it() -> None:
    """Constants, classes, then functions; each in order."""

    def kind(name: str) -> int:
        return 0 if name.isupper() else 1 if name[0].isupper() else 2

    names = specdec_core.__all__
    assert names == sorted(names, key=lambda name: (kind(name), name))
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", specdec_core.__all__)
def test_every_exported_name_is_there_and_documented(name: str) -> None:
    value = getattr(specdec_core, name)
    if inspect.isclass(value) or inspect.isfunction(value):
        assert value.__module__.startswith("specdec_core")
        assert (value.__doc__ or "").strip()


def test_all_holds_what_type_checkers_see_and_what_is_resolved() -> None:
    """The lazy table, `__all__` and the imports for type checkers name the same things."""
    tree = ast.parse(Path(str(specdec_core.__file__)).read_text(encoding="utf-8"))
    [checking] = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {
        alias.name: node.module
        for node in checking.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert set(imported) == set(specdec_core.__all__)
    table = {name: f"specdec_core.{module}" for name, module in specdec_core._MODULE_OF.items()}
    assert table == imported
    assert dir(specdec_core) == sorted(specdec_core.__all__)


def test_every_public_error_is_exported() -> None:
    from specdec_core.contract import errors

    own = {
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert own <= set(specdec_core.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'SpecDecodr'"):
        specdec_core.SpecDecodr  # noqa: B018
    assert not hasattr(specdec_core, "_nothing")


LIGHT = """
import sys
import specdec_core
from specdec_core import {names}
heavy = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
assert not heavy, heavy
"""


@pytest.mark.parametrize(
    "names", ["__all__", "SpecdecError, UsageError, hookimpl, PLUGIN_API_VERSION, Registry"]
)
def test_importing_the_package_imports_no_torch(names: str) -> None:
    """`--help` and the plugin registry must not wait for it."""
    subprocess.run([sys.executable, "-c", LIGHT.format(names=names)], check=True)


@pytest.mark.slow
def test_importing_everything_changes_nothing() -> None:
    """No model, no file, no generator is touched at import; nothing is printed."""
    program = """
import random, torch
before = torch.get_rng_state(), random.getstate(), torch.get_num_threads(), torch.is_grad_enabled()
from specdec_core import *
import specdec_drafters, specdec_verifiers
after = torch.get_rng_state(), random.getstate(), torch.get_num_threads(), torch.is_grad_enabled()
assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("", "")
