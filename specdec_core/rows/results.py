"""What generation returns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from specdec_core.contract.sampling_params import FinishReason
from specdec_core.rows.row import Row
from specdec_core.rows.stats import Stats
from specdec_core.rows.text import RowText
from specdec_core.sampling.logprobs import TokenLogprob


@dataclass(frozen=True)
class GenerationResult:
    """One finished row."""

    text: str | None  # without special tokens; None where the decoder has no tokenizer
    token_ids: list[int]  # generated, an EOS that ended it included
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None  # of each generated token, where `logprobs` was asked for
    sample: int  # which of the prompt's `n` samples
    prompt_token_ids: list[int]
    seed: int
    verifier: str
    stats: Stats


def result_of(row: Row, tokenizer: Any | None) -> GenerationResult:
    """Give the result of a row that has ended without an error."""
    assert row.finished is not None
    if row.text is None and tokenizer is not None:
        row.text = RowText(tokenizer)
        row.text.add(row.output)
    if row.text is not None:
        row.text.finish()
    return GenerationResult(
        text=None if row.text is None else row.text.text,
        token_ids=row.output,
        finish_reason=row.finished,
        logprobs=None if row.params.logprobs is None else row.logprobs,
        sample=row.sample,
        prompt_token_ids=list(row.prompt),
        seed=row.seed,
        verifier=row.verifier.name,
        stats=row.stats,
    )


class Results(list[GenerationResult]):
    """Results in the order of the prompts, and the statistics of the run as a whole."""

    def __init__(self, results: Iterable[GenerationResult], stats: Stats) -> None:
        super().__init__(results)
        self.stats = stats


@dataclass(frozen=True)
class StreamChunk:
    """What one round added to a stream."""

    text: str  # complete characters only; "" without a tokenizer
    token_ids: list[int]
    result: GenerationResult | None = None  # on the last chunk
