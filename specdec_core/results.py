"""What generation returns."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_core.sampling_params import FinishReason
from specdec_core.stats import Stats


@dataclass(frozen=True)
class GenerationResult:
    """One finished row."""

    text: str | None  # without special tokens; None where the decoder has no tokenizer
    token_ids: list[int]  # generated, an EOS that ended it included
    finish_reason: FinishReason
    prompt_token_ids: list[int]
    seed: int
    verifier: str
    stats: Stats


@dataclass(frozen=True)
class StreamChunk:
    """What one round added to a stream."""

    text: str  # complete characters only; "" without a tokenizer
    token_ids: list[int]
    result: GenerationResult | None = None  # on the last chunk
