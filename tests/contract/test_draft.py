"""Drafts as drafters make them, and what their laws ask for."""

from __future__ import annotations

import torch

from specdec_core import HOLE, ROOT, Budget, Capabilities, Draft, DraftLaw
from specdec_core.checks.draft_values import check_values

TOKENS = torch.tensor([[3, 1, 4], [1, 5, 9]])
CHAINS = torch.tensor([[ROOT, 0, 1], [ROOT, HOLE, HOLE]])


def test_a_law_is_that_of_every_row_or_one_a_row() -> None:
    one = Draft.of(TOKENS, CHAINS, DraftLaw.COUPLED)
    each = Draft.of(TOKENS, CHAINS, [DraftLaw.ONE_HOT, DraftLaw.SAMPLED])
    assert (one.laws.tolist(), each.laws.tolist()) == ([3, 3], [0, 1])
    assert one.laws.dtype == each.laws.dtype == torch.uint8


def test_without_bounds_a_draft_is_one_of_chains() -> None:
    """A tree that is not declared to be one is cut: its surplus children are flagged."""
    can = Capabilities(frozenset({DraftLaw.ONE_HOT}), max_depth=3, makes_trees=True)
    assert (Draft.of(TOKENS, CHAINS, DraftLaw.ONE_HOT).depth, Draft.empty(2).depth) == (3, 0)
    tree = torch.tensor([[ROOT, ROOT, 0], [ROOT, 0, 0]])
    flagged = []
    for parents in (CHAINS, tree):
        checked = check_values(Draft.of(TOKENS, parents, DraftLaw.ONE_HOT), Budget([3, 3], 3), can, 10)
        assert checked.flags is not None
        flagged.append(checked.flags.bool().tolist())
    assert flagged == [[False, False], [True, True]]


def test_drawn_tokens_need_the_q_that_they_were_drawn_from() -> None:
    assert [law.name for law in DraftLaw if law.needs_q] == ["SAMPLED", "WITHOUT_REPLACEMENT"]
