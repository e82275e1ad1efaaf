"""One sequence being generated, and the one place where its output grows: `Row.commit`."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec_core.contract.blame import described
from specdec_core.contract.constraints import Walk
from specdec_core.contract.errors import ConstraintError, SpecdecError
from specdec_core.contract.interfaces import Verifier
from specdec_core.contract.sampling_params import FinishReason, SamplingParams
from specdec_core.rows.stats import Stats
from specdec_core.rows.text import RowText
from specdec_core.sampling.logprobs import TokenLogprob
from specdec_core.sampling.processors import wanted


@dataclass(eq=False)
class Row:
    """One sequence being generated."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int  # of this sample
    eos: frozenset[int]
    context_limit: int | None
    verifier: Verifier
    walk: Walk | None = None  # of its constraint
    sample: int = 0  # which of the prompt's n samples
    own_seed: int | None = None  # of its draws, where no other row may share them
    forced: int = 0  # how deep what its constraint forces may be drafted
    text: RowText | None = None  # kept while generating only where stops or a stream need it
    place: int = -1
    began: float = 0.0  # when it was admitted, on the session's clock
    told: int = 0  # generated tokens that its caller has been told
    read: bool = False  # whether a round has fed all that was committed when it was admitted
    plain: bool = field(init=False)  # it says the target's argmax, as it is
    tokens: list[int] = field(init=False)  # committed, prompt included
    finished: FinishReason | None = None
    error: Exception | None = None  # why it has no result
    logprobs: list[TokenLogprob] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        self.plain = self.params.greedy and not wanted(self.params)
        self.tokens = list(self.prompt)
        self.stats.prompt_tokens = len(self.prompt)
        if self.left <= 0:
            self.finished = self._end_reason
        elif self.walk is not None and self.walk.ended:
            self.finished = FinishReason.STOP

    @property
    def output(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[len(self.prompt) :]

    @property
    def left(self) -> int:
        """How many tokens may still be committed."""
        by_cap = len(self.prompt) + self.params.max_new_tokens - len(self.tokens)
        return by_cap if self.context_limit is None else min(by_cap, self.context_limit - len(self.tokens))

    @property
    def _end_reason(self) -> FinishReason:
        by_cap = len(self.prompt) + self.params.max_new_tokens
        over = self.context_limit is not None and self.context_limit < by_cap
        return FinishReason.CONTEXT if over else FinishReason.LENGTH

    def fail(self, error: Exception) -> None:
        """End without a result; the first error stands."""
        self.error, self.finished = self.error or error, FinishReason.ERROR

    def cancel(self) -> None:
        """End as it stands, unless it has ended."""
        self.finished = self.finished or FinishReason.CANCELLED

    def commit(self, tokens: list[int], drafted: int, source: str = "") -> int:
        """Append a block, cut where the row ends; return how many tokens were kept."""
        kept, self.finished = ending(tokens, self.left, self.eos, self._end_reason)
        if self.walk is not None:
            kept = self._constrained(self.walk, tokens[:kept])
        if self.text is not None:
            try:
                kept = self.text.add(tokens[:kept])
            except Exception as error:  # of a tokenizer
                self.fail(unprintable(error))
                return 0
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
            self.fail(error)
            return 0
        if walk.ended:
            self.finished = FinishReason.STOP
        return kept


def unprintable(error: Exception) -> SpecdecError:
    """Say that a tokenizer cannot print a row's tokens: that costs this row."""
    failure = SpecdecError(f"the tokenizer cannot print this request's tokens: it raised {described(error)}")
    failure.__cause__ = error
    return failure


def ending(
    tokens: list[int], left: int, eos: frozenset[int], reason: FinishReason
) -> tuple[int, FinishReason | None]:
    """Find how many of a block's tokens a row commits, and why it ends there, if it does.

    left: how many tokens the row may still commit, at least 1. An EOS is committed, what follows is not.
    """
    for i, token in enumerate(tokens[:left]):
        if token in eos:
            return i + 1, FinishReason.EOS
    return (left, reason) if len(tokens) >= left else (len(tokens), None)
