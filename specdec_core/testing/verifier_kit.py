"""A verifier under test: builds it, and makes rounds for it to judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_core.contract.distributions import TargetDistributions
from specdec_core.contract.draft import HOLE, Draft, DraftLaw, Verdict
from specdec_core.contract.interfaces import Verifier
from specdec_core.contract.rng import KeyedRng, Purpose
from specdec_core.plugins.registry import Registry
from specdec_core.plugins.spec_string import parse_verifier
from specdec_core.testing.worlds import Drafted, Shape, as_draft, as_p, chain, drafts, toy, tree

VOCAB = 5
# Each waits for the device, or has a result whose shape depends on values.
WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique", "item"}
_READS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")


class VerifierKit:
    """A verifier as `--verifier` names it."""

    def __init__(self, spec: str, registry: Registry) -> None:
        self.spec, self.registry = spec, registry
        parsed = parse_verifier(spec)
        registry.verifier(parsed.name)
        self._parsed = parsed

    def build(self) -> Verifier:
        """Make a verifier, as from the command line."""
        return self.registry.build_verifier(self._parsed.name, self._parsed.options)

    @cached_property
    def verifier(self) -> Verifier:
        """One for all contracts: it is a function."""
        return self.build()

    @property
    def laws(self) -> list[DraftLaw]:
        """Those of its laws that a draft can be made by without a target's noise."""
        return sorted(self.verifier.laws - {DraftLaw.COUPLED})

    @property
    def shapes(self) -> dict[str, Shape]:
        """Drafts it says it can judge."""
        chains = {"no draft": chain(0), "one token": chain(1), "a chain": chain(3)}
        trees = {"a tree": tree(2, 1), "a late tree": tree(1, 2)} if self.verifier.handles_trees else {}
        return {**chains, **trees}

    def batch(self, seed: int, rows: int = 6) -> tuple[TargetDistributions, Draft]:
        """Random drafts of every law and shape that it treats, some with holes, some rows greedy; float32."""
        random = np.random.default_rng(seed)
        shapes, laws = list(self.shapes.values()), self.laws
        p, q = toy(seed, VOCAB, sharpness=0.3), toy(seed + 1, VOCAB)
        members: list[Drafted] = []
        contexts = [(int(random.integers(VOCAB)),) for _ in range(rows)]
        for context in contexts:
            law, shape = laws[random.integers(len(laws))], shapes[random.integers(len(shapes))]
            every = drafts(q, law, shape, context, holes=bool(random.integers(2)))
            members.append(every[random.integers(len(every))])
        greedy = (random.random(rows) < 0.3).tolist() if self.verifier.samples else [True] * rows
        exact = as_p(p, contexts, members, greedy)
        draft = as_draft(members, VOCAB)
        probs = None if draft.probs is None else draft.probs.float()
        return TargetDistributions(exact.logits.float(), exact.greedy), with_probs(draft, probs)

    def judge(self, p: TargetDistributions, draft: Draft, seed: int = 0) -> Verdict:
        """Judge with the generator of a round."""
        return self.verifier.verify(p, draft, keyed(range(draft.rows), seed=seed))


def with_probs(draft: Draft, probs: Tensor | None) -> Draft:
    """The same draft with another q."""
    return Draft(draft.tokens, draft.parents, draft.laws, draft.depth, draft.width, probs)


def keyed(rows: Any, *, seed: int = 0, device: str = "cpu") -> KeyedRng:
    """The generator of some rows of a batch."""
    rows = list(rows)
    return KeyedRng(
        [seed + 100 + row for row in rows],
        [3 + row for row in rows],
        Purpose.VERIFY,
        "",
        torch.device(device),
    )


def elsewhere(p: TargetDistributions, draft: Draft, device: str) -> tuple[TargetDistributions, Draft]:
    """A round on another device."""
    greedy = None if p.greedy is None else p.greedy.to(device)
    tensors = (draft.tokens.to(device), draft.parents.to(device), draft.laws.to(device))
    probs = None if draft.probs is None else draft.probs.to(device)
    return TargetDistributions(p.logits.to(device), greedy), Draft(*tensors, draft.depth, draft.width, probs)


def one_row(p: TargetDistributions, draft: Draft, row: int) -> tuple[TargetDistributions, Draft]:
    """A row by itself, without the places that pad it."""
    real = (draft.parents[row] != HOLE).nonzero()
    n = int(real.max()) + 1 if len(real) else 0
    probs = None if draft.probs is None else draft.probs[[row], :n]
    one = Draft(
        draft.tokens[[row], :n], draft.parents[[row], :n], draft.laws[[row]], draft.depth, draft.width, probs
    )
    if n == 0:
        one = Draft.empty(1)
    greedy = None if p.greedy is None else p.greedy[[row]]
    return TargetDistributions(p.logits[[row], : 1 + n], greedy), one


def committed(draft: Draft, verdict: Verdict, row: int) -> list[int]:
    """What a row says."""
    path = [node for node in verdict.path[row].tolist() if node >= 0]
    return [*(int(draft.tokens[row, node]) for node in path), int(verdict.next_token[row])]


class Steps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def no_reading() -> Iterator[None]:
    """Forbid the tensor methods that fetch values to the host."""

    def refuse(name: str) -> Callable[..., Any]:
        def method(*_: object, **__: object) -> None:
            raise AssertionError(f"Tensor.{name} was called, which waits for the device")

        return method

    before = {name: getattr(Tensor, name) for name in _READS}
    try:
        for name in _READS:
            setattr(Tensor, name, refuse(name))
        yield
    finally:
        for name, method in before.items():
            setattr(Tensor, name, method)
