"""How a token is drafted from logits: which q, and which draw."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from specdec_core import Context, DraftLaw, on_device, top_token

Temperature = Annotated[
    float | None,
    Field(
        gt=0, description="q's temperature; default: q is made with each row's own sampling params, as p is"
    ),
]


class Drawing(StrEnum):
    """What `draft=` may be."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    COUPLED = "coupled"

    @property
    def law(self) -> DraftLaw:
        """The law that drafts of this kind declare."""
        laws = {
            "greedy": DraftLaw.ONE_HOT,
            "sampled": DraftLaw.SAMPLED,
            "coupled": DraftLaw.COUPLED,
        }
        return laws[self.value]


def q_scores(context: Context, logits: Tensor, temperature: float | None, paths: Tensor | None) -> Tensor:
    """Turn a model's logits [B, V] into those of q, float32.

    Without a temperature they are processed as the target's are: each row's own penalties, temperature,
    top-k, top-p and min-p. With one, it is all that is applied, but for a row's constraint.
    paths: int64 [B, d] tokens drafted before.
    """
    if temperature is None:
        return context.distributions(logits, paths)
    return context.masked(logits.float() / temperature, paths)


def q_mask(context: Context, scores: Tensor, temperature: float | None) -> Tensor:
    """Make q a point mass in rows at temperature 0, as p is there: -inf but for the argmax."""
    if temperature is not None or not any(p.greedy for p in context.params):
        return scores
    greedy = on_device([p.greedy for p in context.params], scores.device, torch.bool)
    best = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, top_token(scores).unsqueeze(1), True)
    return scores.masked_fill(greedy.unsqueeze(1) & ~best, -torch.inf)


def confidence(scores: Tensor) -> Tensor:
    """The probability of the likeliest token, known before any draw: [..., V] -> [...]."""
    return scores.softmax(dim=-1).amax(dim=-1)  # one pass, vectorised; `logsumexp` is slower on a CPU
