"""The contracts stand in docs/plugins.md as they are in the code: every member, with its exact signature."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path

import pytest

import specdec_core
from specdec_core.contract import draft, interfaces
from specdec_core.plugins import hookspecs
from specdec_core.testing import hooks
from specdec_core.testing.suites import DRAFTER, VERIFIER

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
VALUES = ["Draft", "DraftLaw", "Verdict", "Capabilities", "Rows", "Budget", "Outcome", "TargetDistributions"]
PROTOCOLS = ["Drafter", "Verifier", "Context", "RowRng", "TargetInfo", "CachedModel"]


def members(cls: type) -> list[str]:
    """The public members of a class as its source has them, bodies, docstrings and comments left out."""
    [node] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    found = []
    for item in node.body:
        if isinstance(item, (ast.AnnAssign, ast.Assign)):
            found.append(ast.unparse(item))
        elif isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
            marks = [f"@{ast.unparse(mark)} " for mark in item.decorator_list]
            returns = f" -> {ast.unparse(item.returns)}" if item.returns else ""
            found.append(f"{''.join(marks)}def {item.name}({ast.unparse(item.args)}){returns}")
        elif isinstance(item, ast.FunctionDef) and item.name == "__init__":
            found.append(f"def __init__({ast.unparse(item.args)})")
    return found


def documented(name: str) -> list[str]:
    """The members that the page lists for a class: its block of code, comments left out."""
    [block] = re.findall(rf"```python\nclass {name}\b[^\n]*\n(.*?)```", PAGE, flags=re.DOTALL)
    lines = [re.sub(r"\s+#.*$", "", line).strip() for line in block.splitlines()]
    return [line.removesuffix(": ...") for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("name", VALUES + PROTOCOLS)
def test_a_contract_is_documented_member_by_member(name: str) -> None:
    assert documented(name) == members(getattr(specdec_core, name, None) or getattr(interfaces, name))


def test_no_contract_is_left_out() -> None:
    own = {n for module in (interfaces, draft) for n, c in vars(module).items() if inspect.isclass(c)}
    public = own & set(specdec_core.__all__) - {"SamplingParams", "DrafterConfig", "VerifierConfig"}
    assert public - {"FinishReason"} == set(VALUES + PROTOCOLS)


def test_the_version_of_the_api_is_the_documented_one() -> None:
    assert f"SPECDEC_API_VERSION = {hookspecs.PLUGIN_API_VERSION}" in PAGE


@pytest.mark.parametrize(("kind", "contracts"), [("drafter", DRAFTER), ("verifier", VERIFIER)])
def test_every_contract_of_the_kit_is_documented_in_order(kind: str, contracts: tuple[object, ...]) -> None:
    [table] = re.findall(rf"\| contract of a {kind} \|.*?\n\n", PAGE, flags=re.DOTALL)
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|$", table, flags=re.MULTILINE)
    assert rows == [(c.name, c.means) for c in contracts]  # type: ignore[attr-defined]


def test_the_hook_of_the_kit_is_documented_with_its_exact_signature() -> None:
    signature = inspect.signature(hooks.pytest_specdec_options)
    assert f"pytest_specdec_options{signature}".replace("'", "") in PAGE


def test_the_plugin_of_the_page_is_the_one_that_is_written() -> None:
    """The page shows what `specdec new drafter parrot` writes, word by word."""
    from specdec_core.cli.new import _files

    module = _files("drafter", "parrot", "specdec-parrot")["specdec_parrot.py"]
    assert module in (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
