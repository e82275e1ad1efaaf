"""What a model can do: a few tokens in blocks and in plain passes, compared.

Models that take positions from slots (ALiBi) fail a tree; those with a state that is no cache, or a window
other than their config's, fail a chain too. A probe that raises counts as failed. It runs on replicas, whose
windows are small, so that a few tokens reach beyond them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from specdec_core.contract.constraints import Walk
from specdec_core.contract.draft import HOLE, ROOT
from specdec_core.contract.errors import UnsupportedModel
from specdec_core.contract.interfaces import Rows
from specdec_core.contract.rng import KeyedRng, Purpose
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.model.attention import AttentionPlan, name_attention
from specdec_core.model.replica import Replica
from specdec_core.model.runner import Runner
from specdec_core.rows.context import RoundContext, TokenBuffer

_TREE = [ROOT, ROOT, 1, 1, 3]  # the longest path goes through second children
_CHAIN = [ROOT, 0, 1, 2, HOLE]
_PROMPTS = (6, 5)  # of the row with the tree, and of that with the chain
_WINDOW = 3
# Allowed deviation, relative to the spread of the logits: at least this, or as rounding makes it, ...
_FLOOR = {torch.float64: 1e-9, torch.float32: 1e-4}
_ROUNDING, _MOST = 10, 1e-2
# ... and half precision, where the mean counts: a chain, and how much worse than it a tree may be.
_LOOSE, _TREE_FLOOR, _TREE_FACTOR = 0.15, 0.01, 3


@dataclass(frozen=True)
class Probe:
    """Which drafts a target can check."""

    trees: bool
    reason: str = ""  # why not, if not


@dataclass
class _Row:
    place: int
    tokens: list[int]
    id: int = 0
    prompt: tuple[int, ...] = ()
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_new_tokens=1))
    eos: frozenset[int] = frozenset()
    walk: Walk | None = None

    def fail(self, error: Exception) -> None:
        raise error


def probe(runner: Runner) -> Probe:
    """Feed a few tokens through a tree and a chain and through plain passes, and compare the logits.

    The runner itself feeds nothing, but learns how many bytes a slot will take. Where its model heeds no
    window although the config names one, or does not take our attention in place of its own, or no blocks
    without padding, its plan is corrected.

    Raises:
        UnsupportedModel: not even a chain comes out right.
    """
    replica, windowed = _scratch(runner)
    scratch = Runner(replica)
    reference = replica if scratch.plan.group is None else _scratch(runner)[0]
    name_attention(reference, scratch.plan.as_loaded())
    tree, chain = _faults(scratch, reference.model)
    for simpler in (AttentionPlan.padded, AttentionPlan.as_loaded):
        if (tree or chain) and scratch.plan.group is not None:
            scratch.plan, runner.plan = simpler(scratch.plan), simpler(runner.plan)
            tree, chain = _faults(scratch, reference.model)
    if windowed and not runner.replica.whole:
        chain = chain or "a forward was replaced by one that holds the model itself"
    elif chain and windowed and not _keeps_windows(runner.model):
        scratch.plan = scratch.plan.without_windows()
        tree, without = _faults(scratch, reference.model)
        if not without:
            chain, runner.plan = "", runner.plan.without_windows()
    if chain:
        kind = runner.model.config.get_text_config(decoder=True).model_type
        what = "attention, its windows or its state do" if windowed else "attention or its state does"
        raise UnsupportedModel(
            f"{kind} cannot be checked in blocks: {chain}; its {what} not follow the positions and masks it "
            "is given"
        )
    runner.cache.likely_bytes = scratch.cache.slot_bytes
    return Probe(trees=not tree, reason=tree)


def _scratch(runner: Runner) -> tuple[Replica, bool]:
    """Make a replica in which every window is small; say whether there is one."""
    replica = Replica(runner.model)
    configs = {
        id(c): c for part in replica.model.modules() if (c := getattr(part, "config", None)) is not None
    }
    windows = [config for config in configs.values() if getattr(config, "sliding_window", None)]
    if replica.whole:
        for config in windows:
            config.sliding_window = _WINDOW
    return replica, bool(windows)


def _keeps_windows(model: nn.Module) -> bool:
    """Whether a module holds a window of its own, which making the config's small does not reach."""
    return any(getattr(part, "sliding_window", None) for part in model.modules())


def _faults(runner: Runner, model: Any) -> tuple[str, str]:
    """Say what is wrong with a tree and with a chain, beside plain passes; empty if nothing is."""
    try:
        tree, chain, rounding = _deviations(runner, model)
    except Exception as problem:  # whatever a model raises is what is wrong with it
        raised = f"a block of {len(_TREE) + 1} tokens raised {type(problem).__name__}: {problem}"
        return raised, raised
    floor = _FLOOR.get(runner.dtype)
    if floor is None:
        limits = max(_TREE_FLOOR, _TREE_FACTOR * chain), _LOOSE
    else:
        limit = max(floor, min(_ROUNDING * rounding, _MOST))
        limits = max(limit, min(_ROUNDING * chain, _MOST)), limit
    return _fault(tree, limits[0]), _fault(chain, limits[1])


def _fault(error: float, limit: float) -> str:
    if error <= limit:
        return ""
    return f"logits of a block differ from a plain pass by {error:.2g} of their spread"


@torch.no_grad()
def _deviations(runner: Runner, model: Any) -> tuple[float, float, float]:
    """Measure how far a tree, a chain, and a plain pass of another size are off plain causal passes."""
    n = len(_TREE)
    ids = [(7919 * i + 13) % runner.vocab_size for i in range(max(_PROMPTS) + n)]
    nodes, rows = ids[-n:], [_Row(place, ids[:length]) for place, length in enumerate(_PROMPTS)]
    got = _block(runner, rows, nodes)
    paths = [(0, _path(_TREE, node)) for node in range(n)] + [(1, _path(_CHAIN, n - 2))]
    # Right padding is harmless: a causal pass never looks ahead.
    texts = [rows[row].tokens + [nodes[node] for node in path] for row, path in paths]
    width = max(map(len, texts))
    plain = torch.tensor([text + [0] * (width - len(text)) for text in texts], device=runner.device)
    expected = model(input_ids=plain, use_cache=False).logits.float()
    start = [length - 1 for length in _PROMPTS]
    after = [expected[0, start[0]], *(expected[i, start[0] + len(paths[i][1])] for i in range(n))]
    chain = expected[n, start[1] : start[1] + n]
    short = model(input_ids=plain[:1, : _PROMPTS[0]], use_cache=False).logits[0].float()
    pairs = (got[0], torch.stack(after)), (got[1, :n], chain), (short, expected[0, : _PROMPTS[0]])
    spread, exact = max(float(expected.std()), 1e-12), runner.dtype in _FLOOR
    tree_off, chain_off, rounding = (_distance(a, b, exact) / spread for a, b in pairs)
    return tree_off, chain_off, rounding


def _block(runner: Runner, rows: list[_Row], nodes: list[int]) -> Tensor:
    """Feed prompts of different lengths, and then, on top of the cache, a tree and a chain."""
    places, prompts = tuple(row.place for row in rows), tuple(tuple(row.tokens) for row in rows)
    runner.admit(Rows(places, places, prompts, tuple(row.params for row in rows)), len(nodes))
    rng = KeyedRng([0, 0], [0, 0], Purpose.DRAFT, "", runner.device)
    buffer = TokenBuffer(runner.device)
    # One token is pending, and three: enough padding for a runner to leave it out.
    starts = [_Row(row.place, row.tokens[: -1 - 2 * i]) for i, row in enumerate(rows)]
    runner.forward(RoundContext(starts, buffer, lambda: rng))
    n = len(nodes)
    parents = torch.tensor([_TREE, _CHAIN], device=runner.device)
    tokens = torch.tensor([nodes, nodes], device=runner.device)
    counts = [n - row.count(HOLE) for row in (_TREE, _CHAIN)]
    return runner.forward(
        RoundContext(rows, buffer, lambda: rng), tokens, parents, counts=counts
    ).logits.whole.float()


def _distance(a: Tensor, b: Tensor, exact: bool) -> float:
    """Give the largest difference, or, in half precision, the mean one; infinite where there is a NaN."""
    difference = (a - b).abs().nan_to_num(nan=float("inf"))
    return float(difference.max() if exact else difference.mean())


def _path(parents: list[int], node: int) -> list[int]:
    path: list[int] = []
    while node != ROOT:
        path.insert(0, node)
        node = parents[node]
    return path
