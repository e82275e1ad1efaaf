"""Losslessness, proved on toys: the law of the text is the target's, over every draft and every outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec_core import DraftLaw, TargetDistributions, Verifier, VerifierConfig
from specdec_core.testing.enumeration import outcomes
from specdec_core.testing.worlds import (
    Shape,
    Tokens,
    Toy,
    World,
    accepted,
    as_draft,
    as_p,
    chain,
    drafts,
    error,
    output_law,
    target_law,
    toy,
    tree,
    world,
)
from specdec_verifiers import Block, Greedy, Match, Rejection, TreeMask, Typical
from specdec_verifiers.typical import TypicalConfig

EXACT = 1e-12
ONE_HOT, SAMPLED, WITHOUT = DraftLaw.ONE_HOT, DraftLaw.SAMPLED, DraftLaw.WITHOUT_REPLACEMENT
plain = VerifierConfig()
rejection, block, tree_mask, match = Rejection(plain), Block(plain), TreeMask(plain), Match(plain)


def _cases(*verifiers: Verifier) -> list[Any]:
    """Every law of every verifier; `match` looks at no q, so that one law is all."""
    return [
        pytest.param(verifier, law, id=f"{verifier.name}-{law.name.lower()}")
        for verifier in verifiers
        for law in (ONE_HOT, SAMPLED, WITHOUT)
        if law in verifier.laws and (verifier is not match or law == ONE_HOT)
    ]


ON_CHAINS = _cases(rejection, block, tree_mask, match)
ON_TREES = _cases(tree_mask, match)
EVERY = ON_CHAINS


@pytest.mark.parametrize(("verifier", "law"), ON_CHAINS)
@pytest.mark.parametrize("k", [1, 3])
def test_chains(verifier: Verifier, law: DraftLaw, k: int) -> None:
    assert error(verifier, world(toy(k, 3), toy(k + 10, 3), law, chain(k))) < EXACT


@pytest.mark.parametrize(("verifier", "law"), ON_CHAINS)
@pytest.mark.parametrize("seed", [1, 2])
def test_chains_with_holes_an_eos_in_mid_block_and_lengths_that_change(
    verifier: Verifier, law: DraftLaw, seed: int
) -> None:
    def shape(context: Tokens, accepted: int) -> Shape:
        """0 to 3 tokens, by what was said and accepted before; also beyond the cap."""
        return chain((len(context) + accepted + seed) % 4)

    w = World(
        toy(seed, 3), toy(seed + 10, 3, zeros=True), lambda _: law, shape, size=4, eos=seed % 3, holes=True
    )
    assert error(verifier, w) < EXACT


@pytest.mark.parametrize(("verifier", "law"), ON_CHAINS)
def test_chains_that_go_on_only_behind_some_tokens(verifier: Verifier, law: DraftLaw) -> None:
    """Whether a node exists may depend on its ancestors: decided before it is drawn."""

    def shape(path: Tokens) -> int:
        return int(len(path) < 3 and (not path or path[-1] != 1))

    w = world(toy(5, 3, zeros=True), toy(6, 3), law, shape, holes=True)
    assert error(verifier, w) < EXACT


@pytest.mark.parametrize(("verifier", "law"), ON_TREES)
def test_trees(verifier: Verifier, law: DraftLaw) -> None:
    w = world(toy(7, 3), toy(8, 3), law, tree(2, 2), size=2)
    assert error(verifier, w) < EXACT


@pytest.mark.parametrize(("verifier", "law"), ON_TREES)
def test_ragged_trees_with_holes(verifier: Verifier, law: DraftLaw) -> None:
    """Three siblings, then as many as the parent's token says; q runs out of support where it can."""

    def shape(path: Tokens) -> int:
        return 3 if not path else path[-1] if len(path) == 1 else 0

    p, q = toy(9, 3, zeros=True), toy(10, 3, zeros=True)
    assert error(verifier, world(p, q, law, shape, size=2, eos=1, holes=True)) < EXACT


@pytest.mark.parametrize("shape", [chain(2), tree(2, 1)], ids=["chain", "tree"])
def test_match_takes_sampled_drafts_as_well(shape: Shape) -> None:
    assert error(match, world(toy(29, 3), toy(30, 3), SAMPLED, shape, size=2, eos=1)) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(("verifier", "law"), ON_TREES)
@pytest.mark.parametrize("seed", range(3))
def test_trees_over_more_rounds(verifier: Verifier, law: DraftLaw, seed: int) -> None:
    def shape(context: Tokens, accepted: int) -> Shape:
        return tree(2, 2) if (len(context) + accepted) % 2 == 0 else tree(3)

    w = World(toy(seed, 3), toy(seed + 50, 3), lambda _: law, shape, eos=0, holes=True)
    assert error(verifier, w) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(("verifier", "law"), ON_CHAINS)
@pytest.mark.parametrize("seed", range(5))
def test_chains_over_four_tokens(verifier: Verifier, law: DraftLaw, seed: int) -> None:
    w = world(toy(seed, 4, zeros=seed > 2), toy(seed + 50, 4, zeros=seed > 2), law, chain(3), holes=True)
    assert error(verifier, w) < EXACT


@pytest.mark.parametrize("verifier", [tree_mask, match], ids=lambda v: v.name)
def test_rows_of_one_batch_may_be_drafted_in_different_ways(verifier: Verifier) -> None:
    def law(context: Tokens) -> DraftLaw:
        return (SAMPLED, ONE_HOT, WITHOUT)[sum(context) % 3]

    def shape(context: Tokens, accepted: int) -> Shape:
        return (tree(3), chain(2), tree(2, 1), tree(1, 2))[(len(context) + sum(context)) % 4]

    w = World(toy(11, 3), toy(12, 3), law, shape, size=3, eos=2, holes=True)
    assert error(verifier, w) < EXACT


@pytest.mark.parametrize("verifier", [rejection, block], ids=lambda v: v.name)
def test_chains_of_one_batch_may_be_drafted_in_different_ways(verifier: Verifier) -> None:
    w = World(
        toy(13, 3),
        toy(14, 3),
        lambda context: SAMPLED if sum(context) % 2 else ONE_HOT,
        lambda context, _: chain(1 + sum(context) % 3),
        holes=True,
    )
    assert error(verifier, w) < EXACT


@pytest.mark.parametrize(("verifier", "law"), ON_CHAINS)
def test_a_drafter_may_know_more_tokens_than_the_target(verifier: Verifier, law: DraftLaw) -> None:
    """A token outside the vocabulary stays as one with p = 0, and q is not renormalised."""
    w = world(toy(15, 3), toy(16, 5, sharpness=2.0), law, chain(2), size=2)
    assert error(verifier, w) < EXACT


@pytest.mark.parametrize(("verifier", "law"), ON_TREES)
def test_a_tree_may_hold_tokens_outside_the_vocabulary(verifier: Verifier, law: DraftLaw) -> None:
    w = world(toy(17, 3), toy(18, 4), law, tree(2, 1), size=2)
    assert error(verifier, w) < EXACT


@pytest.mark.parametrize(("verifier", "law"), EVERY)
def test_temperature_zero_is_greedy(verifier: Verifier, law: DraftLaw) -> None:
    shape = tree(2, 1) if verifier.handles_trees else chain(3)
    w = world(toy(19, 3), toy(20, 3), law, shape, greedy=True)
    law_of_text = output_law(verifier, w)
    (text, chance) = max(target_law(w).items(), key=lambda item: item[1])
    assert chance == 1.0
    assert law_of_text[text] == pytest.approx(1.0, abs=1e-12)
    assert accepted(verifier, w) == pytest.approx(accepted(Greedy(plain), w), abs=1e-12)


@pytest.mark.parametrize(("verifier", "law"), EVERY)
@pytest.mark.parametrize("nearness", [0.0, 1e-7])
def test_a_drafter_close_to_the_target(verifier: Verifier, law: DraftLaw, nearness: float) -> None:
    def near(p: Toy, other: Toy) -> Toy:
        return lambda context: p(context) * (1 - nearness) + other(context) * nearness

    p = toy(21, 3)
    shape = tree(2, 1) if verifier.handles_trees else chain(2)
    w = world(p, near(p, toy(22, 3)), law, shape, size=2)
    assert error(verifier, w) < EXACT
    if law != ONE_HOT and verifier is not match:
        assert accepted(verifier, w) > 2 - 3 * nearness - 1e-12


def test_in_float32_the_law_is_off_by_no_more_than_rounding() -> None:
    rounds: list[tuple[Verifier, DraftLaw, Shape]] = [
        (rejection, SAMPLED, chain(2)),
        (block, SAMPLED, chain(2)),
        (tree_mask, SAMPLED, tree(2, 1)),
        (tree_mask, WITHOUT, tree(2, 1)),
        (tree_mask, ONE_HOT, tree(2, 1)),
    ]
    for verifier, law, shape in rounds:
        for q in (toy(24, 3), toy(23, 3)):  # another law, and the target's own
            assert _first_token_error(verifier, toy(23, 3), q, law, shape) < 5e-7


def _first_token_error(verifier: Verifier, p: Toy, q: Toy, law: DraftLaw, shape: Shape) -> float:
    every = drafts(q, law, shape, ())
    dist = as_p(p, [()] * len(every), every)
    dist = TargetDistributions(dist.logits.float(), dist.greedy)
    draft = as_draft(every, 3)
    if draft.probs is not None:
        draft = type(draft)(
            draft.tokens, draft.parents, draft.laws, draft.depth, draft.width, draft.probs.float()
        )
    found = outcomes(verifier, dist, draft, strict=True)
    weight = found.weight * torch.tensor([d.weight for d in every], dtype=torch.float64)[found.row]
    head = found.path[:, 0]
    first = torch.where(head >= 0, draft.tokens[found.row, head.clamp(min=0)], found.next_token)
    law_of_first = torch.zeros(3, dtype=torch.float64).index_add_(0, first, weight)
    return float((law_of_first - torch.from_numpy(p(()))).abs().max())


# --- and what is lossy is seen to be ----------------------------------------------------------------


@pytest.mark.parametrize("law", [ONE_HOT, SAMPLED, WITHOUT])
@pytest.mark.parametrize("shape", [chain(2), tree(2, 1)], ids=["chain", "tree"])
def test_typical_is_not_lossless(law: DraftLaw, shape: Callable[[Tokens], int]) -> None:
    typical = Typical(TypicalConfig())
    assert not typical.lossless
    assert error(typical, world(toy(25, 3), toy(26, 3), law, shape, size=2)) > 0.02


def test_typical_is_greedy_at_temperature_zero() -> None:
    w = world(toy(27, 3), toy(28, 3), ONE_HOT, tree(2, 2), greedy=True)
    typical = Typical(TypicalConfig())
    assert error(typical, w) < EXACT
    assert accepted(typical, w) == accepted(Greedy(plain), w)
