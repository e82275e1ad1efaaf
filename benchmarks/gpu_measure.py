"""How `gpu_check.py` measures: decoding behind the prompt, transfers, bandwidth, transformers' own pace."""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from specdec_core import SamplingParams, SpecDecoder
from specdec_core.bench.cost import CostCurve
from specdec_core.bench.methods import MethodSpec
from specdec_core.bench.ours import settle
from specdec_core.bench.references import Reference
from specdec_core.bench.stand import Stand
from specdec_core.length.theory import expected_tokens_by_depth

REPEATS = 3
WARM_UPS = 2  # a shape is captured at its second use

Prompts = Sequence[Sequence[int]]


@dataclass
class Decoded:
    """What one call did behind its first round: the prompt's forwards are in no figure but `said`."""

    seconds: float = 0.0
    tokens: int = 0
    rounds: int = 0  # of all rows
    forwards: int = 0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0
    drafted: int = 0
    accepted: Counter[int] = field(default_factory=Counter)  # tokens accepted in a round -> rounds
    widths: Counter[int] = field(default_factory=Counter)  # tokens of a block -> forwards
    said: list[list[int]] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def by_depth(self) -> list[float]:
        """Share of rounds that accepted a token at depth 1, 2, ..."""
        deepest = max(self.accepted, default=0)
        return [
            sum(count for kept, count in self.accepted.items() if kept >= depth) / self.rounds
            for depth in range(1, deepest + 1)
        ]


def decode(decoder: SpecDecoder, prompts: Prompts, new: int) -> Decoded:
    """Generate greedily, and time what comes behind the first round."""
    device, done = decoder.target.device, Decoded()
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    began, said = 0.0, dict[int, list[int]]()
    with closing(decoder.rounds([list(prompt) for prompt in prompts], params)) as run:
        for each in run:
            for row, tokens in zip(each.outcome.rows, each.outcome.tokens, strict=True):
                said.setdefault(row, []).extend(tokens)
            if each.batch.first:
                settle(device)
                began = time.perf_counter()
                continue
            _count(done, each)
        settle(device)
        done.seconds = time.perf_counter() - began
    done.said = [said[row] for row in sorted(said)]  # ids rise in the order of the prompts
    return done


def _count(done: Decoded, each: Any) -> None:
    """Add a round."""
    outcome = each.outcome
    done.forwards += 1
    done.widths[1 + each.draft.nodes] += 1
    done.draft_seconds += each.seconds.get("draft", 0.0)
    done.target_seconds += each.seconds.get("target", 0.0)
    done.drafted += each.draft.nodes * each.draft.rows
    for tokens, path in zip(outcome.tokens, outcome.paths, strict=True):
        done.rounds += 1
        done.tokens += len(tokens)
        done.accepted[len(path)] += 1


def interleaved(ways: dict[str, Callable[[], Decoded]], repeats: int = REPEATS) -> dict[str, list[Decoded]]:
    """Warm every way up, and then run them in turn, each time from another one on."""
    for way in ways.values():
        for _ in range(WARM_UPS):
            way()
    found: dict[str, list[Decoded]] = {name: [] for name in ways}
    names = list(ways)
    for repeat in range(repeats):
        start = repeat % len(names)
        for name in names[start:] + names[:start]:
            found[name].append(ways[name]())
    return found


def middle(runs: Sequence[Decoded]) -> Decoded:
    """Give the run of median time."""
    return sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]


@dataclass(frozen=True)
class Forecast:
    """What the formula says: Leviathan et al. 2023, theorem 3.8, with measured costs and acceptance."""

    tokens_per_round: float
    verify_cost: float  # mean t_v(m) / t_v(1)
    draft_cost: float  # of a round, in forwards over one token
    speedup: float


def forecast(run: Decoded, plain: Decoded, curve: CostCurve) -> Forecast:
    """Predict the speed-up over plain decoding of the same mode."""
    tokens = expected_tokens_by_depth(run.by_depth)
    verify = curve.mean(run.widths)
    one = plain.target_seconds / plain.forwards
    draft = run.draft_seconds / run.forwards / one
    return Forecast(tokens, verify, draft, tokens / (verify + draft))


def hf_rate(stand: Stand, prompt: Sequence[int], new: int) -> tuple[float, list[int]]:
    """Time transformers' own greedy `generate`, its prompt left out: tokens a second, and what it said."""
    reference = Reference(MethodSpec("hf", "hf", reference=True), stand)

    def seconds(count: int) -> tuple[float, list[int]]:
        run = reference.run([prompt], [SamplingParams(max_new_tokens=count, ignore_eos=True)])
        return run.seconds, run.token_ids[0]

    seconds(2)
    ones, alls = [], []
    said: list[int] = []
    for _ in range(REPEATS):
        ones.append(seconds(1)[0])
        took, said = seconds(new)
        alls.append(took)
    return (new - 1) / (statistics.median(alls) - statistics.median(ones)), said


def transfers_a_round(decoder: SpecDecoder, prompt: Sequence[int], new: int) -> tuple[list[int], list[str]]:
    """Count, for each of some warm rounds, how often the host waits for a CUDA device; say where."""
    for _ in range(WARM_UPS):
        decode(decoder, [prompt], new)
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    counts, places = [], Counter[str]()
    mode = torch.cuda.get_sync_debug_mode()
    with closing(decoder.rounds([list(prompt)], params)) as run, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        next(run)  # the prompt's
        torch.cuda.set_sync_debug_mode("warn")
        try:
            seen.clear()
            for _ in islice(run, 10):
                waits = [one for one in seen if "called a synchronizing" in str(one.message)]
                counts.append(len(waits))
                places.update(f"{one.filename}:{one.lineno}" for one in waits)
                seen.clear()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return counts, [f"{place} ({count})" for place, count in places.most_common()]


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Measure a device's copy: bytes read and written a second."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    rates = []
    for _ in range(5):
        settle(device)
        began = time.perf_counter()
        for _ in range(10):
            target.copy_(source)
        settle(device)
        rates.append(10 * 2 * size / (time.perf_counter() - began))
    return statistics.median(rates)
