"""What speculative decoding can give: expected tokens a round, and the speed-up.

Leviathan, Kalman and Matias 2023, "Fast Inference from Transformers via Speculative Decoding"
(arXiv 2211.17192). There `a` is alpha, the chance that a drafted token is accepted, taken as independent
of its depth; `k` is gamma, the draft length; `c` is the cost of one drafting step in target forwards.
A target forward over a whole block is taken to cost what one over a single token does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from specdec_core.contract.errors import InvalidParameter


@dataclass(frozen=True)
class Forecast:
    """What one draft length is expected to give."""

    draft_tokens: int
    expected_tokens: float  # a round
    speedup: float  # over plain decoding


def expected_tokens(a: float, k: int) -> float:
    """Give the expected tokens of a round: (1 - a^(k+1)) / (1 - a), and k + 1 where a = 1.

    Leviathan et al. 2023, equation (1). The token that the target adds is counted.

    Raises:
        InvalidParameter: a is no probability, or k is negative.
    """
    _check_share("acceptance", a)
    _check_count("draft_tokens", k)
    # The sum 1 + a + ... + a^k: the same number, without the division that fails at a = 1 and loses
    # digits near it.
    return sum(a**depth for depth in range(k + 1))


def expected_tokens_by_depth(shares: Sequence[float]) -> float:
    """Give the expected tokens of a round: 1 + the sum of the shares.

    Equation (1) of Leviathan et al. 2023 without its assumption that depths are alike.

    shares: the share of rounds that accept a token at depth 1, 2, ...: `Stats.acceptance_by_depth`, the
    per-position acceptance that vLLM prints. Not conditional on the depths before, so it never rises.

    Raises:
        InvalidParameter: a share is no probability, or is larger than the one before.
    """
    for share in shares:
        _check_share("by_depth", share)
    for depth, (shallow, deep) in enumerate(pairwise(shares), start=2):
        if deep > shallow:
            raise InvalidParameter(
                f"by_depth: {deep:g} at depth {depth} is more than {shallow:g} before it; give the share of "
                "all rounds that accept a token at each depth, which cannot rise"
            )
    return 1 + sum(shares)


def speedup(a: float, k: int, c: float) -> float:
    """Give the expected speed-up over plain decoding: (1 - a^(k+1)) / ((1 - a)(1 + kc)).

    Leviathan et al. 2023, theorem 3.8. By corollary 3.9, where a > c some k gains, and k = 1 gives
    (1 + a) / (1 + c).

    Raises:
        InvalidParameter: a is no probability, or k or c is negative.
    """
    return expected_tokens(a, k) / round_cost(k, c)


def round_cost(k: int, c: float) -> float:
    """Give what a round costs in target forwards: 1 + kc.

    Raises:
        InvalidParameter: k or c is negative.
    """
    _check_count("draft_tokens", k)
    if not 0 <= c < float("inf"):
        raise InvalidParameter(f"cost={c:g} is not allowed: a drafting step costs 0 or more target forwards")
    return 1 + k * c


def best_draft_length(a: float, c: float, most: int) -> int:
    """Give the k of 0 to `most` with the largest speed-up; of equal ones the shortest.

    Raises:
        InvalidParameter: as `speedup`.
    """
    return best(forecasts(a, c, most)).draft_tokens


def forecasts(a: float, c: float, most: int) -> list[Forecast]:
    """Tabulate k = 0 to `most`.

    Raises:
        InvalidParameter: as `speedup`.
    """
    _check_count("draft_tokens", most)
    return [Forecast(k, expected_tokens(a, k), speedup(a, k, c)) for k in range(most + 1)]


def forecasts_by_depth(shares: Sequence[float], c: float) -> list[Forecast]:
    """Tabulate k = 0 to the number of shares, each with that many of them.

    Raises:
        InvalidParameter: as `expected_tokens_by_depth` and `round_cost`.
    """
    expected = [expected_tokens_by_depth(shares[:k]) for k in range(len(shares) + 1)]
    return [Forecast(k, tokens, tokens / round_cost(k, c)) for k, tokens in enumerate(expected)]


def best(table: Sequence[Forecast]) -> Forecast:
    """Give the row with the largest speed-up; of equal ones the first."""
    return max(table, key=lambda row: row.speedup)


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise InvalidParameter(f"{name}={value:g} is not allowed: a probability lies between 0 and 1")


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InvalidParameter(f"{name}={value!r} is not allowed: it must be a whole number of at least 0")
