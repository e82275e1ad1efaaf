"""The steps of `gpu_check.py`: each measures one thing of one model and gives lines for the record."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from gpu_measure import Decoded, decode, forecast, hf_rate, interleaved, middle, transfers_a_round
from gpu_models import bytes_read
from gpu_subject import DEPTHS, WIDTHS, Subject

from specdec_core import SpecDecoder
from specdec_core.bench.cost import CostCurve, measure_cost

CHANCES = (0.6, 0.9)  # of the synthetic drafter
Line = dict[str, Any]


def plain_speed(subject: Subject, mode: str) -> Iterator[Line]:
    """Plain decoding of our own, and the share of the device's bandwidth that it reaches."""
    done = middle(interleaved({"none": lambda: subject.plain(mode)}, subject.sizes.repeats)["none"])
    step, read = done.seconds / done.tokens, bytes_read(subject.stand.plain)
    yield {
        "rate": done.rate,
        "step_ms": 1000 * step,
        "forward_ms": 1000 * done.target_seconds / done.forwards,
        "bytes_read": read,
        "bandwidth_share": None if subject.bandwidth is None else read / step / subject.bandwidth,
    }


def hf_speed(subject: Subject) -> Iterator[Line]:
    """transformers' own greedy generation, eager; the prompt left out, as in ours."""
    new = subject.sizes.new_eager
    rate, said = hf_rate(subject.stand, subject.prompt(subject.sizes.slots[0]), new)
    same = subject.said[:new] == said if subject.said else None
    yield {"rate": rate, "step_ms": 1000 / rate, "same_text_as_ours": same}


def block_costs(subject: Subject, mode: str, batch: int, slots: int) -> Iterator[Line]:
    """t_v(m)."""
    stand, prompt = subject.mode(mode), subject.prompt(slots)
    curve = measure_cost(stand, prompt, batch=batch, widths=WIDTHS, cycles=subject.sizes.cycles)
    if batch == 1 and slots == subject.sizes.slots[0]:
        subject.curves[mode] = curve
    yield {
        "batch": batch,
        "slots": slots,
        "ms": {str(m): 1000 * seconds for m, seconds in curve.seconds.items()},
        "ratio": {str(m): ratio for m, ratio in curve.ratio.items()},
    }


def transfers(subject: Subject, mode: str) -> Iterator[Line]:
    """How often the host waits for the device in a round."""
    prompt, new, k = subject.prompt(subject.sizes.slots[0]), subject.new(mode), 4
    subject.plain(mode)
    ways: dict[str, Callable[[], SpecDecoder]] = {
        "none": lambda: subject.replay(mode, 0),
        "synthetic": lambda: subject.replay(mode, k, CHANCES[0]),
    }
    for name in list(subject.drafts)[:1]:
        ways[f"small_model {name}"] = partial(subject.small, mode, name, k)
    for name, way in ways.items():
        counts, places = transfers_a_round(way(), prompt, new)
        mean = statistics.mean(counts) if counts else None
        yield {"drafter": name, "transfers_a_round": mean, "counts": counts, "places": places}


def speculation(
    subject: Subject,
    mode: str,
    *,
    drafts: Sequence[str],
    chances: Sequence[float] = CHANCES,
    depths: Sequence[int] = DEPTHS,
) -> Iterator[Line]:
    """Each drafter at each depth against plain decoding of the same mode, in turn; and what the formula says.

    drafts: the models that draft; chances: of the synthetic drafter.
    """
    prompt, new = subject.prompt(subject.sizes.slots[0]), subject.new(mode)
    if mode not in subject.curves:
        list(block_costs(subject, mode, 1, subject.sizes.slots[0]))
    for depth in depths:
        makers: dict[str, Callable[[], SpecDecoder]] = {
            f"synthetic {chance:g}": partial(subject.replay, mode, depth, chance) for chance in chances
        }
        for name in drafts:
            makers[f"small_model {name}"] = partial(subject.small, mode, name, depth)
        ways: dict[str, Callable[[], Decoded]] = {"none": lambda: subject.plain(mode)}
        ways |= {name: lambda make=make: decode(make(), [prompt], new) for name, make in makers.items()}
        runs = interleaved(ways, subject.sizes.repeats)
        for name in makers:
            yield {"drafter": name, "k": depth, **_compared(runs[name], runs["none"], subject.curves[mode])}


def _compared(runs: Sequence[Decoded], plains: Sequence[Decoded], curve: CostCurve) -> Line:
    run, plain = middle(runs), middle(plains)
    said = forecast(run, plain, curve)
    speedup = statistics.median(a.rate / b.rate for a, b in zip(runs, plains, strict=True))
    drafted = run.drafted / run.rounds
    other = run.seconds - run.target_seconds - run.draft_seconds
    return {
        "rate": run.rate,
        "plain_rate": plain.rate,
        "speedup_own_mode": speedup,
        "predicted_own_mode": said.speedup,
        "measured_over_predicted": speedup / said.speedup,
        "acceptance_by_depth": run.by_depth,
        "tokens_per_round": said.tokens_per_round,
        "verify_cost": said.verify_cost,
        "draft_cost": said.draft_cost,
        "c": said.draft_cost / drafted if drafted else None,
        "target_ms": 1000 * run.target_seconds / run.forwards,
        "draft_ms": 1000 * run.draft_seconds / run.forwards,
        "other_ms": 1000 * other / run.forwards,
        "plain_other_ms": 1000 * (plain.seconds - plain.target_seconds) / plain.forwards,
        "same_text": run.said == plain.said,
    }
