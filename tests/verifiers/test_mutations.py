"""What the proofs are worth: every classic mistake moves the law of the text by far more than rounding.

A mistake in a verifier is made by replacing the part that is wrong; one in a drafter by changing drafts
after they were drawn; a reuse of keys by drawing with another key than the verifier asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec_verifiers.block as block_module
from specdec_core import HOLE, DraftLaw, RowRng, Verifier, VerifierConfig
from specdec_core.testing.enumeration import KeyReused
from specdec_core.testing.worlds import Drafted, Shape, Toy, World, chain, constant, error, toy, tree, world
from specdec_verifiers import Block, Rejection, TreeMask, _residual

ONE_HOT, SAMPLED, WITHOUT = DraftLaw.ONE_HOT, DraftLaw.SAMPLED, DraftLaw.WITHOUT_REPLACEMENT
plain = VerifierConfig()
rejection, block, tree_mask = Rejection(plain), Block(plain), TreeMask(plain)
EXACT, LARGE = 1e-12, 0.004
P, Q = toy(9, 4), toy(10, 4)


def off(
    verifier: Verifier,
    law: DraftLaw,
    shape: Shape,
    *,
    p: Toy | None = None,
    q: Toy | None = None,
    **how: object,
) -> float:
    """How far the law of two tokens is off in the world of the mistakes, where it is exact without one."""
    return error(verifier, world(p or P, q or Q, law, shape, size=2, **how))


@pytest.mark.parametrize(
    ("verifier", "law", "shape"),
    [
        (rejection, SAMPLED, chain(2)),
        (rejection, ONE_HOT, chain(2)),
        (block, SAMPLED, chain(3)),
        (block, ONE_HOT, chain(3)),
        (tree_mask, SAMPLED, tree(2, 1)),
        (tree_mask, WITHOUT, tree(2, 1)),
        (tree_mask, ONE_HOT, tree(2, 1)),
    ],
)
def test_without_a_mistake_the_law_is_exact(verifier: Verifier, law: DraftLaw, shape: Shape) -> None:
    assert off(verifier, law, shape) < EXACT


# --- in the verifier ------------------------------------------------------------------------------


ARITHMETIC: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "q and p swapped in the test": ("ratio", lambda p, q: _residual.ratio(q, p)),
    "the test left out": ("ratio", lambda p, q: torch.ones_like(p)),
    "q and p swapped in the residual": ("residual", lambda p, q: _residual.residual(q, p)),
    "p drawn from after a rejection": ("residual", lambda p, q: p),
    "the residual not cut at zero": ("residual", lambda p, q: (p - q).abs()),
    "only the rejected token left out": ("residual", lambda p, q: torch.where(q == q.amax(1, True), 0, p)),
}


@pytest.mark.parametrize("mistake", ARITHMETIC)
@pytest.mark.parametrize(
    ("verifier", "law", "shape"),
    [
        (rejection, SAMPLED, chain(2)),
        (block, SAMPLED, chain(2)),
        (tree_mask, SAMPLED, tree(2, 1)),
        (tree_mask, WITHOUT, tree(2, 1)),
    ],
    ids=["rejection", "block", "tree_mask-sampled", "tree_mask-without"],
)
def test_wrong_arithmetic_shows(
    mistake: str, verifier: Verifier, law: DraftLaw, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    part, wrong = ARITHMETIC[mistake]
    monkeypatch.setattr(f"specdec_verifiers.{verifier.name}.{part}", wrong)
    assert off(verifier, law, shape) > LARGE


def test_testing_a_block_up_to_the_width_of_the_batch_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """h_k belongs to the row's own k; a row of two in a batch that is three wide ends at its second token."""
    right = block_module._pass

    def never_whole(chain: Any, p: Any, i: int, p_i: Tensor, whole: Tensor) -> Tensor:
        return right(chain, p, i, p_i, torch.zeros_like(whole))

    monkeypatch.setattr(block_module, "_pass", never_whole)
    w = World(P, Q, lambda _: SAMPLED, lambda text, _: chain(1 + sum(text) % 2), size=3)
    assert error(block, w) > LARGE


def test_stopping_a_block_at_the_first_failure_shows() -> None:
    @dataclass
    class Stopping:
        """A `RowRng` whose tests fail after one that failed."""

        rng: RowRng
        alive: bool | Tensor = True

        def bernoulli(self, p: Tensor, node: Tensor, draw: int) -> Tensor:
            self.alive = self.alive & self.rng.bernoulli(p, node, draw)
            return self.alive

        def categorical(self, weights: Tensor, node: Tensor, draw: int) -> Tensor:
            return self.rng.categorical(weights, node, draw)

    assert off(block, SAMPLED, chain(2), wrap=Stopping) > LARGE


# --- in the keys ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rekeyed:
    """A `RowRng` that draws with other keys than it is asked for."""

    rng: RowRng
    rekey: Callable[[Tensor, int], tuple[Tensor, int]]

    def bernoulli(self, p: Tensor, node: Tensor, draw: int) -> Tensor:
        return self.rng.bernoulli(p, *self.rekey(node, draw))

    def categorical(self, weights: Tensor, node: Tensor, draw: int) -> Tensor:
        return self.rng.categorical(weights, *self.rekey(node, draw))


def one_for_all_tests(node: Tensor, draw: int) -> tuple[Tensor, int]:
    """One uniform for all acceptance tests."""
    return (torch.zeros_like(node), 0) if draw == 0 else (node, draw)


def next_token_by_its_test(node: Tensor, draw: int) -> tuple[Tensor, int]:
    """The token after a rejection, by the uniform of the test that failed: of the node behind, in a chain."""
    return ((node + 1).clamp(max=1), 0) if draw == 1 else (node, draw)


REKEYED = [
    pytest.param(one_for_all_tests, rejection, SAMPLED, chain(2), id="depths-rejection"),
    pytest.param(one_for_all_tests, rejection, ONE_HOT, chain(2), id="depths-rejection-one_hot"),
    pytest.param(one_for_all_tests, block, SAMPLED, chain(2), id="depths-block"),
    pytest.param(one_for_all_tests, tree_mask, SAMPLED, tree(2), id="siblings-sampled"),
    pytest.param(one_for_all_tests, tree_mask, WITHOUT, tree(2), id="siblings-without"),
    pytest.param(one_for_all_tests, tree_mask, ONE_HOT, tree(2), id="siblings-one_hot"),
    pytest.param(next_token_by_its_test, rejection, SAMPLED, chain(2), id="residual-rejection"),
    pytest.param(next_token_by_its_test, rejection, ONE_HOT, chain(2), id="residual-rejection-one_hot"),
    pytest.param(next_token_by_its_test, block, SAMPLED, chain(2), id="residual-block"),
    pytest.param(next_token_by_its_test, tree_mask, SAMPLED, chain(2), id="residual-tree_mask"),
    pytest.param(next_token_by_its_test, tree_mask, ONE_HOT, chain(2), id="residual-tree_mask-one_hot"),
]


@pytest.mark.parametrize(("rekey", "verifier", "law", "shape"), REKEYED)
def test_a_uniform_used_twice_shows(
    rekey: Callable[[Tensor, int], tuple[Tensor, int]], verifier: Verifier, law: DraftLaw, shape: Shape
) -> None:
    def wrap(rng: RowRng) -> RowRng:
        return Rekeyed(rng, rekey)  # type: ignore[return-value]

    with pytest.raises(KeyReused, match="is made twice in a round"):
        off(verifier, law, shape, wrap=wrap)
    assert off(verifier, law, shape, wrap=wrap, strict=False) > LARGE


# --- in the drafter -------------------------------------------------------------------------------


def declared(law: DraftLaw, q: Toy) -> Callable[[Drafted], Drafted]:
    """Declare a law that is not the one drawn by, with the whole q at each node."""

    def mutate(drafted: Drafted) -> Drafted:
        nodes = []
        for token, parent, _ in drafted.nodes:
            nodes.append((token, parent, q(drafted.path(parent) if parent >= 0 else ())))
        return replace(drafted, nodes=tuple(nodes), law=law)

    return mutate


WRONG_LAWS = [
    (rejection, ONE_HOT, SAMPLED, chain(2)),
    (rejection, ONE_HOT, WITHOUT, chain(2)),
    (block, ONE_HOT, SAMPLED, chain(2)),
    (tree_mask, ONE_HOT, SAMPLED, tree(2)),
    (tree_mask, ONE_HOT, WITHOUT, tree(2)),
    (tree_mask, WITHOUT, SAMPLED, tree(2)),
]


@pytest.mark.parametrize(("verifier", "drawn", "said", "shape"), WRONG_LAWS)
def test_a_wrong_law_shows(verifier: Verifier, drawn: DraftLaw, said: DraftLaw, shape: Shape) -> None:
    p, q = constant(0.4, 0.3, 0.2, 0.1), constant(0.1, 0.2, 0.3, 0.4)
    assert off(verifier, drawn, shape, p=p, q=q, mutate=declared(said, q)) > LARGE


@pytest.mark.parametrize("drawn", [SAMPLED, WITHOUT])
@pytest.mark.parametrize("verifier", [rejection, block, tree_mask], ids=lambda v: v.name)
def test_any_draft_may_be_called_fixed(drawn: DraftLaw, verifier: Verifier) -> None:
    """Given a draft, the rule for fixed ones is exact whatever made it; it only accepts less."""
    shape = tree(2) if verifier is tree_mask else chain(2)
    assert off(verifier, drawn, shape, mutate=declared(ONE_HOT, Q)) < EXACT


def by_value(order: Callable[[int], int]) -> Callable[[Drafted], Drafted]:
    """Sort siblings without children of their own."""

    def mutate(drafted: Drafted) -> Drafted:
        return replace(drafted, nodes=tuple(sorted(drafted.nodes, key=lambda node: order(node[0]))))

    return mutate


@pytest.mark.parametrize("order", [lambda t: t, lambda t: -t], ids=["up", "down"])
def test_sorted_siblings_show(order: Callable[[int], int]) -> None:
    assert off(tree_mask, SAMPLED, tree(2), mutate=by_value(order)) > LARGE


def test_merged_siblings_show() -> None:
    def mutate(drafted: Drafted) -> Drafted:
        first, *others = drafted.nodes
        return replace(drafted, nodes=(first, *(node for node in others if node[0] != first[0])))

    assert off(tree_mask, SAMPLED, tree(3), mutate=mutate) > LARGE


@pytest.mark.parametrize(
    ("verifier", "shape"),
    [(rejection, chain(2)), (block, chain(2)), (tree_mask, tree(2))],
    ids=["r", "b", "t"],
)
def test_a_node_dropped_for_its_value_shows(verifier: Verifier, shape: Shape) -> None:
    """Cut a draft before the first token that its drafter found unlikely, after it was drawn."""

    def mutate(drafted: Drafted) -> Drafted:
        nodes = list(drafted.nodes)
        for i, (token, parent, q) in enumerate(nodes):
            assert q is not None
            gone = parent >= 0 and nodes[parent][1] == HOLE
            if gone or q[token] < 0.3:
                nodes[i] = (token, HOLE, q)
        return replace(drafted, nodes=tuple(nodes))

    assert off(verifier, SAMPLED, shape, mutate=mutate) > LARGE


def test_a_token_outside_the_vocabulary_thrown_away_shows() -> None:
    def mutate(drafted: Drafted) -> Drafted:
        return replace(drafted, nodes=drafted.nodes[:0]) if drafted.nodes[0][0] >= 4 else drafted

    assert off(rejection, SAMPLED, chain(1), q=toy(16, 6, sharpness=2.0), mutate=mutate) > LARGE


def test_fixed_nodes_may_be_dropped_and_reordered() -> None:
    def mutate(drafted: Drafted) -> Drafted:
        kept = sorted((node for node in drafted.nodes if node[0] != 1), key=lambda node: -node[0])
        return replace(drafted, nodes=tuple(kept))

    assert off(tree_mask, ONE_HOT, tree(3), mutate=mutate) < EXACT
