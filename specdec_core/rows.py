"""Rows being generated, the batch of one round, and the one place where output changes: `Batch.commit`."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import or_

import torch
from torch import Tensor

from specdec_core.clock import Clock
from specdec_core.constraints import Walk
from specdec_core.context import RoundContext, TokenBuffer
from specdec_core.draft_values import CheckedDraft
from specdec_core.errors import ConstraintError
from specdec_core.history import History, node_paths
from specdec_core.interfaces import Outcome
from specdec_core.logits import BlockLogits
from specdec_core.logprobs import TokenLogprob, measure, read
from specdec_core.model.tree import Tree
from specdec_core.rng import KeyedRng, Purpose
from specdec_core.row_text import RowText
from specdec_core.sampling_params import FinishReason, SamplingParams
from specdec_core.stats import Stats
from specdec_core.stopping import cut
from specdec_core.verdicts import CheckedVerdict


@dataclass(eq=False)
class Row:
    """One sequence being generated."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int  # of this sample
    eos: frozenset[int]
    context_limit: int | None
    walk: Walk | None = None  # of its constraint
    sample: int = 0  # which of the prompt's n samples
    own_seed: int | None = None  # of its draws, where no other row may share them
    place: int = -1
    began: float = 0.0  # when it was admitted, on the run's clock
    tokens: list[int] = field(default_factory=list)  # committed, prompt included
    finished: FinishReason | None = None
    error: ConstraintError | None = None  # why it has no result
    text: RowText | None = None  # kept while generating only where stops or a stream need it
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.stats.prompt_tokens = len(self.prompt)
        if self.room <= 0:
            self.finished = self._room_reason
        elif self.walk is not None and self.walk.ended:
            self.finished = FinishReason.STOP

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

    def commit(self, tokens: list[int], drafted: int, source: str = "") -> int:
        """Append a block, cut where the row ends; return how many tokens were kept."""
        kept, self.finished = cut(tokens, self.room, self.eos, self._room_reason)
        if self.walk is not None:
            kept = self._constrained(self.walk, tokens[:kept])
        if self.text is not None:
            kept = self.text.add(tokens[:kept])
            if self.text.stopped:
                self.finished = FinishReason.STOP
        self.tokens += tokens[:kept]
        self.stats.count_round(drafted, accepted=len(tokens) - 1, new=kept, source=source)
        return kept

    def _constrained(self, walk: Walk, tokens: list[int]) -> int:
        """Let the constraint follow; a row that it leaves nothing to say ends, and the others go on."""
        try:
            kept = walk.commit(tokens)
        except ConstraintError as error:
            self.error, self.finished = error, FinishReason.STOP
            return 0
        if walk.ended:
            self.finished = FinishReason.STOP
        return kept


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
    def params(self) -> tuple[SamplingParams, ...]:
        """Params of each row."""
        return tuple(row.params for row in self.rows)

    @cached_property
    def context(self) -> RoundContext:
        """What drafters see; valid until `commit`."""
        return RoundContext(self.rows, self.buffer, self._rng(Purpose.DRAFT, self.drafter_name))

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
        return any(not row.stats.rounds for row in self.rows)

    @cached_property
    def rng(self) -> KeyedRng:
        """The verifier's randomness; the keys are those of the start of the round."""
        return self._rng(Purpose.VERIFY, "")

    def commit(
        self, checked: CheckedDraft, verdict: CheckedVerdict, logits: BlockLogits
    ) -> tuple[Outcome, list[int]]:
        """Make the verdict's tokens part of the output; return it with the draft's flags.

        This is the round's one host transfer. EOS, stop strings and caps are applied here, in mid-block,
        and a path that they cut is cut too; such a row has ended.

        logits: raw, for rows that want log-probabilities.

        Raises:
            VerifierError: the verdict broke a rule; nothing was committed.
        """
        context = self.context
        top = max((p.logprobs for p in self.params if p.logprobs is not None), default=None)
        found = _to_host(checked, verdict, logits, top)
        verdict.check(reduce(or_, (block.verdict_flags for block in found)))
        tokens, paths = [], []
        sources = checked.draft.sources or [""] * len(self.rows)
        for row, block, source in zip(self.rows, found, sources, strict=True):
            kept = row.commit(block.tokens, block.drafted, source)
            tokens.append(block.tokens[:kept])
            paths.append(block.path[:kept])
            if row.params.logprobs is not None and top is not None:
                row.logprobs += read(block.logprobs, tokens[-1], top, row.params.logprobs)
        finished = tuple(row.finished for row in self.rows)
        outcome = Outcome(context.rows, context.places, tuple(tokens), tuple(paths), finished)
        return outcome, [block.flags for block in found]

    def count_time(self, clock: Clock) -> dict[str, float]:
        """Book the round's seconds on every row that took part; return them."""
        seconds = clock.collect()
        for row in self.rows:
            row.stats.add_seconds(seconds)
            row.stats.total_seconds = clock.now - row.began
            if row.stats.time_to_first_token is None:
                row.stats.time_to_first_token = clock.now - row.began
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
