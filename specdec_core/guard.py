"""The fence around a drafter: what it returns is checked, and its failure does not end the run.

Shapes and dtypes are checked on the host at once. Values are checked on the device, where offending nodes
are cut so that what is left keeps the law (`Draft` order is draw order, so cutting from the end is
exact); flags for them ride along in the round's one host transfer. A node whose token lies outside the
vocabulary stays, as a token the target never says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec_core.draft import HOLE, Draft, DraftLaw
from specdec_core.errors import DraftContractViolation, DrafterError
from specdec_core.interfaces import Budget, Capabilities, Context, Drafter, Outcome, Rows
from specdec_core.model.tree import Tree
from specdec_core.transfer import on_device

logger = logging.getLogger("specdec")

Cut = Callable[[Draft], Draft]
"""Leaves out nodes behind a proposal, for reasons that no drawn value is part of."""

_RULES = (
    "a token id outside the vocabulary",
    "a parent that is no earlier node",
    "more children of one node than the draft's `width`",
    "a node deeper than the budget or the draft's `depth`",
    "more nodes than the budget",
    "a law that its capabilities do not list",
    "a sampled node whose q is missing, or is not a finite non-negative distribution",
    "a node of a `chain` that does not follow the one before",
)
_ALIEN, _ORPHAN, _SURPLUS, _TOO_DEEP, _TOO_MANY, _UNDECLARED, _UNUSABLE, _LOOSE = range(len(_RULES))
_Q_UNUSABLE = 1 << _UNUSABLE
_NEEDS_Q = (DraftLaw.SAMPLED, DraftLaw.WITHOUT_REPLACEMENT)


@dataclass(frozen=True, eq=False, slots=True)
class CheckedDraft:
    """A draft that is safe to feed and to verify."""

    draft: Draft
    tree: Tree | None  # None: no nodes, or chains
    flags: Tensor | None  # int64 [B]: broken rules, a bit each
    counts: Tensor | None  # int64 [B]: nodes of each row

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> CheckedDraft:
        """Make a draft without nodes."""
        return cls(Draft.empty(rows, device), None, None, None)


class GuardedDrafter:
    """A drafter that may fail: with `strict` it raises, else it is dropped with one warning.

    A dropped drafter is left out until `renew`, at the next run.
    """

    def __init__(self, drafter: Drafter, vocab_size: int, *, strict: bool = False) -> None:
        self.drafter, self.vocab_size, self.strict = drafter, vocab_size, strict
        self.dropped = False
        self.capabilities: Capabilities = drafter.capabilities
        self._admitted: set[int] = set()

    @property
    def name(self) -> str:
        """The drafter's name."""
        return self.drafter.name

    def renew(self) -> None:
        """Try the drafter again."""
        self.dropped = False

    def admit(self, rows: Rows) -> None:
        """Begin rows."""
        if self.dropped:
            return
        with self._fenced("admit"):
            self._admitted.update(rows.ids)
            self.drafter.admit(rows)

    def release(self, rows: Sequence[int]) -> None:
        """Forget rows, of a dropped drafter too."""
        known = [row for row in rows if row in self._admitted]
        self._admitted.difference_update(known)
        if known:
            with self._fenced("release"):
                self.drafter.release(known)

    def propose(self, context: Context, budget: Budget, cut: Cut | None = None) -> CheckedDraft:
        """Draft, check what came back, and keep what `cut` leaves of it."""
        if not self.dropped and any(budget.depth):
            with self._fenced("propose"):
                draft = self.drafter.propose(context, budget)
                _check_on_host(draft, context, self.vocab_size, self.capabilities, self.name)
                if draft.nodes and cut is not None:
                    draft = cut(draft)
                if draft.nodes:
                    return check_values(draft, budget, self.capabilities, self.vocab_size)
        return CheckedDraft.empty(len(context.rows), context.device)

    def observe(self, outcome: Outcome) -> None:
        """Pass on what was committed."""
        if not self.dropped:
            with self._fenced("observe"):
                self.drafter.observe(outcome)

    def judge(self, flags: Sequence[int]) -> None:
        """Act on the flags of the round, once they are on the host."""
        broken = 0
        for flag in flags:
            broken |= flag
        if broken and not self.dropped:
            rule = " and ".join(text for bit, text in enumerate(_RULES) if broken >> bit & 1)
            self._drop(_violation(self.name, f"it proposed {rule}"), off_law=bool(broken & _Q_UNUSABLE))

    @contextmanager
    def _fenced(self, call: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a plugin raises must not end the run
            if not isinstance(error, DrafterError) or not error.drafter:
                reason = f"{call} raised {type(error).__name__}: {error}"
                failure = DrafterError(f"drafter {self.name!r}: {reason}", drafter=self.name)
                failure.__cause__ = error
                error = failure
            self._drop(error)

    def _drop(self, error: DrafterError, *, off_law: bool = False) -> None:
        if self.dropped:
            return  # it was named for what it did first
        self.dropped = True
        if self.strict:
            raise error
        law = "; sampled text of this one round may be off the target's law" if off_law else ""
        logger.warning("%s; the run goes on without it%s", error, law)
        self.release(list(self._admitted))


def check_values(draft: Draft, budget: Budget, capabilities: Capabilities, vocab_size: int) -> CheckedDraft:
    """Cut what breaks a rule, without a host transfer, and flag it.

    A row whose law or q cannot be verified loses its whole draft.
    """
    room = max(budget.nodes, capabilities.nodes)  # columns that the caches have room for
    broken: dict[int, Tensor] = {}  # rule -> bool [B]
    if draft.nodes > room:
        broken[_TOO_MANY] = (draft.parents[:, room:] != HOLE).any(dim=-1)
    draft = _narrowed(draft, room, max(budget.depth))
    real, tree = _chain_nodes(draft, broken) if draft.chain else _tree_nodes(draft, broken)
    real = _within(real, tree, budget, draft.depth, broken)
    counts = real.sum(dim=-1)
    alien = draft.tokens.clamp(0, vocab_size - 1) != draft.tokens
    broken[_ALIEN] = (alien & real).any(dim=-1)
    unfit = _unfit(draft, real, counts, capabilities, broken)
    real, counts = real & ~unfit.unsqueeze(-1), counts.masked_fill(unfit, 0)
    flags = torch.zeros_like(counts)
    for rule, rows in broken.items():
        flags = torch.add(flags, rows, alpha=1 << rule)
    draft = replace(draft, parents=draft.parents.masked_fill(~real, HOLE))
    tree = None if tree is None else Tree(tree.ancestors, tree.depths, real)
    return CheckedDraft(draft, tree, flags, counts)


def _chain_nodes(draft: Draft, broken: dict[int, Tensor]) -> tuple[Tensor, None]:
    """Find the nodes of chains, bool [B, n]: those up to the first that does not follow the one before."""
    index = torch.arange(draft.nodes, device=draft.parents.device)
    real = (draft.parents != index - 1).cumsum(dim=-1) == 0
    broken[_LOOSE] = (~real & (draft.parents != HOLE)).any(dim=-1)
    return real, None


def _tree_nodes(draft: Draft, broken: dict[int, Tensor]) -> tuple[Tensor, Tree]:
    """Find the nodes that hang on an earlier one, all the way to the root: bool [B, n]."""
    parents = draft.parents
    index = torch.arange(draft.nodes, device=parents.device)
    orphan = (parents >= index) | (parents < HOLE)
    earlier_siblings = (parents.unsqueeze(1) == parents.unsqueeze(2)).tril_(-1).sum(dim=-1)
    surplus = (parents > HOLE) & (earlier_siblings >= draft.width)
    broken[_ORPHAN], broken[_SURPLUS] = orphan.any(dim=-1), surplus.any(dim=-1)
    tree = Tree.of(parents.masked_fill(orphan | surplus, HOLE))
    return tree.real, tree


def _within(real: Tensor, tree: Tree | None, budget: Budget, depth: int, broken: dict[int, Tensor]) -> Tensor:
    """Leave the nodes that the budget, and the draft's own `depth`, allow."""
    n, device = real.shape[1], real.device
    limits = [min(limit, depth) for limit in budget.depth]
    if tree is None:  # node j has depth j + 1, and is the row's node number j + 1
        limits = [min(limit, budget.nodes) for limit in limits]
        if n <= min(limits):
            return real  # as a rule: then no chain is too long
        deep = real & (torch.arange(n, device=device) >= on_device(limits, device).unsqueeze(-1))
        broken[_TOO_DEEP] = deep.any(dim=-1)
        return real & ~deep
    deep = real & (tree.depths > on_device(limits, device).unsqueeze(-1))
    beyond = real & (real.cumsum(dim=-1) > budget.nodes)
    broken[_TOO_DEEP] = deep.any(dim=-1)
    many = beyond.any(dim=-1)
    broken[_TOO_MANY] = broken[_TOO_MANY] | many if _TOO_MANY in broken else many
    return real & ~deep & ~beyond


def _unfit(
    draft: Draft, real: Tensor, counts: Tensor, capabilities: Capabilities, broken: dict[int, Tensor]
) -> Tensor:
    """Say which rows have nodes whose law, or whose q, cannot be verified: bool [B]."""
    undeclared = counts > 0
    for law in capabilities.laws:
        undeclared = undeclared & (draft.laws != law)
    broken[_UNDECLARED] = undeclared
    if draft.probs is None and capabilities.laws.isdisjoint(_NEEDS_Q):
        return undeclared
    broken[_UNUSABLE] = unusable = _unusable_q(draft, real)
    return undeclared | unusable


def _narrowed(draft: Draft, columns: int, depth: int) -> Draft:
    """Cut a draft's columns, and its bounds to what they can be."""
    draft = draft.cut(columns)
    return replace(draft, depth=min(draft.depth, draft.nodes, depth), width=min(draft.width, draft.nodes))


def _unusable_q(draft: Draft, real: Tensor) -> Tensor:
    """Which rows need a q and have none that can be used: bool [B]."""
    needs = (draft.laws == DraftLaw.SAMPLED) | (draft.laws == DraftLaw.WITHOUT_REPLACEMENT)
    if draft.probs is None:
        return needs & real.any(dim=-1)
    q = draft.probs
    sums = q.sum(dim=-1)
    bad = ~torch.isfinite(sums) | (sums < 0.99) | (sums > 1.01) | (q < 0).any(dim=-1)
    return needs & (bad & real).any(dim=-1)


def _check_on_host(draft: object, context: Context, vocab_size: int, can: Capabilities, name: str) -> None:
    """Check types, shapes, dtypes and the device.

    Raises:
        DraftContractViolation: names the drafter and the rule.
    """
    if not isinstance(draft, Draft):
        raise _violation(name, f"propose must return a Draft, not {type(draft).__name__}")
    rows = len(context.rows)
    shape = (rows, draft.nodes if _dimensions(draft.tokens) == 2 else -1)
    wanted: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype]] = [
        ("tokens", draft.tokens, shape, torch.int64),
        ("parents", draft.parents, shape, torch.int64),
        ("laws", draft.laws, (rows,), torch.uint8),
        ("probs", draft.probs, (*shape, vocab_size), torch.float32),
        ("scores", draft.scores, shape, torch.float32),
    ]
    for part, tensor, size, dtype in wanted:
        if tensor is None and part in ("probs", "scores"):
            continue
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != size or tensor.dtype != dtype:
            expected = f"[{rows}, n]" if part == "tokens" else str(list(size))
            raise _violation(name, f"`{part}` must be {_name(dtype)} {expected}, not {_described(tensor)}")
        if tensor.device != context.device:
            raise _violation(name, f"`{part}` must be on {context.device}, not on {tensor.device}")
    _check_host_values(draft, rows, name)
    if draft.host is not None and any(draft.host) and can.laws <= set(_NEEDS_Q):
        raise _violation(name, "it gave `host` nodes, which may be cut, but it draws what it drafts")
    if draft.nodes and draft.width > 1 and not can.makes_trees:
        raise _violation(name, "it made a tree, but its capabilities say makes_trees=False")
    if draft.nodes and draft.probs is None and can.laws and can.laws <= set(_NEEDS_Q):
        raise _violation(name, "its law is sampled, but it gave no q (`probs`)")


def _check_host_values(draft: Draft, rows: int, name: str) -> None:
    """Check what the host reads without a transfer."""
    for part, values in (("counts", draft.counts), ("sources", draft.sources), ("host", draft.host)):
        if values is not None and len(values) != rows:
            raise _violation(name, f"`{part}` must have {rows} entries, not {len(values)}")
    for nodes in draft.host or ():
        if nodes is not None and len(nodes.scores) not in (0, len(nodes.tokens)):
            raise _violation(name, f"{len(nodes.tokens)} nodes of a row have {len(nodes.scores)} scores")
        if nodes is not None and not all(0.0 <= score <= 1.0 for score in nodes.scores):
            raise _violation(name, f"scores are chances, from 0 to 1, not {list(nodes.scores)}")
    if not all(isinstance(bound, int) for bound in (draft.depth, draft.width)):
        raise _violation(name, f"depth and width must be int, not {draft.depth!r} and {draft.width!r}")
    if draft.nodes and (draft.depth < 1 or draft.width < 1):
        raise _violation(
            name, f"a draft with nodes has depth and width of at least 1, not {draft.depth} and {draft.width}"
        )
    if draft.chain and draft.nodes and draft.width > 1:
        raise _violation(name, f"a draft that is a `chain` has width 1, not {draft.width}")


def _dimensions(value: object) -> int:
    return value.dim() if isinstance(value, Tensor) else -1


def _described(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{_name(value.dtype)} {list(value.shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _violation(name: str, rule: str) -> DraftContractViolation:
    return DraftContractViolation(f"drafter {name!r} broke the contract: {rule}", drafter=name, rule=rule)
