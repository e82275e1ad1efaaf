"""What the formula says a method should give, from what was measured, and why it gave something else.

Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.8, without its two assumptions: acceptance is that of each
depth, and a forward over a block costs what it was measured to cost:

    speed-up = (1 + sum_i a_i) / (mean of t_v(m) / t_v(1) + d)

a_i: share of the rounds that accepted a token at depth i. m: tokens of a block, over all forwards there were.
d: seconds of drafting a forward, over t_v(1); c = d / (drafted tokens a round): the cost of one of them.
All behind the prompts' own rounds, in which prompts are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec_core.bench.cost import CostCurve
from specdec_core.bench.summary import Figures, one_token_seconds
from specdec_core.length.theory import expected_tokens_by_depth

_WORTH_SAYING = 0.03  # shares of time, and differences, below this are noise


@dataclass(frozen=True)
class Prediction:
    """The formula's speed-up over plain decoding, and what stands between it and the measured one."""

    tokens_per_round: float
    verify_cost: float  # mean t_v(m) / t_v(1)
    draft_cost: float  # d: of a round, in forwards over one token
    cost_per_token: float | None  # c
    speedup: float
    reasons: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Give all of it by name."""
        return {
            "predicted_speedup": self.speedup,
            "tokens_per_round": self.tokens_per_round,
            "verify_cost": self.verify_cost,
            "draft_cost": self.draft_cost,
            "cost_per_token": self.cost_per_token,
            "reasons": self.reasons,
        }


def predict(method: Figures, plain: Figures, curve: CostCurve, measured: float) -> Prediction | None:
    """Predict the speed-up over plain decoding; None for a method that does not tell what it drafted.

    measured: its speed-up over plain decoding, as measured.
    """
    one = one_token_seconds(plain)
    shares = method.decode_by_depth
    if shares is None or method.draft_seconds is None or not one or not method.decode_forwards:
        return None
    tokens = expected_tokens_by_depth(shares)
    verify = curve.mean(method.widths)
    draft = method.draft_seconds / method.decode_forwards / one
    mean_drafted = sum((m - 1) * count for m, count in method.widths.items()) / method.decode_forwards
    speedup = tokens / (verify + draft)
    return Prediction(
        tokens_per_round=tokens,
        verify_cost=verify,
        draft_cost=draft,
        cost_per_token=draft / mean_drafted if mean_drafted else None,
        speedup=speedup,
        reasons=_costs(method, verify, draft) + _differences(method, plain, curve, one, speedup, measured),
    )


def _costs(method: Figures, verify: float, draft: float) -> list[str]:
    """Say what the formula already counts against the tokens of a round."""
    found = []
    if verify >= 1 + _WORTH_SAYING:
        width = sum(m * count for m, count in method.widths.items()) / method.decode_forwards
        found.append(f"verify of {_number(width)} tokens costs {verify:.2f}x one")
    if draft >= _WORTH_SAYING:
        found.append(f"drafting costs {draft:.2f} forwards a round")
    return found


def _differences(
    method: Figures, plain: Figures, curve: CostCurve, one: float, speedup: float, measured: float
) -> list[str]:
    """Say what the formula leaves out, where it is more than noise."""
    found = []
    if method.other_seconds / method.seconds >= _WORTH_SAYING:
        own, base = method.other_seconds / method.seconds, plain.other_seconds / plain.seconds
        found.append(f"other time {own:.0%} (plain {base:.0%})")
    prefill = (method.prefill_seconds or 0.0) / method.seconds
    if prefill >= _WORTH_SAYING and speedup > 1:
        found.append(f"prompts take {prefill:.0%} of the time, which no draft shortens")
    behind = (method.accepted + method.rounds - method.new_tokens) / method.new_tokens
    if behind >= _WORTH_SAYING:
        found.append(f"accepted tokens behind the end of a text: {behind:.0%} of it")
    if method.target_seconds is not None:
        expected = one * curve.mean(method.widths) * method.decode_forwards
        if abs(method.target_seconds / expected - 1) >= 2 * _WORTH_SAYING:
            found.append(f"blocks took {method.target_seconds / expected:.2f}x of what t_v(m) says")
    found += _thin_blocks(method, plain, curve.batch)
    if not found and abs(measured / speedup - 1) >= 2 * _WORTH_SAYING:
        found.append("no part of it stands out: the rest is spread")
    return found


def _thin_blocks(method: Figures, plain: Figures, batch: int) -> list[str]:
    """Rows of a batch end at different times; the blocks that remain cost nearly as much."""
    if batch == 1 or not plain.decode_forwards:
        return []
    own, base = (one.block_rows / one.decode_forwards for one in (method, plain))
    if own >= base * (1 - _WORTH_SAYING):
        return []
    return [f"blocks hold {own:.1f} of {batch} rows on average (plain {base:.1f})"]


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value - round(value)) < 0.05 else f"{value:.1f}"
