"""Generation without a model: texts are known, rounds cost what a table says, and a policy decides lengths.

A simulated clock stands where the run's clock stands otherwise, so that everything is deterministic.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from specdec_core import Draft, DraftLaw
from specdec_core.contract.interfaces import Budget, Capabilities, Outcome
from specdec_core.contract.sampling_params import FinishReason
from specdec_core.length.adaptive import AdaptiveLength
from specdec_core.length.costs import RoundCosts
from specdec_core.length.policy import FixedLength
from specdec_core.rows.stats import Stats
from specdec_drafters.prompt_lookup import PromptLookup, PromptLookupConfig


@dataclass(frozen=True)
class CostCurve:
    """Cost of a forward over so many tokens, relative to one; straight between points, and behind them."""

    points: tuple[tuple[int, float], ...]
    slope: float  # behind the last point, for each token

    def __call__(self, tokens: int) -> float:
        last, cost = self.points[-1]
        if tokens >= last:
            return cost + self.slope * (tokens - last)
        at = bisect_right([count for count, _ in self.points], tokens)
        (low, below), (high, above) = self.points[at - 1], self.points[at]
        return below + (above - below) * (tokens - low) / (high - low)


# SmolLM2-135M-Instruct on CPUs (packed: one thread), and Qwen3 shapes on one H200.
CPU_PACKED = CostCurve(((1, 1.0), (5, 1.02), (7, 1.15), (12, 1.4), (20, 1.88)), slope=0.056)
CPU_FLOAT32 = CostCurve(((1, 1.0), (4, 1.67), (8, 2.0)), slope=0.08)
CPU_HALF = CostCurve(((1, 1.0), (4, 1.08), (8, 1.13)), slope=0.02)
GPU = CostCurve(((1, 1.0), (4, 1.08), (64, 1.18)), slope=0.003)


@dataclass(frozen=True)
class Machine:
    """What rounds and drafting cost."""

    name: str
    seconds: Callable[[int], float]  # of a block of so many tokens
    device: str = "cpu"  # as the policy is told
    step: float = 0.0  # of a model's drafting step, in rounds of one token
    noise: float = 0.0  # of what a clock shows, relative: it only ever shows more
    ragged: bool = False  # whether a block costs what its tokens do; else what the rectangle around them does


@dataclass
class Row:
    """What a policy sees of a row."""

    id: int
    prompt: list[int]
    text: list[int]  # what it is going to say
    said: int = 0
    finished: FinishReason | None = None
    stats: Stats = field(default_factory=Stats)

    @property
    def left(self) -> int:
        return len(self.text) - self.said

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.text[: self.said]


class Batch:
    """What a policy sees of a batch."""

    def __init__(self, rows: list[Row], *, others_wait: bool = False, kind: str = "") -> None:
        self.kind = kind
        self.rows, self.first = rows, any(not row.stats.rounds for row in rows)
        self.others_wait = others_wait
        self.id_of = tuple(row.id for row in rows)

    def deepest(self, depth: int) -> list[int]:
        return [max(min(depth, row.left - 1), 0) for row in self.rows]

    def forced(self, most: int | None = None) -> tuple[int, ...]:
        return ()


class Drafting(Protocol):
    capabilities: Capabilities

    def propose(self, rows: list[Row], budget: Budget) -> tuple[Draft, list[list[int]]]:
        """Draft; and for each row the nodes that will be accepted, from the root."""

    def commit(self, rows: list[Row]) -> None: ...


class Context:
    """What `prompt_lookup` reads of the rows."""

    device = torch.device("cpu")

    def __init__(self, rows: list[Row]) -> None:
        self.rows, self._rows = [row.id for row in rows], rows

    def row_tokens(self, i: int) -> list[int]:
        return self._rows[i].tokens

    def legal(self, i: int, tokens: Sequence[int]) -> int:
        return len(tokens)

    def forced(self, i: int, limit: int) -> list[int]:
        return []


class Lookup:
    """The real `prompt_lookup`."""

    def __init__(self, **options: Any) -> None:
        self.drafter = PromptLookup(PromptLookupConfig(**options))
        self.capabilities = self.drafter.capabilities

    def admit(self, rows: list[Row]) -> None:
        self.drafter.admit(type("Rows", (), {"ids": [row.id for row in rows]})())  # type: ignore[arg-type]

    def propose(self, rows: list[Row], budget: Budget) -> tuple[Draft, list[list[int]]]:
        draft = self.drafter.propose(Context(rows), budget)  # type: ignore[arg-type]
        paths = []
        for row, nodes in zip(rows, draft.host or [None] * len(rows), strict=True):
            tokens = nodes.tokens if nodes else ()
            ahead = row.text[row.said : row.said + len(tokens)]
            wrong = [i for i, (a, b) in enumerate(zip(tokens, ahead, strict=False)) if a != b]
            paths.append(list(range(wrong[0] if wrong else len(ahead))))
        return draft, paths


class Model:
    """A model that drafts on the device, of which the host knows nothing: a chain, or a full tree.

    accepts: chance at a depth that a node is accepted, by (row, tokens said); which child of a tree is
    drawn, the first ones oftener.
    """

    def __init__(self, accepts: Callable[[Row], float], depth: int, width: int = 1, seed: int = 0) -> None:
        sizes = [width**d for d in range(1, depth + 1)]
        self.capabilities = Capabilities(
            laws=frozenset(), max_depth=depth, max_nodes=sum(sizes), makes_trees=width > 1
        )
        self.accepts, self.width, self.random = accepts, width, random.Random(seed)

    def admit(self, rows: list[Row]) -> None:
        pass

    def propose(self, rows: list[Row], budget: Budget) -> tuple[Draft, list[list[int]]]:
        # Drawn in full whatever the budget, so that policies meet the same fate.
        chains = [self._accepted(row) for row in rows]
        depth = max(budget.depth)
        n = min(sum(self.width**d for d in range(1, depth + 1)), budget.nodes)
        if not depth or not n:
            return Draft.empty(len(rows)), [[] for _ in rows]
        empty = torch.zeros((len(rows), n), dtype=torch.int64)
        draft = Draft.of(empty, empty, DraftLaw.ONE_HOT, depth=depth, width=self.width)
        paths = zip(chains, budget.depth, strict=True)
        return draft, [[node for node in chain[:most] if node < n] for chain, most in paths]

    def _accepted(self, row: Row) -> list[int]:
        path, first, at = [], 0, 0
        for d in range(1, self.capabilities.max_depth + 1):
            if self.random.random() >= self.accepts(row):
                break
            child = min(int(self.random.expovariate(1.0)), self.width - 1)
            at = at * self.width + child
            path.append(first + at)
            first += self.width**d
        return path


@dataclass
class Done:
    """How a run went."""

    seconds: float = 0.0
    shown: float = 0.0  # by the clock
    tokens: int = 0
    rounds: int = 0
    widths: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def simulate(
    texts: Sequence[tuple[list[int], list[int]]],
    drafting: Any,
    machine: Machine,
    k: int | str,
    *,
    batch: int = 1,
    costs: RoundCosts | None = None,
    seed: int = 0,
) -> Done:
    """Say the texts, (prompt, output) each, so many at once. k: "auto", or a fixed depth."""
    done, noise = Done(), random.Random(seed)
    waiting = [Row(i, prompt, text) for i, (prompt, text) in enumerate(texts)]
    if k == "auto":
        costs = costs or RoundCosts(machine.device, ragged=machine.ragged)
        policy: Any = AdaptiveLength(drafting.capabilities, costs, lambda: done.shown)
    else:
        policy = FixedLength.of(drafting.capabilities, int(k))
    active: list[Row] = []
    while waiting or active:
        new = [waiting.pop(0) for _ in range(min(batch - len(active), len(waiting)))]
        drafting.admit(new)
        active += new
        fresh = [row for row in active if not row.stats.rounds]
        _round(Batch(fresh or active, others_wait=bool(waiting)), drafting, machine, policy, done, noise)
        active = [row for row in active if row.finished is None]
    return done


def _round(
    batch: Batch, drafting: Any, machine: Machine, policy: Any, done: Done, noise: random.Random
) -> None:
    rows = batch.rows
    plan = policy.plan(batch)
    budget = plan.budget
    draft, paths = Draft.empty(len(rows)), [list[int]() for _ in rows]
    seconds = {}
    if any(budget.depth):
        draft, paths = drafting.propose(rows, budget)
        whole = draft
        if draft.nodes and plan.cut is not None:
            draft = plan.cut(draft)
        counts = draft.counts or [draft.nodes] * len(rows)
        paths = [[node for node in path if node < n] for path, n in zip(paths, counts, strict=True)]
        if whole.host is None and draft.nodes:
            seconds["draft"] = draft.depth * machine.step * machine.seconds(len(rows))
    drafted = sum(draft.counts) if machine.ragged and draft.counts else len(rows) * draft.nodes
    took = machine.seconds(len(rows) + drafted) + seconds.get("draft", 0.0)
    if batch.first:  # the prompts' tokens cost more, and the same for everybody
        took += machine.seconds(sum(len(row.prompt) for row in rows)) - machine.seconds(1)
    said = []
    for row, path in zip(rows, paths, strict=True):
        tokens = row.text[row.said : row.said + len(path) + 1]
        row.said += len(tokens)
        said.append(tokens)
        row.finished = None if row.left else FinishReason.LENGTH
        count = draft.nodes if draft.counts is None else draft.counts[rows.index(row)]
        row.stats.count_round(min(count, draft.nodes), len(path), len(tokens))
    done.seconds += took
    done.shown += took * (1 + machine.noise * noise.expovariate(1.0))
    done.tokens += sum(map(len, said))
    done.rounds += 1
    done.widths.append(draft.nodes)
    finished = tuple(row.finished for row in rows)
    outcome = Outcome(batch.id_of, batch.id_of, tuple(said), tuple(paths), finished)
    policy.learn(plan, batch, draft, outcome, seconds)
