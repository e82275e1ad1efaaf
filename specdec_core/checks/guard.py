"""The fence around a drafter: what it returns is checked, and its failure does not end the run.

Shapes and dtypes are checked here, on the host at once; values in `draft_values`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec_core.checks.draft_values import (
    Q_UNUSABLE,
    RULES,
    CheckedDraft,
    check_chains,
    check_values,
)
from specdec_core.contract.blame import blaming_drafter
from specdec_core.contract.draft import Draft
from specdec_core.contract.errors import DraftContractViolation, DrafterError
from specdec_core.contract.interfaces import Budget, Capabilities, Context, Drafter, Outcome, Rows

logger = logging.getLogger("specdec")

Cut = Callable[[Draft], Draft]
"""Leaves out nodes behind a proposal, for reasons that no drawn value is part of."""


class GuardedDrafter:
    """A drafter that may fail: with `strict` it raises, else it is dropped with one warning.

    A dropped drafter is left out until `renew`.

    forcing: the same drafter, with what constraints force before it: it acts while a row has one.
    """

    def __init__(
        self, drafter: Drafter, vocab_size: int, *, strict: bool = False, forcing: Drafter | None = None
    ) -> None:
        self.drafter, self.vocab_size, self.strict = drafter, vocab_size, strict
        self._plain, self._forcing = drafter, drafter if forcing is None else forcing
        self.dropped = False
        self._can = drafter.capabilities
        self.capabilities: Capabilities = self._forcing.capabilities
        self._constrained: set[int] = set()
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
        self._admitted.update(rows.ids)
        pairs = zip(rows.ids, rows.params, strict=True)
        self._constrained.update(row for row, params in pairs if params.constraint is not None)
        self._choose()
        try:
            self.drafter.admit(rows)
        except Exception as error:  # whatever a drafter raises
            self._failed("admit", error)

    def release(self, rows: Sequence[int]) -> None:
        """Forget rows, of a dropped drafter too."""
        known = [row for row in rows if row in self._admitted]
        if not known:
            return
        self._admitted.difference_update(known)
        try:
            self.drafter.release(known)
        except Exception as error:  # whatever a drafter raises
            self._failed("release", error)
        finally:
            self._constrained.difference_update(known)
            self._choose()

    def _choose(self) -> None:
        """Let act who is to; between rounds."""
        self.drafter = self._forcing if self._constrained else self._plain
        self._can = self.drafter.capabilities

    def propose(self, context: Context, budget: Budget, cut: Cut | None = None) -> CheckedDraft:
        """Draft, check what came back, and keep what `cut` leaves of it."""
        if not self.dropped and (any(budget.depth) or any(budget.forced)):
            try:
                draft = self.drafter.propose(context, budget)
                _check_on_host(draft, context, self.vocab_size, self._can, self.name)
                if draft.nodes and cut is not None:
                    draft = cut(draft)
                if draft.nodes:
                    check = check_chains if draft.chain and draft.hosted else check_values
                    allowed = budget.whole if budget.forced else budget
                    return check(draft, allowed, self._can, self.vocab_size)
            except Exception as error:  # whatever a drafter raises
                self._failed("propose", error)
        return CheckedDraft.empty(len(context.rows), context.device)

    def observe(self, outcome: Outcome) -> None:
        """Pass on what was committed."""
        if not self.dropped:
            try:
                self.drafter.observe(outcome)
            except Exception as error:  # whatever a drafter raises
                self._failed("observe", error)

    def blame(self, flags: Sequence[int]) -> None:
        """Act on the flags of the round, once they are on the host."""
        broken = 0
        for flag in flags:
            broken |= flag
        if broken and not self.dropped:
            rule = " and ".join(text for bit, text in enumerate(RULES) if broken >> bit & 1)
            self._drop(_violation(self.name, f"it proposed {rule}"), off_law=bool(broken & Q_UNUSABLE))

    def _failed(self, call: str, error: Exception) -> None:
        """Go on without a drafter that raised, whatever that was; a lack of memory is not its fault."""
        try:
            with blaming_drafter(self.name, call):
                raise error
        except DrafterError as fault:
            self._drop(fault)

    def _drop(self, error: DrafterError, *, off_law: bool = False) -> None:
        if self.dropped:
            return  # it was named for what it did first
        self.dropped = True
        if self.strict:
            raise error
        law = "; sampled text of this one round may be off the target's law" if off_law else ""
        logger.warning("%s; the run goes on without it%s", error, law)
        self.release(list(self._admitted))


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
    if draft.host is not None and any(draft.host) and all(law.needs_q for law in can.laws):
        raise _violation(name, "it gave `host` nodes, which may be cut, but it draws what it drafts")
    if draft.nodes and draft.width > 1 and not can.makes_trees:
        raise _violation(name, "it made a tree, but its capabilities say makes_trees=False")
    if draft.nodes and draft.probs is None and can.laws and all(law.needs_q for law in can.laws):
        raise _violation(name, "its law is sampled, but it gave no q (`probs`)")


def _check_host_values(draft: Draft, rows: int, name: str) -> None:
    """Check what the host reads without a transfer."""
    for part, values in (("counts", draft.counts), ("sources", draft.sources), ("host", draft.host)):
        if values is not None and len(values) != rows:
            raise _violation(name, f"`{part}` must have {rows} entries, not {len(values)}")
    counts = draft.counts or ()
    if not all(type(count) is int and 0 <= count <= draft.nodes for count in counts):
        raise _violation(
            name, f"`counts` are whole numbers from 0 to its {draft.nodes} nodes, not {list(counts)}"
        )
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
