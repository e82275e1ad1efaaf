"""Which contract a drafter broke, from what the loop's fence said of it."""

from __future__ import annotations

from specdec_core.contract.draft import Draft
from specdec_core.contract.errors import DraftContractViolation, DrafterError
from specdec_core.testing.watching import Proposal

_BUDGET = ("deeper than the budget", "more nodes than the budget")
_LAW = ("a law that its capabilities", "a sampled node whose q", "its law is sampled")


def contract_of(error: DrafterError, last: Proposal | None) -> str:
    """Name the contract: `works`, `shape`, `budget` or `law`."""
    if not isinstance(error, DraftContractViolation):
        return "works"
    if any(words in error.rule for words in _BUDGET) and _over_budget(last):
        return "budget"
    if any(words in error.rule for words in _LAW):
        return "law"
    return "shape"


def _over_budget(last: Proposal | None) -> bool:
    """Whether a draft has more than its budget, and not only more than its own `depth` admits."""
    if last is None or not isinstance(last.draft, Draft):
        return True
    for row, most in enumerate(last.budget.depth):
        depths = last.depths(row)
        if max(depths, default=0) > most or sum(map(bool, depths)) > last.budget.nodes:
            return True
    return False
