"""What checking a block costs: t_v(m), the time of a target forward over m tokens a row."""

from __future__ import annotations

import statistics
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from specdec_core.bench.stand import Stand
from specdec_core.contract.draft import Draft
from specdec_core.contract.errors import SpecdecError
from specdec_core.contract.interfaces import Budget, Context
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.drafting.row_drafter import RowDrafter, RowDrafterConfig

_WIDTHS = (1, 2, 3, 5, 7, 9, 11, 13, 17, 21, 25, 33, 49, 65, 97, 129)
_CYCLES = 7
_WARM_UP = 2


@dataclass(frozen=True)
class CostCurve:
    """t_v(m) of one batch size, behind a given context."""

    batch: int
    context: int
    seconds: dict[int, float]  # m -> median seconds of a forward
    ratio: dict[int, float]  # m -> median of t_v(m) / t_v(1) within a cycle

    def at(self, width: float) -> float:
        """Read t_v(width) / t_v(1) off, between the widths that were measured."""
        known = sorted(self.ratio)
        if width <= known[0]:
            return self.ratio[known[0]]
        right = min(bisect_right(known, width), len(known) - 1)
        if right == 0:
            return self.ratio[known[0]]
        low, high = known[right - 1], known[right]
        slope = (self.ratio[high] - self.ratio[low]) / (high - low)
        return self.ratio[low] + slope * (width - low)

    def mean(self, widths: Mapping[int, int]) -> float:
        """Give the mean over forwards: width -> how many there were."""
        total = sum(widths.values())
        return sum(self.at(width) * count for width, count in widths.items()) / total if total else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Give what a line of JSON holds."""
        pairs = [[m, self.seconds[m], self.ratio[m]] for m in sorted(self.seconds)]
        return {"batch": self.batch, "context": self.context, "widths": pairs}

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> CostCurve:
        """Read it back."""
        return cls(
            value["batch"],
            value["context"],
            {m: seconds for m, seconds, _ in value["widths"]},
            {m: ratio for m, _, ratio in value["widths"]},
        )


def widths_up_to(widest: int) -> list[int]:
    """Choose the widths to measure: 1 to the widest block that is drafted."""
    return [*(width for width in _WIDTHS if width < widest), widest]


def measure_cost(
    stand: Stand,
    prompt: Sequence[int],
    *,
    batch: int,
    widths: Sequence[int],
    cycles: int = _CYCLES,
) -> CostCurve:
    """Time forwards over blocks of each width in turn, in the loop that generation uses.

    What is drafted does not matter, so it is arbitrary; the first cycles warm up.

    widths: of blocks, ascending, 1 among them: the pending token counts.

    Raises:
        SpecdecError: the context has no room for the rounds.
    """
    drafter = _Filler([width - 1 for width in widths])
    rounds = len(widths) * (cycles + _WARM_UP)
    most = sum(widths) * (cycles + _WARM_UP) + widths[-1]  # if all that is drafted were accepted
    decoder = stand.decoder(drafter=drafter, draft_tokens=widths[-1] - 1, max_batch=batch)
    if decoder.target.context_limit is not None:
        left = decoder.target.context_limit - len(prompt)
        most = min(most, max(left, rounds + widths[-1]))
        prompt = prompt[-max(decoder.target.context_limit - most, 1) :]
    params = SamplingParams(max_new_tokens=most, ignore_eos=True)
    took: list[tuple[int, float]] = []
    with closing(decoder.rounds([list(prompt)] * batch, params)) as run:
        for done in run:
            if not done.batch.first and "target" in done.seconds:
                took.append((1 + done.draft.nodes, done.seconds["target"]))
            if len(took) == rounds:
                break
    return _curve(batch, len(prompt), took, widths)


def _curve(batch: int, context: int, took: list[tuple[int, float]], widths: Sequence[int]) -> CostCurve:
    each = {width: [seconds for m, seconds in took if m == width][_WARM_UP:] for width in widths}
    measured = {width: seconds for width, seconds in each.items() if seconds}
    if 1 not in measured:
        raise SpecdecError(
            f"the context is too short to time blocks of {widths[-1]} tokens behind {context}; draft less"
        )
    one = measured[1]
    return CostCurve(
        batch,
        context,
        {width: statistics.median(seconds) for width, seconds in measured.items()},
        {
            width: statistics.median(a / b for a, b in zip(seconds, one, strict=False))
            for width, seconds in measured.items()
        },
    )


class _Filler(RowDrafter):
    """Draft chains of given lengths in turn."""

    name = "filler"

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(RowDrafterConfig(num_tokens=max(lengths)))
        self._lengths, self._calls = lengths, 0

    def propose(self, context: Context, budget: Budget) -> Draft:
        """Repeat tokens of the row, the same number for every row."""
        length = min(self._lengths[self._calls % len(self._lengths)], *budget.depth)
        self._calls += 1
        drafts = [list(context.row_tokens(i)[:length]) for i in range(len(context.rows))]
        short = [draft + [0] * (length - len(draft)) for draft in drafts]
        return Draft.chains(short, context.device)
