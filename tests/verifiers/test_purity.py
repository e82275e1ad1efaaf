"""A verifier is a function: no host transfer, no writing to what it is given, few steps."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from scenes import EVERY, ONE_HOT, SAMPLED, WITHOUT, block, keyed, match, rejection, tree_mask, typical
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_core import HOLE, Draft, DraftLaw, TargetDistributions, Verifier
from specdec_core.contract.rng import KeyedRng, Purpose
from specdec_core.testing.verifier_kit import Steps, no_reading

CHAIN = [-1, HOLE, 0, 2, 3]
TREE = [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]  # depth 3, width 2
# Each waits for the device, or has a result whose shape depends on values.
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "item")

ROUNDS = [
    pytest.param(verifier, parents, law, id=f"{verifier.name}-{name}-{law.name.lower()}")
    for verifier in EVERY
    for name, parents in (("chain", CHAIN), ("tree", TREE))
    for law in (ONE_HOT, SAMPLED, WITHOUT)
    if law in verifier.laws and (verifier.handles_trees or parents is CHAIN)
]


def scene(
    parents: list[int], law: DraftLaw, rows: int = 3, vocab: int = 11, device: str = "cpu"
) -> tuple[TargetDistributions, Draft, KeyedRng]:
    """A round in which rows stop at different depths, one of them greedy."""
    generator = torch.Generator().manual_seed(1)
    n = len(parents)
    logits = torch.randn(rows, 1 + n, vocab, generator=generator)
    probs = None
    if law != ONE_HOT:
        near = logits[:, [max(parent, -1) + 1 for parent in parents]]
        probs = (near + 0.3 * torch.randn(rows, n, vocab, generator=generator)).softmax(dim=-1)
    depth = 4 if parents is CHAIN else 3
    draft = Draft.of(
        torch.randint(vocab, (rows, n), generator=generator).to(device),
        torch.tensor(parents).expand(rows, -1).to(device),
        law,
        depth=depth,
        width=1 if parents is CHAIN else 2,
        probs=None if probs is None else probs.to(device),
    )
    greedy = (torch.arange(rows) == 1).to(device)
    rng = KeyedRng(list(range(rows)), [9] * rows, Purpose.VERIFY, "", torch.device(device))
    return TargetDistributions(logits.to(device), greedy), draft, rng


@pytest.mark.parametrize(("verifier", "parents", "law"), ROUNDS)
def test_no_host_transfer(verifier: Verifier, parents: list[int], law: DraftLaw) -> None:
    p, draft, rng = scene(parents, law)
    with Steps() as watch, no_reading():
        verifier.verify(p, draft, rng)
    assert not {name: count for name, count in watch.calls.items() if name in WAITS}


@pytest.mark.parametrize(("verifier", "parents", "law"), ROUNDS)
def test_no_value_is_needed_at_all(verifier: Verifier, parents: list[int], law: DraftLaw) -> None:
    """A tensor on the meta device has no values: shapes and loops must not depend on any."""
    p, draft, rng = scene(parents, law, device="meta")
    verdict = verifier.verify(p, draft, rng)
    assert verdict.path.device.type == verdict.next_token.device.type == "meta"
    assert verdict.path.shape == (3, draft.depth)
    assert verdict.path.dtype == verdict.next_token.dtype == torch.int64


@pytest.mark.parametrize(("verifier", "parents", "law"), ROUNDS)
def test_nothing_given_is_written_to(verifier: Verifier, parents: list[int], law: DraftLaw) -> None:
    p, draft, rng = scene(parents, law)
    before = [t.clone() for t in _tensors(p, draft)]
    probs = p.probs.clone()
    verifier.verify(p, draft, rng)
    assert all(torch.equal(a, b) for a, b in zip(before, _tensors(p, draft), strict=True))
    assert torch.equal(probs, p.probs), "nor what p makes on demand"


def _tensors(p: TargetDistributions, draft: Draft) -> list[Tensor]:
    every = [p.logits, p.greedy, draft.tokens, draft.parents, draft.laws, draft.probs]
    return [t for t in every if t is not None]


@pytest.mark.parametrize(("verifier", "parents", "law"), ROUNDS)
def test_a_verdict_can_be_repeated(verifier: Verifier, parents: list[int], law: DraftLaw) -> None:
    p, draft, rng = scene(parents, law)
    first, second = (verifier.verify(p, draft, each) for each in (rng, keyed_again(rng)))
    assert torch.equal(first.path, second.path)
    assert torch.equal(first.next_token, second.next_token)


def keyed_again(rng: KeyedRng) -> KeyedRng:
    """Make the same generator afresh."""
    return rng.for_rows(range(3))


@pytest.mark.parametrize("verifier", EVERY, ids=lambda v: v.name)
def test_no_global_generator_is_touched(verifier: Verifier) -> None:
    p, draft, rng = scene(CHAIN, ONE_HOT)
    before, python, numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    verifier.verify(p, draft, rng)
    assert torch.equal(before, torch.get_rng_state())
    assert python == random.getstate()
    assert np.array_equal(numbers, np.random.get_state()[1])


# --- cost -----------------------------------------------------------------------------------------

MOST = {
    (rejection, SAMPLED): 350,
    (block, SAMPLED): 500,
    (tree_mask, ONE_HOT): 650,
    (tree_mask, WITHOUT): 650,
    (match, ONE_HOT): 300,
    (typical, ONE_HOT): 250,
}


@pytest.mark.parametrize(("verifier", "law"), MOST, ids=lambda x: getattr(x, "name", str(x)))
def test_a_verdict_takes_few_steps(verifier: Verifier, law: DraftLaw) -> None:
    """Of a tree of depth 3 and width 2, or a chain of 4: each step is a kernel that the host launches."""
    for rows in (1, 64):
        p, draft, rng = scene(TREE if verifier.handles_trees else CHAIN, law, rows=rows)
        with Steps() as watch:
            verifier.verify(p, draft, rng)
        assert watch.calls.total() < MOST[verifier, law]


class Largest(TorchDispatchMode):
    """Note the largest tensor of floats that is made."""

    size = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, Tensor) and not func.is_view else None
        if made is not None and made.is_floating_point():
            self.size = max(self.size, made.numel())
        return out


@pytest.mark.parametrize("verifier", [tree_mask, match], ids=lambda v: v.name)
@pytest.mark.parametrize("law", [ONE_HOT, WITHOUT])
def test_nodes_that_are_not_visited_cost_nothing(verifier: Verifier, law: DraftLaw) -> None:
    rows, vocab = 2, 500
    p, draft, rng = scene(TREE, law, rows=rows, vocab=vocab)
    with Largest() as largest:
        verifier.verify(p, draft, rng)
    assert largest.size <= rows * vocab


def test_a_shallow_descent_needs_no_more_draws_than_its_depth() -> None:
    calls = []

    class Counting(KeyedRng):
        def bernoulli(self, p: Tensor, node: Tensor | int, draw: int) -> Tensor:
            calls.append(draw)
            return super().bernoulli(p, node, draw)

    p, draft, _ = scene(TREE, ONE_HOT)
    tree_mask.verify(p, draft, Counting([1, 2, 3], [9] * 3, Purpose.VERIFY, "", torch.device("cpu")))
    assert len(calls) == draft.depth * draft.width


def test_the_watch_sees_what_waits() -> None:
    with Steps() as watch:
        torch.ones(2).nonzero()
        torch.ones(1).item()
    assert set(watch.calls) & set(WAITS) == {"nonzero", "_local_scalar_dense"}
    with pytest.raises(AssertionError, match="tolist"), no_reading():
        torch.ones(2).tolist()
    assert keyed(1) is not None
