"""The rows of one round, and the one place where output changes: `Batch.commit`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from specdec_core.checks.draft_values import CheckedDraft
from specdec_core.checks.verdicts import CheckedVerdict, broken_verdict
from specdec_core.contract.distributions import BlockLogits, TargetDistributions
from specdec_core.contract.interfaces import Outcome, Verifier
from specdec_core.contract.rng import KeyedRng, Purpose
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.contract.tree import Tree
from specdec_core.rows.clock import Clock
from specdec_core.rows.context import LaterRng, RoundContext, TokenBuffer
from specdec_core.rows.row import Row
from specdec_core.sampling.history import History, node_paths
from specdec_core.sampling.logprobs import measure, read
from specdec_core.sampling.pipeline import distributions


@dataclass(eq=False)
class Batch:
    """The rows of one round."""

    rows: list[Row]
    buffer: TokenBuffer
    drafter_name: str
    others_wait: bool = False  # for places, as far as is known

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Index of each row in every cache."""
        return tuple(row.place for row in self.rows)

    @cached_property
    def kind(self) -> str:
        """Names of the verifiers of its rows: rounds of one kind cost alike."""
        return "+".join(sorted({row.verifier.name for row in self.rows}))

    @cached_property
    def judges(self) -> list[tuple[Verifier, list[int]]]:
        """Each verifier, and which rows it judges."""
        found: dict[int, tuple[Verifier, list[int]]] = {}
        for i, row in enumerate(self.rows):
            found.setdefault(id(row.verifier), (row.verifier, []))[1].append(i)
        return list(found.values())

    def deepest(self, depth: int) -> list[int]:
        """Give the deepest node, `depth` at most, that each row has room for, and for a token of its own."""
        return [max(min(depth, row.left - 1), 0) for row in self.rows]

    def forced(self, most: int | None = None) -> tuple[int, ...]:
        """Give how deep forced tokens may be drafted for each row, `most` at most; or none at all."""
        if not any(row.forced for row in self.rows):
            return ()
        wanted = [row.forced if most is None else min(row.forced, most) for row in self.rows]
        return tuple(map(min, wanted, self.deepest(max(wanted))))

    @cached_property
    def params(self) -> tuple[SamplingParams, ...]:
        """Params of each row."""
        return tuple(row.params for row in self.rows)

    @cached_property
    def context(self) -> RoundContext:
        """What drafters see; valid until `commit`."""
        return RoundContext(self.rows, self.buffer, lambda: self._rng(Purpose.DRAFT, self.drafter_name))

    def distributions(self, checked: CheckedDraft, logits: BlockLogits) -> TargetDistributions:
        """Make p after the last pending token and after every node."""
        if all(row.plain for row in self.rows):
            return TargetDistributions(logits)  # of which nobody but the argmax is asked for
        return distributions(logits, self.params, self.history(checked))

    def history(self, checked: CheckedDraft) -> History:
        """What was said before the last pending token's successor and before every node's."""
        draft = checked.draft
        if not draft.nodes:
            return self.context.history()

        def paths() -> Tensor:
            tree = Tree.of_chains(draft.parents) if checked.tree is None else checked.tree
            return node_paths(draft.tokens, tree.ancestors, tree.depths, draft.depth)

        return self.context.history(paths)

    @cached_property
    def first(self) -> bool:
        """Whether a row's prompt ends in this round's forward."""
        return any(not row.read for row in self.rows)

    @cached_property
    def rng(self) -> KeyedRng:
        """The verifier's randomness; the keys are those of the start of the round."""
        return cast("KeyedRng", LaterRng(lambda: self._rng(Purpose.VERIFY, "")))

    def commit(
        self, checked: CheckedDraft, verdict: CheckedVerdict, logits: BlockLogits
    ) -> tuple[Outcome, list[int]]:
        """Make the verdict's tokens part of the output; return it with the draft's flags.

        This is the round's one host transfer. EOS, stop strings and caps are applied here, in mid-block,
        and a path that they cut is cut too; such a row has ended. So has one that failed: it commits nothing.

        logits: raw, for rows that want log-probabilities.
        """
        context = self.context
        top = max((p.logprobs for p in self.params if p.logprobs is not None), default=None)
        found = _to_host(checked, verdict, logits, top)
        tokens, paths = [], []
        sources = checked.draft.sources or [""] * len(self.rows)
        for i, (row, block) in enumerate(zip(self.rows, found, strict=True)):
            row.read = True
            if block.verdict_flags:
                row.fail(broken_verdict(row.verifier, block.verdict_flags))
            kept = 0 if row.error else row.commit(block.tokens, block.drafted, sources[i])
            tokens.append(block.tokens[:kept])
            paths.append(block.path[:kept])
            if row.params.logprobs is not None and top is not None:
                row.logprobs += read(block.logprobs, tokens[-1], top, row.params.logprobs)
        finished = tuple(row.finished for row in self.rows)
        outcome = Outcome(context.rows, context.places, tuple(tokens), tuple(paths), finished)
        return outcome, [block.flags for block in found]

    def count_time(self, clock: Clock) -> dict[str, float]:
        """Book the round's seconds on every row that took part; return them."""
        seconds, now = clock.collect(), clock.now
        for row in self.rows:
            row.stats.add_seconds(seconds)
            row.stats.total_seconds = now - row.began
            if row.stats.time_to_first_token is None and row.stats.new_tokens:
                row.stats.time_to_first_token = now - row.began
        return seconds

    def _rng(self, purpose: Purpose, owner: str) -> KeyedRng:
        seeds = [row.seed if row.own_seed is None else row.own_seed for row in self.rows]
        return KeyedRng(seeds, [len(row.tokens) for row in self.rows], purpose, owner, self.buffer.device)


@dataclass(frozen=True)
class _Block:
    """What a round brought for one row, on the host."""

    path: list[int]
    tokens: list[int]  # accepted, and the row's own
    drafted: int
    flags: int  # of the draft
    verdict_flags: int
    logprobs: list[int]  # as `logprobs.read` takes them


def _to_host(
    checked: CheckedDraft, verdict: CheckedVerdict, logits: BlockLogits, top: int | None
) -> list[_Block]:
    """Fetch all that a round brought, in one transfer."""
    path, next_token = verdict.path, verdict.next_token.unsqueeze(-1)
    d = path.shape[1]
    tokens = next_token
    if d:
        along = checked.draft.tokens.gather(1, path.clamp(min=0))
        tokens = torch.cat([torch.where(path >= 0, along, next_token), next_token], dim=1)
    parts = [path, tokens, verdict.flags.unsqueeze(-1)]
    if checked.counts is not None and checked.flags is not None:
        parts += [checked.counts.unsqueeze(-1), checked.flags.unsqueeze(-1)]
    if top is not None:
        parts.append(measure(logits.whole, path, tokens, top))
    blocks = []
    for i, row in enumerate(torch.cat(parts, dim=1).tolist()):
        accepted = [node for node in row[:d] if node >= 0]
        said, rest = row[d : d + len(accepted) + 1], row[2 * d + 1 :]
        wrong = rest.pop(0)
        drafted, flags = (0, 0) if checked.counts is None else (rest.pop(0), rest.pop(0))
        if checked.known is not None:
            drafted, flags = checked.known[i]
        blocks.append(_Block(accepted, said, drafted, flags, wrong, rest))
    return blocks
