"""The proofs' own tools: outcomes add up, reuse shows, and the model is that of the keyed generator."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from scenes import ONE_HOT, SAMPLED, WITHOUT, drafted, keyed, match, target, tree_mask

from specdec_core import HOLE, Draft, DraftLaw, RowRng, TargetDistributions, Verdict, VerifierConfig
from specdec_core.testing.enumeration import BranchingRng, KeyReused, outcomes
from specdec_core.testing.worlds import as_draft, chain, constant, drafts, target_law, toy, tree, world

START = torch.empty((1, 0), dtype=torch.int64)


class Script:
    """A verifier that makes the draws it is told to and says what came out as a number."""

    name, Config = "script", VerifierConfig
    laws, handles_trees, lossless, samples = frozenset(DraftLaw), True, True, True
    drafter_invariant, preference, config = False, 0, VerifierConfig()

    def __init__(self, *draws: tuple[str, list[float], int, int]) -> None:
        self.draws = draws

    def verify(self, p: TargetDistributions, draft: Draft, rng: RowRng) -> Verdict:
        rows = draft.rows
        said = torch.zeros(rows, dtype=torch.int64)
        for kind, chances, node, draw in self.draws:
            weights = torch.tensor(chances, dtype=torch.float64).expand(rows, -1)
            if kind == "test":
                out = rng.bernoulli(weights[:, 0], torch.full((rows,), node), draw).long()
            else:
                out = rng.categorical(weights, torch.full((rows,), node), draw)
            said = said * 10 + out
        return Verdict(torch.empty((rows, 0), dtype=torch.int64), said)


def law(script: Script, *, strict: bool = True) -> dict[int, float]:
    """What a script says, with its probability."""
    found = outcomes(script, target([[1.0]]), Draft.empty(1), strict=strict)
    chances: dict[int, float] = defaultdict(float)
    for value, weight in zip(found.next_token.tolist(), found.weight.tolist(), strict=True):
        chances[value] += weight
    return dict(chances)


def test_independent_draws_multiply() -> None:
    script = Script(("test", [0.25], -1, 0), ("pick", [1.0, 0.0, 3.0], -1, 1), ("test", [0.5], -1, 2))
    found = law(script)
    wanted = {
        100 * a + 10 * b + c: pa * pb * 0.5
        for a, pa in ((0, 0.75), (1, 0.25))
        for b, pb in ((0, 0.25), (2, 0.75))
        for c in (0, 1)
    }
    assert found == pytest.approx(wanted, abs=1e-15)


def test_what_cannot_happen_or_must_makes_no_branch() -> None:
    script = Script(("test", [0.0], -1, 0), ("test", [1.0], -1, 1), ("pick", [0.0, 2.0], -1, 2))
    assert law(script) == {11: 1.0}


@pytest.mark.parametrize(
    "draws",
    [
        [("test", [0.5], -1, 0), ("test", [0.3], -1, 0)],
        [("test", [0.5], -1, 0), ("pick", [1.0, 1.0], -1, 0)],
        [("pick", [1.0, 1.0], -1, 1), ("pick", [1.0, 1.0], -1, 1)],
        [("test", [1.0], -1, 0), ("test", [0.3], -1, 0)],
    ],
)
def test_a_key_used_twice_is_refused(draws: list[tuple[str, list[float], int, int]]) -> None:
    with pytest.raises(KeyReused, match="of node -1 is made twice"):
        law(Script(*draws))


def test_a_draw_that_does_not_apply_uses_no_key() -> None:
    script = Script(("test", [0.0], -1, 0), ("test", [0.5], -1, 0), ("test", [0.0], -1, 0))
    assert law(script) == {0: 0.5, 10: 0.5}


def test_a_shared_uniform_is_modelled_as_the_keyed_generator_has_it() -> None:
    script = Script(("test", [0.4], -1, 0), ("pick", [0.2, 0.3, 0.1, 0.4], -1, 0), ("test", [0.55], -1, 0))
    exact = law(script, strict=False)
    rows = 50_000
    drawn = script.verify(target([[1.0]], rows), Draft.empty(rows), keyed(rows)).next_token
    shares = torch.bincount(drawn).double() / rows
    assert set(drawn.tolist()) == set(exact)
    for value, chance in exact.items():
        assert float(shares[value]) == pytest.approx(chance, abs=5 * (chance / rows) ** 0.5)
    assert exact == pytest.approx({101: 0.2, 111: 0.2, 11: 0.1, 21: 0.05, 20: 0.05, 30: 0.4})


def test_rows_branch_on_their_own() -> None:
    draft = drafted([[0], [1], [0]], [-1], ONE_HOT)
    p = target([[[0.3, 0.7]] * 2, [[0.3, 0.7]] * 2, [[1.0, 0.0]] * 2])
    found = outcomes(tree_mask, p, draft)
    accepted = torch.zeros(3, dtype=torch.float64).index_add_(
        0, found.row, found.weight * (found.path[:, 0] == 0)
    )
    torch.testing.assert_close(accepted, torch.tensor([0.3, 0.7, 1.0]).double(), atol=1e-7, rtol=0)


def test_the_targets_draw_branches_by_position() -> None:
    rng = BranchingRng(START, 2)
    logits = torch.tensor([[[0.5, 0.5], [0.2, 0.8], [0.9, 0.1]]]).log()
    drawn = rng.target_draw(logits, torch.tensor([[0, 1, 1]]))
    assert drawn.tolist() == [[0, 0, 0]]
    assert rng.weight.item() == pytest.approx(0.5 * 0.2), "the third shares the second's uniform"
    draft = drafted([0], [-1], ONE_HOT)
    found = outcomes(match, target([[0.3, 0.7], [0.6, 0.4]]), draft)
    kept = found.weight[found.path[:, 0] == 0].sum()
    assert kept.item() == pytest.approx(0.3)


def test_members_are_no_business_of_a_verifier() -> None:
    with pytest.raises(NotImplementedError):
        BranchingRng(START, 0).child("x")


# --- drafts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("drawn", [SAMPLED, WITHOUT, ONE_HOT])
@pytest.mark.parametrize("shape", [chain(3), tree(2, 2), tree(3)], ids=["chain", "2x2", "3"])
@pytest.mark.parametrize("holes", [False, True])
def test_drafts_add_up(drawn: DraftLaw, shape: object, holes: bool) -> None:
    every = drafts(toy(1, 3), drawn, shape, (2,), holes=holes)  # type: ignore[arg-type]
    assert sum(draft.weight for draft in every) == pytest.approx(1.0, abs=1e-14)
    assert len({tuple(node[:2] for node in draft.nodes) for draft in every}) == len(every)


def test_siblings_follow_their_law() -> None:
    q = np.array([0.5, 0.3, 0.2])

    def pairs(drawn: DraftLaw) -> dict[tuple[int, ...], float]:
        every = drafts(constant(*q), drawn, tree(2), ())
        return {tuple(node[0] for node in draft.nodes): draft.weight for draft in every}

    assert pairs(SAMPLED)[0, 0] == pytest.approx(0.25)
    assert pairs(SAMPLED)[2, 1] == pytest.approx(0.06)
    assert pairs(WITHOUT)[0, 1] == pytest.approx(0.5 * 0.6)
    assert len(pairs(WITHOUT)) == 6
    assert pairs(ONE_HOT) == {(0, 1): 1.0}
    second = next(d for d in drafts(constant(*q), WITHOUT, tree(2), ()) if d.nodes[0][0] == 0).nodes[1][2]
    assert second == pytest.approx([0.0, 0.6, 0.4]), "the second one's q is the conditional one"


def test_where_q_runs_out_there_are_holes() -> None:
    (only,) = drafts(constant(0.0, 1.0, 0.0), WITHOUT, tree(3, 1), ())
    assert [node[:2] for node in only.nodes] == [(1, -1), (0, HOLE), (0, HOLE), (1, 0)]
    assert as_draft([only], 3).parents.tolist() == [[-1, HOLE, HOLE, 0]]


def test_a_batch_pads_with_holes_and_bounds_what_is_there() -> None:
    members = [drafts(toy(1, 3), ONE_HOT, shape, ())[0] for shape in (chain(0), chain(3), tree(2, 1))]
    draft = as_draft(members, 3)
    assert (draft.depth, draft.width, draft.nodes) == (3, 2, 4)
    assert (draft.parents[0] == HOLE).all()
    assert draft.probs is None
    sampled = as_draft([drafts(toy(1, 3), SAMPLED, chain(1), ())[0], members[1]], 3).probs
    assert sampled is not None
    assert sampled.dtype == torch.float64
    assert sampled.isnan().all(dim=-1).tolist() == [[False, True, True], [True] * 3], "nobody may read these"


def test_the_targets_own_law_ends_at_an_eos() -> None:
    texts = target_law(world(constant(0.5, 0.5), constant(1, 1), ONE_HOT, chain(1), size=3, eos=1))
    assert texts == pytest.approx({(1,): 0.5, (0, 1): 0.25, (0, 0, 0): 0.125, (0, 0, 1): 0.125})
