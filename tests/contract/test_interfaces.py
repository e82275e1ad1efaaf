"""What of the contract is code: budgets and outcomes, selected and narrowed."""

from __future__ import annotations

from specdec_core import Budget, Capabilities, DraftLaw


def test_a_budget_is_clipped_to_what_a_drafter_can_make() -> None:
    def ask(rows: object, sure: object) -> bool:
        return True

    chains = Capabilities(frozenset({DraftLaw.ONE_HOT}), max_depth=3)
    trees = Capabilities(frozenset({DraftLaw.ONE_HOT}), max_depth=9, max_nodes=14, makes_trees=True)
    budget = Budget([5, 0, 2], 16, ask)
    assert budget.clipped(chains) == Budget([3, 0, 2], 3, ask)
    assert budget.clipped(trees) == Budget([5, 0, 2], 14, ask)
    assert budget == Budget([5, 0, 2], 16, ask)
