"""Drafters that break one contract: the kit finds it, and names that contract before any other."""

from __future__ import annotations

import pytest
from broken import BROKEN, RIGHT, text_of
from plugin_site import discover, module_of

from specdec_core.testing.contracts import Broken, Untried
from specdec_core.testing.drafter_kit import DrafterKit
from specdec_core.testing.suites import DRAFTER

pytest_plugins = ["pytester"]
ITEMS = sum(len(contract.cases) for contract in DRAFTER)


def kit_of(name: str, body: str, law: str) -> DrafterKit:
    registry = discover().registry
    registry.register(module_of(text_of(name, body, law)), name=f"plugin_{name}")
    return DrafterKit(name, registry)


def broken_contracts(kit: DrafterKit, *, first: bool) -> list[str]:
    found = []
    for contract in DRAFTER:
        for case in contract.cases:
            try:
                contract.check(kit, case)
            except Untried:
                continue
            except Broken:
                found.append(contract.name)
                if first:
                    return found
    return found


@pytest.mark.parametrize("name", BROKEN)
def test_the_first_contract_that_is_named_is_the_one_that_is_broken(name: str) -> None:
    body, law, contract = BROKEN[name]
    assert broken_contracts(kit_of(name, body, law), first=True) == [contract]


def test_a_drafter_that_draws_as_it_says_breaks_none() -> None:
    assert broken_contracts(kit_of("right", RIGHT, "DraftLaw.SAMPLED"), first=False) == []


# --- as an author sees it -------------------------------------------------------------------------


def installed(pytester: pytest.Pytester, name: str, body: str, law: str) -> None:
    """Put a distribution with one drafter on the path."""
    module = f"kit_{name}_plugin"
    info = pytester.mkdir(f"specdec_{name}-1.0.dist-info")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: specdec-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[specdec]\n{name} = {module}\n")
    pytester.makepyfile(**{module: text_of(name, body, law)})
    pytester.syspathinsert()


FAST = ("-p", "no:cacheprovider", "-p", "no:xdist", "-k")


def test_the_report_names_what_is_broken_and_how(pytester: pytest.Pytester) -> None:
    """Later contracts fail by the same fault; the one that is broken comes first."""
    body, law, _ = BROKEN["over_budget"]
    installed(pytester, "wide", body, law)
    done = pytester.runpytest_inprocess(
        "--specdec-drafter", "wide", *FAST, "works or shape or budget or randomness"
    )
    done.assert_outcomes(passed=2, failed=2, deselected=ITEMS - 4)
    done.stdout.fnmatch_lines(
        [
            "*specdec: drafter wide*",
            "pass  works *",
            "pass  shape *",
            "FAIL  budget * a row's draft is never deeper than its budget*",
            "*broken: drafter 'wide' broke the contract: it proposed a node deeper than the budget*",
            "*remedy: clip to budget.depth*",
            "FAIL  randomness *",
            "*remedy: that of budget",
            "drafter wide breaks the contract 'budget' (also broken, perhaps by the same fault: randomness)",
        ]
    )


def test_a_failure_shows_no_traceback_but_where_the_drafter_raised(pytester: pytest.Pytester) -> None:
    body, law, _ = BROKEN["raises"]
    installed(pytester, "raises", body, law)
    done = pytester.runpytest_inprocess("--specdec-drafter", "raises", "-x", *FAST, "works")
    done.stdout.fnmatch_lines(["broken: drafter 'raises': propose raised RuntimeError: too long for me"])
    done.stdout.fnmatch_lines(["*kit_raises_plugin.py*in chain"])
    done.stdout.no_fnmatch_line("*drafter_kit.py*")


def test_an_unknown_name_is_one_line(pytester: pytest.Pytester) -> None:
    done = pytester.runpytest_inprocess("--specdec-drafter", "parrott", "-p", "no:xdist")
    assert done.ret == pytest.ExitCode.USAGE_ERROR
    done.stderr.fnmatch_lines(["ERROR: --specdec-drafter parrott: no drafter 'parrott'; known: *"])


def test_a_wrong_option_breaks_the_first_contract(pytester: pytest.Pytester) -> None:
    done = pytester.runpytest_inprocess("--specdec-drafter", "prompt_lookup:ngram=3", *FAST, "works or shape")
    done.assert_outcomes(failed=1, skipped=1, deselected=ITEMS - 2)
    done.stdout.fnmatch_lines(["*drafter 'prompt_lookup' has no option 'ngram'*"])


NEEDS_WEIGHTS = """
class Broken(Fixed):
    class Config(RowDrafterConfig):
        width: int
        scale: float = 1.0

    def bind(self, target):
        super().bind(target)
        if self.config.width != target.config.hidden_size or self.config.scale != 2.0:
            raise UsageError(f"width={self.config.width}, scale={self.config.scale} do not fit")
"""
CONFTEST = """
def pytest_specdec_options(drafter, model):
    assert drafter == "heads"
    return {"width": model.config.hidden_size, "scale": 1.0}
"""


def test_an_authors_hook_gives_options_that_fit_each_target(pytester: pytest.Pytester) -> None:
    installed(pytester, "heads", NEEDS_WEIGHTS, "DraftLaw.ONE_HOT")
    pytester.makeconftest(CONFTEST)
    done = pytester.runpytest_inprocess("--specdec-drafter", "heads:scale=2.0", *FAST, "works or gpt2")
    done.assert_outcomes(passed=2, deselected=ITEMS - 2)


def test_places_of_the_target_and_of_a_draft_can_be_named(pytester: pytest.Pytester) -> None:
    done = pytester.runpytest_inprocess(
        *("--specdec-drafter", "small_model:model={draft}"),
        *("--specdec-drafter", "small_model:model={target}"),
        *(*FAST, "works"),
    )
    assert done.parseoutcomes()["passed"] == 2


def test_contracts_stand_before_an_authors_own_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_own(): pass")
    done = pytester.runpytest_inprocess(
        "--collect-only", "-q", "-p", "no:xdist", "--specdec-verifier", "match"
    )
    lines = [line for line in done.outlines if "::" in line]
    assert lines[0] == "specdec/verifier/match::works"
    assert lines[-1] == "test_contracts_stand_before_an_authors_own_tests.py::test_own"
