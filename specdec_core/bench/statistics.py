"""Ratios of runs that followed each other, with paired-bootstrap intervals (Efron 1979; percentiles)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
LEVEL = 0.95

Ratios = Sequence[Sequence[float]]
"""Of each prompt (or group of them), the ratio of each repeat."""


@dataclass(frozen=True)
class Interval:
    """An estimate and what it may as well be."""

    value: float
    low: float
    high: float


def typical_ratio(strata: Sequence[Ratios]) -> float:
    """Give the geometric mean over prompts of the median over repeats.

    strata: one entry a category; all prompts weigh the same.
    """
    medians = [float(np.median(repeats)) for ratios in strata for repeats in ratios]
    return float(np.exp(np.mean(np.log(medians))))


def bootstrap(
    strata: Sequence[Ratios], *, resamples: int = RESAMPLES, level: float = LEVEL, seed: int = 0
) -> Interval:
    """Give `typical_ratio` with its interval.

    Prompts are drawn again with replacement within their category, and repeats within each prompt. Pairs stay
    together: what is drawn are ratios of two runs that followed each other, so that what slows both down at a
    time cancels out.

    Raises:
        ValueError: there is nothing, or a ratio is not above 0.
    """
    if not strata or not all(ratios and all(repeats for repeats in ratios) for ratios in strata):
        raise ValueError("nothing to estimate from: a category, a prompt or its repeats are empty")
    if min(value for ratios in strata for repeats in ratios for value in repeats) <= 0:
        raise ValueError("a ratio must be above 0")
    rng = np.random.default_rng(seed)
    sums = np.zeros(resamples)
    for ratios in strata:
        sums += _resampled(ratios, resamples, rng)
    means = np.exp(sums / sum(len(ratios) for ratios in strata))
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(typical_ratio(strata), float(low), float(high))


def _resampled(ratios: Ratios, resamples: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw prompts and their repeats; give the sum of the logarithms of the medians: [resamples]."""
    prompts = len(ratios)
    drawn = rng.integers(prompts, size=(resamples, prompts))
    logs = np.zeros((resamples, prompts))
    for prompt, repeats in enumerate(ratios):
        values = np.asarray(repeats, dtype=np.float64)
        where = drawn == prompt
        at = rng.integers(len(values), size=(int(where.sum()), len(values)))
        logs[where] = np.log(np.median(values[at], axis=-1)) if at.size else 0.0
    total: NDArray[np.float64] = logs.sum(axis=-1)
    return total
