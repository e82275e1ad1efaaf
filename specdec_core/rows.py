"""Rows being generated, the batch of one round, and the one place where output changes: `Batch.commit`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch

from specdec_core.clock import Clock
from specdec_core.context import RoundContext, TokenBuffer
from specdec_core.draft import Verdict
from specdec_core.guard import CheckedDraft
from specdec_core.history import History, node_paths
from specdec_core.interfaces import Outcome
from specdec_core.rng import KeyedRng, Purpose
from specdec_core.sampling_params import FinishReason, SamplingParams
from specdec_core.stats import Stats
from specdec_core.stopping import cut


@dataclass(eq=False)
class Row:
    """One sequence being generated."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    eos: frozenset[int]
    context_limit: int | None
    place: int = -1
    began: float = 0.0  # when it was admitted, on the run's clock
    tokens: list[int] = field(default_factory=list)  # committed, prompt included
    finished: FinishReason | None = None
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.stats.prompt_tokens = len(self.prompt)
        if self.room <= 0:
            self.finished = self._room_reason

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.prompt) :]

    @property
    def room(self) -> int:
        """How many tokens may still be committed."""
        by_cap = len(self.prompt) + self.params.max_new_tokens - len(self.tokens)
        return by_cap if self.context_limit is None else min(by_cap, self.context_limit - len(self.tokens))

    @property
    def _room_reason(self) -> FinishReason:
        by_cap = len(self.prompt) + self.params.max_new_tokens
        over = self.context_limit is not None and self.context_limit < by_cap
        return FinishReason.CONTEXT if over else FinishReason.LENGTH

    def commit(self, tokens: list[int], drafted: int) -> int:
        """Append a block, cut where the row ends; return how many tokens were kept."""
        kept, self.finished = cut(tokens, self.room, self.eos, self._room_reason)
        self.tokens += tokens[:kept]
        self.stats.count_round(drafted, accepted=len(tokens) - 1, new=kept)
        return kept


@dataclass(eq=False)
class Batch:
    """The rows of one round."""

    rows: list[Row]
    buffer: TokenBuffer
    drafter_name: str

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Index of each row in every cache."""
        return tuple(row.place for row in self.rows)

    @cached_property
    def params(self) -> tuple[SamplingParams, ...]:
        """Params of each row."""
        return tuple(row.params for row in self.rows)

    @cached_property
    def context(self) -> RoundContext:
        """What drafters see; valid until `commit`."""
        return RoundContext(self.rows, self.buffer, self._rng(Purpose.DRAFT, self.drafter_name))

    def history(self, checked: CheckedDraft) -> History:
        """What was said before the last pending token's successor and before every node's."""
        draft, tree = checked.draft, checked.tree
        if tree is None:
            return self.context.history()
        return self.context.history(
            lambda: node_paths(draft.tokens, tree.ancestors, tree.depths, draft.depth)
        )

    @cached_property
    def first(self) -> bool:
        """Whether a row's prompt ends in this round's forward."""
        return any(not row.stats.rounds for row in self.rows)

    @cached_property
    def rng(self) -> KeyedRng:
        """The verifier's randomness; the keys are those of the start of the round."""
        return self._rng(Purpose.VERIFY, "")

    def commit(self, checked: CheckedDraft, verdict: Verdict) -> tuple[Outcome, list[int]]:
        """Make the verdict's tokens part of the output; return it with the draft's flags.

        This is the round's one host transfer. EOS and caps are applied here, in mid-block, and a path that
        they cut is cut too; such a row has ended.
        """
        context = self.context
        found = _to_host(checked, verdict)
        tokens, paths = [], []
        for row, (path, block, drafted, _) in zip(self.rows, found, strict=True):
            kept = row.commit(block, drafted)
            tokens.append(block[:kept])
            paths.append(path[:kept])
        finished = tuple(row.finished for row in self.rows)
        outcome = Outcome(context.rows, context.places, tuple(tokens), tuple(paths), finished)
        return outcome, [flags for *_, flags in found]

    def count_time(self, clock: Clock) -> dict[str, float]:
        """Book the round's seconds on every row that took part; return them."""
        seconds = clock.collect()
        for row in self.rows:
            row.stats.add_seconds(seconds)
            if row.stats.time_to_first_token is None:
                row.stats.time_to_first_token = clock.now - row.began
        return seconds

    def _rng(self, purpose: Purpose, owner: str) -> KeyedRng:
        seeds = [row.seed for row in self.rows]
        return KeyedRng(seeds, [len(row.tokens) for row in self.rows], purpose, owner, self.buffer.device)


def _to_host(checked: CheckedDraft, verdict: Verdict) -> list[tuple[list[int], list[int], int, int]]:
    """Fetch (accepted nodes, committed tokens, drafted nodes, flags) of each row in one transfer."""
    next_token = verdict.next_token.unsqueeze(-1)
    if checked.flags is None or checked.counts is None:
        return [([], [token], 0, 0) for (token,) in next_token.tolist()]
    path = verdict.path
    tokens = checked.draft.tokens.gather(1, path.clamp(min=0))
    packed = [path, tokens, next_token, checked.counts.unsqueeze(-1), checked.flags.unsqueeze(-1)]
    d = path.shape[1]
    blocks = []
    for row in torch.cat(packed, dim=1).tolist():
        accepted = [node for node in row[:d] if node >= 0]
        next_id, drafted, flags = row[2 * d :]
        blocks.append((accepted, [*row[d : d + len(accepted)], next_id], drafted, flags))
    return blocks
