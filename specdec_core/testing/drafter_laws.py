"""What a drafter promises about how its tokens come to be: the declared law, the draws, nothing dropped.

Draws through `context.rng` are seen as they are made, so that a declared q is compared with what was really
drawn from. Tokens that come from elsewhere, and what is left of a draft, are tested by their frequencies.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec_core.contract.draft import Draft, DraftLaw
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.testing.chances import ALARM, positions, uniform_p_value
from specdec_core.testing.contracts import Contracts, Untried, must
from specdec_core.testing.drafter_kit import DrafterKit, Run, global_seeds, prompts_of
from specdec_core.testing.watching import Draw, Node, Proposal, same_weights, shown

CONTRACTS: Contracts[DrafterKit] = Contracts()
ROWS, ROUNDS = 384, 3
_LEAST = 150  # tokens that a verdict by frequency needs
_DRAWN = tuple(law for law in DraftLaw if law.needs_q)


@dataclass(frozen=True, eq=False)
class _Node:
    """A node of a row that declares a law with a q."""

    proposal: Proposal
    row: int
    index: int
    token: int
    depth: int
    rank: int  # among its siblings
    q: Tensor  # [V]

    @property
    def where(self) -> str:
        return f"node {self.index} (depth {self.depth}), after {len(self.proposal.texts[self.row])} tokens"

    @property
    def draws(self) -> list[Draw]:
        """The draws of its row that gave its token; those of its own key first."""
        found = [d for d in self.proposal.draws[self.row] if d.result == self.token and d.kind != "bernoulli"]
        return sorted(found, key=lambda draw: draw.node != self.index)

    @property
    def certain(self) -> bool:
        """Whether q leaves no choice."""
        return float(self.q[self.token]) > 1 - 1e-6

    @property
    def drawn(self) -> bool:
        """Whether a draw through `context.rng` gave its token."""
        return any(draw.kind == "categorical" for draw in self.draws)


def _many(kit: DrafterKit) -> Run:
    """A few rounds of many rows with one prompt and other seeds, half of them with a warped p."""
    [prompt] = prompts_of(kit.target, 8, seed=7)
    can = kit.capabilities
    plain = SamplingParams(max_new_tokens=can.max_depth + 4, temperature=1.0)
    warped = plain.replace(temperature=0.7, top_k=20, top_p=0.95, repetition_penalty=1.2)
    rows = ROWS if any(law.needs_q for law in can.laws) else 32
    params = [(plain, warped)[i % 2].replace(seed=i) for i in range(rows)]
    with global_seeds(11):
        return kit.begin([prompt] * rows, params, ROUNDS, max_batch=rows, reuse_prefixes=False)


def _nodes(run: Run) -> Iterator[_Node]:
    for proposal in run.proposals:
        draft = proposal.draft
        if not isinstance(draft, Draft) or draft.probs is None or not draft.nodes:
            continue
        laws = draft.laws.tolist()
        for row in range(draft.rows):
            if laws[row] in _DRAWN and proposal.temperatures[row] > 0:
                yield from _row_nodes(proposal, draft, row)


def _row_nodes(proposal: Proposal, draft: Draft, row: int) -> Iterator[_Node]:
    assert draft.probs is not None
    parents, tokens = draft.parents[row].tolist(), draft.tokens[row].tolist()
    for index, depth in enumerate(proposal.depths(row)):
        if depth:
            rank = parents[:index].count(parents[index])
            yield _Node(proposal, row, index, tokens[index], depth, rank, draft.probs[row, index])


def _laws(kit: DrafterKit, *laws: DraftLaw) -> None:
    if not kit.capabilities.laws & set(laws):
        names = ", ".join(sorted(law.name for law in kit.capabilities.laws))
        raise Untried(f"nothing is drawn from a q: it declares {names}")


@CONTRACTS.add(
    "law",
    "tokens are drafted by the law that is declared, and `probs` is what they were drawn from",
    "ONE_HOT: the same context, the same draft. SAMPLED, WITHOUT_REPLACEMENT: give the very weights that "
    "`categorical` drew with. COUPLED: take what `target_draw` gives",
)
def law(kit: DrafterKit) -> None:
    run = kit.once(_many)
    for proposal in run.proposals:
        _fixed(proposal)
        _keys(proposal)
        _coupled(proposal)
    nodes = [node for node in _nodes(run) if not node.certain]
    for node in nodes:
        _drawn_from(node)
    _frequencies([node for node in nodes if not node.drawn], "are not drawn from the q that is given")


def _fixed(proposal: Proposal) -> None:
    """ONE_HOT: rows with equal texts and params have equal drafts, whatever their seeds."""
    if not isinstance(proposal.draft, Draft) or not proposal.draft.nodes:
        return
    laws: list[int] = proposal.draft.laws.tolist()
    known: dict[Any, list[Node]] = {}
    for row, text in enumerate(proposal.texts):
        nodes = proposal.nodes(row)
        if laws[row] != DraftLaw.ONE_HOT or not nodes:
            continue
        key = text, proposal.temperatures[row], proposal.budget.depth[row]
        before = known.setdefault(key, nodes)
        must(
            before == nodes,
            f"it declares ONE_HOT, a fixed function of the context, and drafts {shown(before)} and "
            f"{shown(nodes)} after the same {len(text)} tokens under other seeds",
        )


def _keys(proposal: Proposal) -> None:
    """Two draws that may both happen have two keys."""
    for draws in proposal.draws:
        keys = [(d.owner, d.node, d.draw) for d in draws if d.kind != "target"]
        twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
        must(not twice, f"draw {twice and twice[2]} of node {twice and twice[1]} is made twice in a round")


def _coupled(proposal: Proposal) -> None:
    """COUPLED: every token is one that the target's noise of its position gave."""
    if not isinstance(proposal.draft, Draft) or not proposal.draft.nodes:
        return
    laws = proposal.draft.laws.tolist()
    for row in range(proposal.draft.rows):
        if laws[row] != DraftLaw.COUPLED or proposal.temperatures[row] == 0:
            continue
        given = {(draw.node, draw.result) for draw in proposal.draws[row] if draw.kind == "target"}
        tokens = proposal.draft.tokens[row].tolist()
        for index, depth in enumerate(proposal.depths(row)):
            must(
                not depth or (depth - 1, tokens[index]) in given,
                f"it declares COUPLED, and node {index} is not what target_draw gave for depth {depth - 1}",
            )


def _drawn_from(node: _Node) -> None:
    """The weights of the draw that gave a token are its declared q."""
    weights = [draw.weights for draw in node.draws if draw.weights is not None]
    if not weights:
        coupled = any(draw.kind == "target" for draw in node.draws)
        must(not coupled, f"{node.where}: drawn with the target's own noise, which is COUPLED")
        return
    if any(same_weights(one, node.q) for one in weights):
        return
    said, drawn = float(node.q[node.token]), float(weights[0][node.token] / weights[0].sum())
    must(
        False,
        f"{node.where}: token {node.token} has q = {said:.4f} in `probs` and was drawn with {drawn:.4f}",
    )


def _frequencies(nodes: list[_Node], fault: str) -> None:
    """Test tokens by their places in their q, at each depth and for each sibling."""
    groups: dict[tuple[int, int], list[_Node]] = defaultdict(list)
    for node in nodes:
        groups[node.depth, node.rank].append(node)
    groups = {key: group for key, group in groups.items() if len(group) >= _LEAST}
    for (depth, rank), group in sorted(groups.items()):
        tokens = torch.tensor([node.token for node in group])
        p = uniform_p_value(positions(torch.stack([node.q for node in group]), tokens))
        must(
            p > ALARM / len(groups),
            f"{len(group)} tokens at depth {depth}, sibling {rank + 1}, {fault} (p = {p:.1g}; false alarms: "
            f"{ALARM:.0e})",
        )


@CONTRACTS.add(
    "randomness",
    "all draws are made through context.rng, and no global generator is moved",
    "draw with context.rng.categorical(q, node, draw): it is keyed by row and position, so that a seed gives "
    "one text in any batch",
)
def randomness(kit: DrafterKit) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    [prompt] = prompts_of(kit.target, 8, seed=8)
    params = SamplingParams(max_new_tokens=12, temperature=1.0)
    run = kit.run([prompt] * 4, [params.replace(seed=i) for i in range(4)])
    must(torch.equal(torch.get_rng_state(), before[0]), "torch's global generator was moved")
    must(random.getstate() == before[1], "Python's global generator was moved")
    must(np.random.get_state()[1].tolist() == before[2], "numpy's global generator was moved")  # type: ignore[index]
    for node in _nodes(run):
        must(
            node.drawn or node.certain,
            f"{node.where}: no draw of context.rng gave token {node.token}, and its q is no point mass",
        )


@CONTRACTS.add(
    "draws",
    "nothing that was drawn is dropped, reordered or merged because of what it is",
    "decide before a draw whether there is a node: by budget, by q, by its ancestors; padding may be drawn, "
    "and never a choice made by the token",
)
def draws(kit: DrafterKit) -> None:
    _laws(kit, *_DRAWN)
    nodes = [node for node in _nodes(kit.once(_many)) if not node.certain]
    if len(nodes) < _LEAST:
        raise Untried(f"only {len(nodes)} drawn tokens")
    _frequencies(nodes, "are not what their q says: some were dropped, reordered or merged after the draw")
