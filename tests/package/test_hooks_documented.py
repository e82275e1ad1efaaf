"""Every hook has a full signature, says when it fires and what a failure does, and has a test."""

from __future__ import annotations

import inspect
from pathlib import Path

import pluggy
import pytest

from specdec_core.plugins import hookspecs

ROOT = Path(__file__).parents[2]
MANAGER = pluggy.PluginManager("specdec")
HOOKS = [name for name in dir(hookspecs) if MANAGER.parse_hookspec_opts(hookspecs, name)]
PAGES = [page for page in (ROOT / "docs").rglob("*.md") if "plugin" in page.stem]


def test_there_are_hooks_for_drafters_and_verifiers() -> None:
    assert HOOKS == ["specdec_register_drafters", "specdec_register_verifiers"]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_says_when_it_fires_and_what_a_failure_does(hook: str) -> None:
    function = getattr(hookspecs, hook)
    text = inspect.getdoc(function) or ""
    assert "Fires" in text
    assert "skipped" in text
    assert all(p.annotation is not p.empty for p in inspect.signature(function).parameters.values())


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_has_a_test(hook: str) -> None:
    assert hook in (ROOT / "tests" / "plugins" / "test_plugin_loading.py").read_text(encoding="utf-8")


@pytest.mark.skipif(not PAGES, reason="no page about plugins yet")
@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_documented_with_its_exact_signature(hook: str) -> None:
    signature = f"{hook}{inspect.signature(getattr(hookspecs, hook))}".replace("'", "")
    assert any(signature in page.read_text(encoding="utf-8") for page in PAGES), signature
