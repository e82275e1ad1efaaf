"""Every built-in drafter and verifier keeps every contract of the kit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from support import plugins

from specdec_core.testing.contracts import Contract, Untried
from specdec_core.testing.suites import DRAFTER, VERIFIER, kit_of

DRAWN = ("works", "law", "randomness", "draws", "rollback", "rows", "sampling")
VARIANTS = {  # drafts of other laws: the contracts that depend on it
    "small_model:draft=sampled": DRAWN,
    "small_model:draft=coupled": DRAWN,
    "tree_top2:children=sampled": DRAWN,
    "prompt_lookup,early_exit": ("works", "shape", "budget", "rollback", "rows"),
}
BUILT_IN = "specdec-core"


def _items() -> list[Any]:
    chosen: list[tuple[str, str, Contract[Any]]] = []
    for entry in plugins().drafters():
        if entry.distribution == BUILT_IN:
            chosen += [("drafter", entry.name, contract) for contract in DRAFTER]
    for spec, names in VARIANTS.items():
        chosen += [("drafter", spec, contract) for contract in DRAFTER if contract.name in names]
    for entry in plugins().verifiers():
        if entry.distribution == BUILT_IN:
            chosen += [("verifier", entry.name, contract) for contract in VERIFIER]
    return [
        pytest.param(kind, spec, contract, case, id=f"{spec}-{name}")
        for kind, spec, contract in chosen
        for case, name in zip(contract.cases, contract.items, strict=True)
    ]


@functools.cache
def kit(kind: str, spec: str) -> Any:
    return kit_of(kind, spec)[0]


@pytest.mark.parametrize(("kind", "spec", "contract", "case"), _items())
def test_contract(kind: str, spec: str, contract: Contract[Any], case: str) -> None:
    try:
        contract.check(kit(kind, spec), case)
    except Untried as reason:
        pytest.skip(str(reason))


def test_the_drafters_with_a_model_are_tried_with_drafts_that_are_accepted() -> None:
    """The draft that the kit ships agrees with its target often, and not always."""
    drafter = kit("drafter", "small_model")
    [result] = drafter.run([[1, 2, 3]], drafter_params()).results
    assert 0.2 < result.stats.acceptance_rate < 1.0


def drafter_params() -> Any:
    from specdec_core import SamplingParams

    return SamplingParams(max_new_tokens=60)
