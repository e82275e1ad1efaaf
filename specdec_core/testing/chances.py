"""Whether drawn tokens look like the law that is claimed for them.

Seeds are fixed, so that a verdict repeats. `ALARM` is the chance that a drafter that keeps the law is called
a liar at all, for one set of seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

ALARM = 1e-6
_LEAST = 5.0  # expected count of a cell; smaller ones are put together


def p_value(seen: Sequence[float], expected: Sequence[float]) -> float:
    """The chance of counts at least as far from the expected ones (Pearson's chi-square)."""
    cells = sorted(zip(expected, seen, strict=True))
    pooled: list[list[float]] = []
    for wanted, found in cells:
        if not pooled or pooled[-1][0] >= _LEAST:
            pooled.append([0.0, 0.0])
        pooled[-1][0] += wanted
        pooled[-1][1] += found
    if len(pooled) > 1 and pooled[-1][0] < _LEAST:
        wanted, found = pooled.pop()
        pooled[-1][0] += wanted
        pooled[-1][1] += found
    if len(pooled) < 2:
        return 1.0
    statistic = sum((found - wanted) ** 2 / wanted for wanted, found in pooled)
    freedom = torch.tensor((len(pooled) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def fits(counts: Mapping[tuple[int, ...], int], law: Mapping[tuple[int, ...], float]) -> float:
    """The p-value of counted texts under a law; 0 where one was seen that the law rules out."""
    if any(law.get(text, 0.0) <= 0 for text in counts):
        return 0.0
    total = sum(counts.values())
    return p_value([counts.get(text, 0) for text in law], [total * p for p in law.values()])


def positions(q: Tensor, tokens: Tensor, seed: int = 0) -> Tensor:
    """Where each token lies in its q: uniform in [0, 1) if, and only if, it was drawn from it.

    q: [N, V], tokens: int64 [N] -> float64 [N]. A randomized probability integral transform over the tokens
    from the likeliest to the least likely, so that a q that is too flat or too sharp shows most.
    """
    q = q.double()
    order = q.argsort(dim=1, descending=True, stable=True)
    ranked = q.gather(1, order)
    above = ranked.cumsum(dim=1) - ranked
    rank = (order == tokens.unsqueeze(1)).double().argmax(dim=1, keepdim=True)
    uniform = torch.rand(len(tokens), 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    place = (above.gather(1, rank) + uniform * ranked.gather(1, rank)) / q.sum(dim=1, keepdim=True)
    return place.squeeze(1).clamp(0.0, 1.0 - 1e-12)


def uniform_p_value(places: Tensor, bins: int = 12) -> float:
    """The p-value that these are uniform in [0, 1)."""
    counts = torch.bincount((places * bins).long(), minlength=bins)
    return p_value(counts.tolist(), [len(places) / bins] * bins)
