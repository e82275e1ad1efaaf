"""What a model can do: a few tokens through a tree and through a plain pass, compared.

Models that take positions from slots (ALiBi) fail the tree; those with a state that is no cache fail the
chain too. A probe that raises counts as failed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from specdec_core.context import RoundContext, TokenBuffer
from specdec_core.draft import ROOT
from specdec_core.errors import UnsupportedModel
from specdec_core.interfaces import Rows
from specdec_core.model.runner import Runner
from specdec_core.model.tree import Tree
from specdec_core.rng import KeyedRng, Purpose
from specdec_core.sampling_params import SamplingParams

_TREE = [ROOT, ROOT, 1, 1, 3]  # the longest path goes through second children
_CHAIN = [ROOT, 0, 1, 2]
_PROMPT = 5
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative to the spread of the logits
_LOOSE = 0.15  # half precision rounds blocks of other sizes differently


@dataclass(frozen=True)
class Probe:
    """Which drafts a target can check."""

    trees: bool
    reason: str = ""  # why not, if not


@dataclass
class _Row:
    prompt: tuple[int, ...]
    tokens: list[int]
    id: int = 0
    place: int = 0
    params: SamplingParams = field(default_factory=lambda: SamplingParams(max_new_tokens=1))
    eos: frozenset[int] = frozenset()


def probe(runner: Runner) -> Probe:
    """Feed a few tokens through a tree and through plain passes, and compare the logits.

    Raises:
        UnsupportedModel: not even a chain comes out right.
    """
    reason = _fault(runner, _TREE)
    if not reason:
        return Probe(trees=True)
    chain = _fault(runner, _CHAIN)
    if chain:
        kind = runner.model.config.get_text_config(decoder=True).model_type
        raise UnsupportedModel(
            f"{kind} cannot be checked in blocks: {chain}; its attention or its state does not follow the "
            "positions and masks it is given"
        )
    return Probe(trees=False, reason=reason)


def _fault(runner: Runner, parents: list[int]) -> str:
    """Say what is wrong with a draft of this shape; empty if nothing is."""
    try:
        error, limit = _deviation(runner, parents)
    except Exception as problem:
        return f"a block of {_PROMPT + len(parents)} tokens raised {type(problem).__name__}: {problem}"
    finally:
        runner.release([0])
    return (
        "" if error <= limit else f"logits of a block differ from a plain pass by {error:.2g} of their spread"
    )


@torch.no_grad()
def _deviation(runner: Runner, parents: list[int]) -> tuple[float, float]:
    """Compare with a plain causal pass over every root path: (deviation over spread, allowed)."""
    ids = [(7919 * i + 13) % runner.vocab_size for i in range(_PROMPT + len(parents))]
    prompt, nodes = ids[:_PROMPT], ids[_PROMPT:]
    paths = [_path(parents, node) for node in range(len(parents))]
    width = max(map(len, paths))
    # Right padding is harmless: a causal pass never looks ahead.
    plain = [prompt + [nodes[i] for i in path] + [0] * (width - len(path)) for path in paths]
    expected = runner.model(
        input_ids=torch.tensor(plain, device=runner.device), use_cache=False
    ).logits.float()
    at = torch.tensor([_PROMPT - 1 + len(path) for path in paths], device=runner.device)
    after_nodes = expected[torch.arange(len(paths), device=runner.device), at]
    expected = torch.cat([expected[0, _PROMPT - 1].unsqueeze(0), after_nodes])

    row = _Row(tuple(prompt), list(prompt))
    runner.admit(Rows((row.id,), (row.place,), (row.prompt,), (row.params,)), nodes=len(nodes))
    rng = KeyedRng([0], [0], Purpose.DRAFT, "", runner.device)
    context = RoundContext([row], TokenBuffer(runner.device), rng)
    tree = Tree.of(torch.tensor([parents], device=runner.device))
    got = runner.forward(context, torch.tensor([nodes], device=runner.device), tree).logits[0].float()
    difference, spread = (got - expected).abs(), float(expected.std())
    exact = _TOLERANCE.get(runner.dtype)
    error = float(difference.max() if exact else difference.mean()) / max(spread, 1e-12)
    return (error, exact or _LOOSE) if error == error else (float("inf"), 0.0)


def _path(parents: list[int], node: int) -> list[int]:
    path: list[int] = []
    while node != ROOT:
        path.insert(0, node)
        node = parents[node]
    return path
