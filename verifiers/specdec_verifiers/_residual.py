"""The arithmetic of one test: what was drawn from q is accepted against p, or p keeps what q left over.

p: float [B, V], the target's distribution at a node, or what is left of it; q: [B, V], what the drafted
token was drawn from; token: int64 [B]. A token outside the vocabulary is one that p never says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_core import Draft, DraftLaw


def proposal(draft: Draft, node: Tensor, p: Tensor) -> Tensor:
    """Give the q that a node of each row was drawn from: int64 [B] -> [B, V].

    For ONE_HOT rows the point mass on the node's token (nothing, if that lies outside the vocabulary);
    for the others what the drafter declared, siblings drawn without replacement already removed.
    """
    rows = torch.arange(draft.rows, device=node.device)
    token = draft.tokens[rows, node].unsqueeze(1)
    safe = token.clamp(0, p.shape[-1] - 1)
    one_hot = (draft.laws == DraftLaw.ONE_HOT).unsqueeze(1)
    if draft.probs is None:
        q, drawn = torch.zeros_like(p), torch.zeros_like(token, dtype=p.dtype)
    else:
        q = draft.probs[rows, node].to(p.dtype)
        drawn = q.gather(1, safe)
        q.masked_fill_(one_hot, 0.0)
    return q.scatter_(1, safe, torch.where(one_hot, (token == safe).to(p.dtype), drawn))


def token_probs(probs: Tensor, token: Tensor) -> Tensor:
    """Look tokens up in their distributions: [B, V] at int64 [B] -> [B]; 0 outside the vocabulary."""
    safe = token.clamp(0, probs.shape[-1] - 1)
    return probs.gather(1, safe.unsqueeze(1)).squeeze(1).masked_fill(token != safe, 0.0)


def ratio(p: Tensor, q: Tensor) -> Tensor:
    """p(x) / q(x), elementwise; 0 where p(x) is, finite where only q(x) is 0."""
    return torch.nan_to_num(p / q, nan=0.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p - q)+), the law of the token after a rejection: [B, V]; p itself where that sums to zero."""
    left = (p - q).clamp_(min=0.0)
    total = left.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, left / total, p)
