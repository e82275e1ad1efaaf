"""What of the contract is code: budgets and outcomes, selected and narrowed."""

from __future__ import annotations

import pytest
import torch

from specdec_core import Budget, Capabilities, DraftLaw, Outcome


def test_a_budget_is_clipped_to_what_a_drafter_can_make() -> None:
    def ask(rows: object, sure: object) -> bool:
        return True

    chains = Capabilities(frozenset({DraftLaw.ONE_HOT}), max_depth=3)
    trees = Capabilities(frozenset({DraftLaw.ONE_HOT}), max_depth=9, max_nodes=14, makes_trees=True)
    budget = Budget([5, 0, 2], 16, ask)
    assert budget.clipped(chains) == Budget([3, 0, 2], 3, ask)
    assert budget.clipped(trees) == Budget([5, 0, 2], 14, ask)
    assert budget == Budget([5, 0, 2], 16, ask)


@pytest.mark.parametrize("index", [[0, 1, 2], [2, 0], [1], []])
@pytest.mark.parametrize("own", [True, False, [True, False, True]])
def test_an_outcome_of_some_rows_has_the_paths_of_the_receivers_draft(
    index: list[int], own: bool | list[bool]
) -> None:
    whole = Outcome(
        rows=(7, 8, 9),
        places=(2, 0, 1),
        tokens=([1, 2], [3], [4]),
        paths=([0], [], [1]),
        finished=(None, None, None),
        fed=(2, 1, 2),
        hidden={3: torch.arange(6.0).view(3, 2, 1)},
        top_logits=(torch.arange(3).view(3, 1, 1), torch.arange(3.0).view(3, 1, 1)),
        scored=torch.arange(3).view(3, 1),
    )
    mine = own if isinstance(own, bool) else own[: len(index)]
    part = whole.for_rows(index, own_draft=mine)
    each = [mine] * len(index) if isinstance(mine, bool) else mine
    assert part.paths == tuple(whole.paths[i] if one else [] for i, one in zip(index, each, strict=True))
    assert part.rows == tuple(whole.rows[i] for i in index)
    assert part.tokens == tuple(whole.tokens[i] for i in index)
    assert part.fed == tuple(whole.fed[i] for i in index)
    assert torch.equal(part.hidden[3], whole.hidden[3][index])
    assert part.top_logits is not None
    assert part.scored is not None
    assert part.scored[:, 0].tolist() == part.top_logits[0].flatten().tolist() == index
    assert whole.paths == ([0], [], [1])
