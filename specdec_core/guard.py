"""The fence around a drafter: what it returns is checked, and its failure does not end the run.

Shapes and dtypes are checked on the host at once. Values are checked on the device, where offending nodes
are cut so that what is left keeps the law (`Draft` order is draw order, so cutting from the end is
exact); flags for them ride along in the round's one host transfer. A node whose token lies outside the
vocabulary stays, as a token the target never says.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec_core.draft import HOLE, Draft, DraftLaw
from specdec_core.errors import DraftContractViolation, DrafterError
from specdec_core.interfaces import Budget, Capabilities, Context, Drafter, Outcome, Rows
from specdec_core.model.tree import Tree

logger = logging.getLogger("specdec")

_RULES = (
    "a token id outside the vocabulary",
    "a parent that is no earlier node",
    "more children of one node than the draft's `width`",
    "a node deeper than the budget or the draft's `depth`",
    "more nodes than the budget",
    "a law that its capabilities do not list",
    "a sampled node whose q is missing, or is not a finite non-negative distribution",
)
_Q_UNUSABLE = 1 << 6
_NEEDS_Q = (DraftLaw.SAMPLED, DraftLaw.WITHOUT_REPLACEMENT)


@dataclass(frozen=True, eq=False, slots=True)
class CheckedDraft:
    """A draft that is safe to feed and to verify."""

    draft: Draft
    tree: Tree | None  # None: no nodes
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

    def propose(self, context: Context, budget: Budget) -> CheckedDraft:
        """Draft, and check what came back."""
        if not self.dropped and any(budget.depth):
            with self._fenced("propose"):
                draft = self.drafter.propose(context, budget)
                _check_on_host(draft, context, self.vocab_size, self.capabilities, self.name)
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
    surely_beyond = (draft.parents[:, room:] != HOLE).any(dim=-1)
    draft = _narrowed(draft, room, max(budget.depth))
    tokens, parents = draft.tokens, draft.parents
    index = torch.arange(draft.nodes, device=parents.device)
    orphan = (parents >= index) | (parents < HOLE)
    earlier_siblings = (parents.unsqueeze(1) == parents.unsqueeze(2)).tril_(-1).sum(dim=-1)
    surplus = (parents > HOLE) & (earlier_siblings >= draft.width)
    tree = Tree.of(parents.masked_fill(orphan | surplus, HOLE))
    depth = torch.tensor(budget.depth, device=parents.device).clamp_(max=draft.depth)
    deep = tree.real & (tree.depths > depth.unsqueeze(-1))
    beyond = tree.real & (tree.real.cumsum(dim=-1) > budget.nodes)
    real = tree.real & ~deep & ~beyond
    alien = real & ((tokens < 0) | (tokens >= vocab_size))
    undeclared = torch.ones_like(draft.laws, dtype=torch.bool)
    for law in capabilities.laws:
        undeclared &= draft.laws != law
    found = torch.stack([mark.any(dim=-1) for mark in (alien, orphan, surplus, deep, beyond)])
    found[-1] |= surely_beyond
    undeclared &= real.any(dim=-1)
    unusable = _unusable_q(draft, real)
    found = torch.cat([found, undeclared[None], unusable[None]])
    real &= ~(undeclared | unusable).unsqueeze(-1)
    bits = 1 << torch.arange(len(_RULES), device=parents.device)
    flags = (found * bits[:, None]).sum(dim=0)
    draft = replace(draft, parents=parents.masked_fill(~real, HOLE))
    return CheckedDraft(draft, Tree(tree.ancestors, tree.depths, real), flags, real.sum(dim=-1))


def _narrowed(draft: Draft, columns: int, depth: int) -> Draft:
    """Cut a draft's columns, and its bounds to what they can be."""
    columns = min(columns, draft.nodes)
    return replace(
        draft,
        tokens=draft.tokens[:, :columns],
        parents=draft.parents[:, :columns],
        probs=None if draft.probs is None else draft.probs[:, :columns],
        scores=None if draft.scores is None else draft.scores[:, :columns],
        depth=min(draft.depth, columns, depth),
        width=min(draft.width, columns),
    )


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
    if draft.nodes and draft.width > 1 and not can.makes_trees:
        raise _violation(name, "it made a tree, but its capabilities say makes_trees=False")
    if draft.nodes and draft.probs is None and can.laws and can.laws <= set(_NEEDS_Q):
        raise _violation(name, "its law is sampled, but it gave no q (`probs`)")


def _check_host_values(draft: Draft, rows: int, name: str) -> None:
    """Check what the host reads without a transfer."""
    for part, values in (("counts", draft.counts), ("sources", draft.sources)):
        if values is not None and len(values) != rows:
            raise _violation(name, f"`{part}` must have {rows} entries, not {len(values)}")
    if not all(isinstance(bound, int) for bound in (draft.depth, draft.width)):
        raise _violation(name, f"depth and width must be int, not {draft.depth!r} and {draft.width!r}")
    if draft.nodes and (draft.depth < 1 or draft.width < 1):
        raise _violation(
            name, f"a draft with nodes has depth and width of at least 1, not {draft.depth} and {draft.width}"
        )


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
