"""The children of the nodes on one level of a tree: the likeliest tokens, or draws without replacement."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_core import Context, top_tokens
from specdec_drafters._law import q_mask, q_scores


@dataclass(frozen=True, eq=False)
class Children:
    """w children of each of c nodes of B rows."""

    tokens: Tensor  # int64 [B, c, w]
    real: Tensor  # bool [B, c, w]: False where q has no more support
    share: Tensor  # float32 [B, c, w]: probability of the child under its parent's q
    q: Tensor | None  # float32 [B, c, w, V]: what each was drawn from; None for the likeliest


def top_children(
    context: Context, logits: Tensor, paths: Tensor | None, width: int, temperature: float | None, first: int
) -> Children:
    """Take the likeliest tokens, in that order. logits: [B, c, V], paths: int64 [B, c, d]."""
    scores = _scores(_each_node(context, logits), logits, paths, temperature)
    share, tokens = top_tokens(scores.softmax(dim=-1), width)
    size = (*logits.shape[:2], width)
    return Children(tokens.view(size), (share > 0).view(size), share.view(size), q=None)


def drawn_children(
    context: Context, logits: Tensor, paths: Tensor | None, width: int, temperature: float | None, first: int
) -> Children:
    """Draw one after another; what was drawn is removed from q, which is renormalised.

    first: index of the first child of the first node; each draw is keyed by its own node.
    """
    rows, c, _ = logits.shape
    each = _each_node(context, logits)
    q = q_mask(each, _scores(each, logits, paths, temperature), temperature).softmax(dim=-1)
    node = first + width * torch.arange(c, device=q.device).repeat(rows)  # [B * c]
    whole, tokens, given = q, [], []
    for sibling in range(width):
        left = q.sum(dim=-1, keepdim=True)
        q = torch.where(left > 0, q / left, 0.0) if sibling else q
        token = each.rng.categorical(q, node + sibling, draw=0)
        tokens.append(token)
        given.append(q)
        q = q.scatter(1, token.unsqueeze(1), 0.0)
    size = (rows, c, width)
    drawn, drawn_from = torch.stack(tokens, dim=1), torch.stack(given, dim=1)
    real = drawn_from.sum(dim=-1) > 0
    share = whole.gather(1, drawn)
    return Children(drawn.view(size), real.view(size), share.view(size), drawn_from.view(*size, -1))


def _each_node(context: Context, logits: Tensor) -> Context:
    """A context with one entry for each of the c nodes of each row."""
    rows, c, _ = logits.shape
    return context.for_rows([row for row in range(rows) for _ in range(c)])


def _scores(each: Context, logits: Tensor, paths: Tensor | None, temperature: float | None) -> Tensor:
    """Logits of q, float32 [B * c, V]."""
    return q_scores(each, logits.flatten(0, 1), temperature, None if paths is None else paths.flatten(0, 1))
