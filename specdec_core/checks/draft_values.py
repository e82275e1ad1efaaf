"""What a drafter proposed, checked by value: what breaks a rule is cut, so that what is left keeps the law.

`Draft` order is draw order, so cutting from the end is exact. Values on the device are checked there, without
a transfer: flags ride along in the round's one. Chains that the host knows are checked on the host, and their
tensors are made of what is left. A node whose token lies outside the vocabulary stays, as a token the target
never says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from specdec_core.contract.draft import HOLE, Draft, DraftLaw, on_device
from specdec_core.contract.interfaces import Budget, Capabilities
from specdec_core.contract.tree import Tree

RULES = (
    "a token id outside the vocabulary",
    "a parent that is no earlier node",
    "more children of one node than the draft's `width`",
    "a node deeper than the budget or the draft's `depth`",
    "more nodes than the budget",
    "a law that its capabilities do not list",
    "a sampled node whose q is missing, or is not a finite non-negative distribution",
    "a node of a `chain` that does not follow the one before",
)
_ALIEN, _ORPHAN, _SURPLUS, _TOO_DEEP, _TOO_MANY, _UNDECLARED, _UNUSABLE, _LOOSE = range(len(RULES))
Q_UNUSABLE = 1 << _UNUSABLE


@dataclass(frozen=True, eq=False, slots=True)
class CheckedDraft:
    """A draft that is safe to feed and to verify."""

    draft: Draft
    tree: Tree | None  # None: no nodes, or chains
    flags: Tensor | None  # int64 [B]: broken rules, a bit each
    counts: Tensor | None  # int64 [B]: nodes of each row
    known: tuple[tuple[int, int], ...] | None = None  # [B] counts and flags, where they are on the host

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> CheckedDraft:
        """Make a draft without nodes."""
        return cls(Draft.empty(rows, device), None, None, None)


def check_chains(draft: Draft, budget: Budget, capabilities: Capabilities, vocab_size: int) -> CheckedDraft:
    """Do what `check_values` does, on the host, for chains that it knows: by `draft.host`, for all rows."""
    assert draft.host is not None
    columns = max(budget.nodes, capabilities.nodes)  # that the caches have room for
    deepest = min(draft.depth, budget.nodes)
    declared = DraftLaw.ONE_HOT in capabilities.laws
    counts = draft.counts or (draft.nodes,) * draft.rows
    kept: list[list[int]] = []
    known: list[tuple[int, int]] = []
    for nodes, limit, count in zip(draft.host, budget.depth, counts, strict=True):
        assert nodes is not None
        parents = nodes.parents[: min(count, draft.nodes)]
        beyond, parents = parents[columns:], parents[:columns]
        sound = next((i for i, parent in enumerate(parents) if parent != i - 1), len(parents))
        within = min(sound, limit, deepest)
        tokens = list(nodes.tokens[:within])
        broken = {
            _TOO_MANY: any(parent != HOLE for parent in beyond),
            _ALIEN: any(not 0 <= token < vocab_size for token in tokens),
            _LOOSE: any(parent != HOLE for parent in parents[sound:]),
            _TOO_DEEP: sound > within,
            _UNDECLARED: within > 0 and not declared,
        }
        kept.append(tokens if declared else [])
        known.append((len(kept[-1]), sum(1 << rule for rule, so in broken.items() if so)))
    safe = Draft.chains(kept, draft.tokens.device)
    return CheckedDraft(replace(safe, sources=draft.sources, host=draft.host), None, None, None, tuple(known))


def check_values(draft: Draft, budget: Budget, capabilities: Capabilities, vocab_size: int) -> CheckedDraft:
    """Cut what breaks a rule, without a host transfer, and flag it.

    A row whose law or q cannot be verified loses its whole draft.
    """
    columns = max(budget.nodes, capabilities.nodes)  # that the caches have room for
    draft = _counted(draft)
    broken: dict[int, Tensor] = {}  # rule -> bool [B]
    if draft.nodes > columns:
        broken[_TOO_MANY] = (draft.parents[:, columns:] != HOLE).any(dim=-1)
    declared = draft.depth
    draft = _narrowed(draft, columns, max(budget.depth))
    real, tree = _chain_nodes(draft, broken) if draft.chain else _tree_nodes(draft, declared, broken)
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


def _tree_nodes(draft: Draft, declared: int, broken: dict[int, Tensor]) -> tuple[Tensor, Tree]:
    """Find the nodes that hang on an earlier one, all the way to the root: bool [B, n].

    declared: the depth of the draft as it was proposed: one more tells what lies deeper.
    """
    parents = draft.parents
    index = torch.arange(draft.nodes, device=parents.device)
    orphan = (parents >= index) | (parents < HOLE)
    earlier_siblings = (parents.unsqueeze(1) == parents.unsqueeze(2)).tril_(-1).sum(dim=-1)
    surplus = (parents > HOLE) & (earlier_siblings >= draft.width)
    broken[_ORPHAN], broken[_SURPLUS] = orphan.any(dim=-1), surplus.any(dim=-1)
    tree = Tree.of(parents.masked_fill(orphan | surplus, HOLE), declared + 1)
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
    if draft.probs is None and not any(law.needs_q for law in capabilities.laws):
        return undeclared
    broken[_UNUSABLE] = unusable = _unusable_q(draft, real)
    return undeclared | unusable


def _narrowed(draft: Draft, columns: int, depth: int) -> Draft:
    """Cut a draft's columns, and its bounds to what they can be."""
    draft = draft.cut(columns)
    return replace(draft, depth=min(draft.depth, draft.nodes, depth), width=min(draft.width, draft.nodes))


def _counted(draft: Draft) -> Draft:
    """Make holes of what stands behind a row's `counts`: it is not fed."""
    if draft.counts is None or draft.nodes <= min(draft.counts):
        return draft
    behind = torch.arange(draft.nodes, device=draft.parents.device)
    behind = behind >= on_device(draft.counts, draft.parents.device).unsqueeze(-1)
    return replace(draft, parents=draft.parents.masked_fill(behind, HOLE))


def _unusable_q(draft: Draft, real: Tensor) -> Tensor:
    """Which rows need a q and have none that can be used: bool [B]."""
    needs = reduce(or_, (draft.laws == law for law in DraftLaw if law.needs_q))
    if draft.probs is None:
        return needs & real.any(dim=-1)
    q = draft.probs
    sums = q.sum(dim=-1)
    bad = ~torch.isfinite(sums) | (sums < 0.99) | (sums > 1.01) | (q < 0).any(dim=-1)
    return needs & (bad & real).any(dim=-1)
