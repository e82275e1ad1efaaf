"""What heads are worth on held-out sequences, and the tokens per target call to be expected of them.

A round that starts at a position accepts d tokens where all heads up to depth d are right (in a tree: where
the true path is in it). Rounds do not start everywhere: they jump over what was accepted, so easy stretches
are met less often than their share of the text. The prediction is therefore made where rounds start.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_medusa.heads import Heads, Projection
from specdec_medusa.states import IGNORED, States
from specdec_medusa.trees import TreeMaker, right_nodes

_POSITIONS = 256


@dataclass(frozen=True)
class Prefixes:
    """How often all heads up to each depth are right, and what follows."""

    everywhere: list[float]  # share of all positions
    at_round_starts: list[float]  # share of the positions where rounds start

    @property
    def tokens_per_target_call(self) -> float:
        """1 + the sum over depths: a round's own token, and those accepted."""
        return 1 + sum(self.at_round_starts)


@torch.no_grad()
def candidates(
    heads: Heads, states: States, shared: Projection, top_k: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Ask the heads everywhere: ids int64 and probabilities float32, both [P, K, top_k], on the CPU."""
    ids, probs = [], []
    for part in torch.split(states.hidden, _POSITIONS):
        logits = heads(part.to(heads.weight.device), shared).transpose(0, 1)[..., :vocab_size].float()
        best, at = logits.softmax(dim=-1).topk(min(top_k, logits.shape[-1]), dim=-1)
        ids.append(heads.named(at).cpu())
        probs.append(best.cpu())
    return torch.cat(ids), torch.cat(probs)


def accuracies(ids: Tensor, labels: Tensor) -> list[list[float]]:
    """Count how often choice r of head k is the right token: [K][top_k]."""
    right = (ids == labels.unsqueeze(-1)).float().sum(dim=0)
    known = (labels != IGNORED).float().sum(dim=0).clamp(min=1)
    return [[round(float(x), 5) for x in head] for head in right / known.unsqueeze(-1)]


def prefixes(tree: TreeMaker, ids: Tensor, probs: Tensor, states: States, nodes: int) -> Prefixes:
    """Count the tokens that a tree of these candidates would have accepted."""
    accepted = []
    parts = zip(*(torch.split(x, _POSITIONS) for x in (ids, probs, states.labels)), strict=True)
    for some_ids, some_probs, labels in parts:
        made = tree(some_ids, some_probs, [tree.depth] * len(labels), nodes)
        right = right_nodes(made, labels)
        accepted.append(right.sum(dim=1))  # siblings differ, so one right node a level
    counts = torch.cat(accepted).tolist()
    starts = _round_starts(counts, states.lengths)
    return Prefixes(_shares(counts, tree.depth), _shares([counts[i] for i in starts], tree.depth))


def _round_starts(accepted: list[int], lengths: tuple[int, ...]) -> list[int]:
    """Go along each sequence as decoding would: a round at i is followed by one at i + 1 + accepted."""
    starts, first = [], 0
    for length in lengths:
        at = first
        while at < first + length:
            starts.append(at)
            at += 1 + accepted[at]
        first += length
    return starts


def _shares(counts: list[int], depth: int) -> list[float]:
    total = max(len(counts), 1)
    return [round(sum(count >= d for count in counts) / total, 5) for d in range(1, depth + 1)]
