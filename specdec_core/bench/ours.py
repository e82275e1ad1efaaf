"""Methods of specdec: a decoder of its own for each, over the one target."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Generator, Sequence
from functools import partial

import torch

from specdec_core.bench.methods import MethodSpec, Run
from specdec_core.bench.stand import Stand
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.engine.loop import Round
from specdec_core.rows.row import Row
from specdec_core.rows.stats import Stats


class Ours:
    """A drafter and a verifier.

    A drafter that fails ends the bench (`strict`), and no prompt is fed from another call's cache, since
    transformers reads every prompt anew too.
    """

    def __init__(self, spec: MethodSpec, stand: Stand, *, max_batch: int) -> None:
        self.name = spec.text
        self._make = partial(
            stand.decoder,
            drafter=spec.drafter,
            verifier=spec.verifier,
            draft_tokens=spec.draft_tokens,
            max_batch=max_batch,
        )
        self.decoder = self._make()

    def renew(self) -> None:
        """Build the decoder anew where its drafter learns from what it has seen."""
        if self.decoder.drafter.capabilities.learns:
            self.decoder = self._make()

    def unfit(self, batch: int) -> str:
        """Any batch will do."""
        return ""

    @property
    def nodes(self) -> int:
        """Most nodes it drafts in a round."""
        depth, can = self.decoder.draft_tokens, self.decoder.drafter.capabilities
        if not isinstance(depth, int) or can.makes_trees:
            return 0 if depth == 0 else can.nodes
        return min(depth, can.nodes)

    def run(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Run:
        """Generate, and count rounds as they come."""
        book = _Book()
        settle(self.decoder.target.device)
        began = last = time.perf_counter()
        for done in self.decoder.rounds([list(prompt) for prompt in prompts], list(params)):
            if done.batch.first:  # what it left the device to do is its own
                settle(self.decoder.target.device)
            now = time.perf_counter()
            book.add(done, now - last)
            last = now
        settle(self.decoder.target.device)
        seconds = time.perf_counter() - began
        return book.run(seconds)

    @property
    def steps_alone(self) -> bool:
        """Whether a round's end is seen when it is there; on a GPU, waiting for each would be a cost."""
        return self.decoder.target.device.type == "cpu"

    def steps(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> Generator[float, None, Run]:
        """Generate round by round; yield the seconds that were taken so far."""
        book, seconds = _Book(), 0.0
        rounds = self.decoder.rounds([list(prompt) for prompt in prompts], list(params))
        while True:
            began = time.perf_counter()
            done = next(rounds, None)
            took = time.perf_counter() - began
            seconds += took
            if done is None:
                return book.run(seconds)
            book.add(done, took)
            yield seconds


class _Book:
    """Adds up the rounds of a run."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}
        self._widths: Counter[int] = Counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._rounds = self._block_rows = 0
        self._first = Stats()  # of the prompts' own rounds

    def add(self, done: Round, took: float) -> None:
        """Add a round; a first one is the prompt's as a whole: a drafter's own model reads it there, too."""
        self._rounds += 1
        if done.batch.first:
            self._seconds["prefill"] += took
            new = [row for row in done.batch.rows if row.id not in self._rows]
            self._rows.update((row.id, row) for row in new)
            self._first = Stats.pooled([self._first, *(row.stats for row in new)])
            return
        for part in ("prefill", "draft", "target"):  # a long prompt may be read beside it
            self._seconds[part] += done.seconds.get(part, 0.0)
        self._widths[1 + done.draft.nodes] += 1
        self._block_rows += len(done.batch.rows)

    def run(self, seconds: float) -> Run:
        rows = [self._rows[row] for row in sorted(self._rows)]  # ids rise in the order of the prompts
        total = Stats.pooled(row.stats for row in rows)
        return Run(
            seconds,
            [row.output for row in rows],
            self._rounds + total.prefill_calls,  # forwards
            rounds=total.rounds,
            drafted=total.drafted_tokens,
            accepted=total.accepted_tokens,
            histogram=total.acceptance_histogram,
            widths=dict(self._widths),
            block_rows=self._block_rows,
            first_tokens=self._first.new_tokens,
            first_histogram=self._first.acceptance_histogram,
            prefill_seconds=self._seconds["prefill"],
            draft_seconds=self._seconds["draft"],
            target_seconds=self._seconds["target"],
        )


def settle(device: torch.device) -> None:
    """Wait for what a device still does, so that no method is charged for another's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
