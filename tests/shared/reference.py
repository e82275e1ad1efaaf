"""A decoder that knows no speculation: a forward over the whole sequence for every token.

Scores go through transformers' own processors, and stops are looked for in the decoded text; nothing is
shared with the package but the public noise of a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from support import next_logits, warped
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from specdec_core import SamplingParams
from specdec_core.contract.rng import KeyedRng, Purpose


@dataclass
class Said:
    """What a row says."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: list[Tensor] = field(default_factory=list)  # [V] each: of the target, unprocessed


def reference(
    model: Any, tokenizer: Any, prompt: Sequence[int], params: SamplingParams, seed: int, eos: set[int]
) -> Said:
    """Decode one row; `eos` are the ids that end it."""
    pipeline, said, limit = processors(params, len(prompt), eos), Said(), model.config.max_position_embeddings
    while not said.finish_reason:
        tokens, known = [*prompt, *said.token_ids], complete(tokenizer, said.token_ids)
        if len(said.token_ids) == params.max_new_tokens or len(tokens) == limit:
            full = len(said.token_ids) == params.max_new_tokens
            said.finish_reason, said.text = (
                "length" if full else "context",
                decoded(tokenizer, said.token_ids),
            )
            break
        logits = next_logits(model, tokens)
        scores = warped(pipeline(torch.tensor([tokens]), logits[None].clone()), params)
        rng = KeyedRng([seed], [len(tokens)], Purpose.VERIFY, "", scores.device)
        said.token_ids.append(int(scores.argmax() if params.greedy else rng.target_draw(scores, 0)))
        said.logprobs.append(logits.log_softmax(dim=-1))
        text = complete(tokenizer, said.token_ids)
        ends = [(at + len(stop), at) for stop in params.stop for at in found(text, stop, len(known))]
        if ends and len(said.token_ids) >= params.min_new_tokens:
            end, start = min(ends)
            said.finish_reason, said.text = "stop", text[: end if params.include_stop else start]
        elif said.token_ids[-1] in eos:
            said.finish_reason, said.text = "eos", decoded(tokenizer, said.token_ids)
    return said


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """Turn ids into text without special tokens."""
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def complete(tokenizer: Any, ids: Sequence[int]) -> str:
    """Turn ids into text, up to a last character that may not be whole yet."""
    return decoded(tokenizer, ids).rstrip("\ufffd")


def found(text: str, stop: str, known: int) -> list[int]:
    """Where a stop string begins that ends behind `known` characters."""
    return [at for at in range(len(text)) if text.startswith(stop, at) and at + len(stop) > known]


def processors(params: SamplingParams, prompt: int, eos: set[int]) -> LogitsProcessorList:
    """Transformers' processors, in its order; the penalties that it lacks are counted out."""
    wanted: list[Any] = []
    if params.logit_bias:
        wanted.append(SequenceBiasLogitsProcessor([[[i], float(v)] for i, v in params.logit_bias.items()]))
    if params.repetition_penalty != 1:
        wanted.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    wanted.append(CountedPenalty(prompt, params.presence_penalty, params.frequency_penalty))
    if params.no_repeat_ngram_size:
        wanted.append(NoRepeatNGramLogitsProcessor(params.no_repeat_ngram_size))
    if params.bad_words_ids:
        wanted.append(NoBadWordsLogitsProcessor([list(word) for word in params.bad_words_ids]))
    if params.min_new_tokens and eos:
        ends = sorted(eos)
        wanted.append(MinNewTokensLengthLogitsProcessor(prompt, params.min_new_tokens, ends))
    return LogitsProcessorList([*wanted, *params.logits_processors])


class CountedPenalty(LogitsProcessor):
    """OpenAI's presence and frequency penalties: of generated tokens only."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for token in set(output := input_ids[0, self.prompt :].tolist()):
            scores[0, token] -= self.presence + self.frequency * output.count(token)
        return scores
