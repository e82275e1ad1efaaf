"""Greedy ids of a real model equal transformers' own, token for token in float32 (B01, B02, B54)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from prompts import PROMPTS

from specdec_core import GenerationResult, SamplingParams, SpecDecoder
from specdec_core.rows.prompts import encode_prompts

pytestmark = pytest.mark.real_model

SHORT = ["copy-recipe", "code-raw", "chat-capital", "one-token"]  # what every CI run does
TOKENS = 24


def expected(model: Any, tokenizer: Any, name: str, tokens: int) -> list[int]:
    return _expected(_Hidden(model, tokenizer), name, tokens)


class _Hidden:
    """A model and its tokenizer as a cache key."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    def __hash__(self) -> int:
        return id(self.model)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hidden) and other.model is self.model


@cache
def _expected(key: _Hidden, name: str, tokens: int) -> list[int]:
    ids = torch.tensor([_ids(key.tokenizer, name)])
    output = key.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    new: list[int] = output[0, ids.shape[1] :].tolist()
    return new


def _ids(tokenizer: Any, name: str) -> tuple[int, ...]:
    return encode_prompts(PROMPTS[name], tokenizer)[0][0]


def check_single(pair: Any, name: str, tokens: int, drafter: str, **options: Any) -> GenerationResult:
    model, tokenizer = pair
    decoder = SpecDecoder(model, tokenizer, drafter=drafter, strict=True, **options)
    result: GenerationResult = decoder.generate(PROMPTS[name], SamplingParams(max_new_tokens=tokens))
    assert result.token_ids == expected(model, tokenizer, name, tokens)
    return result


def check_batch(pair: Any, names: list[str], tokens: int) -> None:
    model, tokenizer = pair
    decoder = SpecDecoder(model, tokenizer, drafter="prompt_lookup", max_batch=4, strict=True)
    prompts = [_ids(tokenizer, name) for name in names]
    results = decoder.generate(prompts, SamplingParams(max_new_tokens=tokens))
    for name, result in zip(names, results, strict=True):
        assert result.token_ids == expected(model, tokenizer, name, tokens), name


@pytest.mark.parametrize("name", SHORT[1:])  # the first: with the test of how many rounds it takes
def test_prompt_lookup_says_what_transformers_says(smollm2: Any, name: str) -> None:
    check_single(smollm2, name, TOKENS, "prompt_lookup")


def test_plain_decoding_says_what_transformers_says(smollm2: Any) -> None:
    check_single(smollm2, "chat-capital", TOKENS, "none")


def test_ragged_batch_of_four(smollm2: Any) -> None:
    check_batch(smollm2, SHORT, TOKENS)


def test_copying_takes_few_rounds(smollm2: Any) -> None:
    """B87: fewer than 40% as many target calls as new tokens."""
    result = check_single(smollm2, "copy-recipe", 48, "prompt_lookup", draft_tokens=None)
    assert result.stats.rounds < 0.4 * len(result.token_ids)
    assert result.stats.mean_acceptance_length > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMPTS)
def test_every_prompt_256_tokens(smollm2: Any, name: str) -> None:
    check_single(smollm2, name, 256, "prompt_lookup")


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, len(PROMPTS), 4))
def test_every_prompt_256_tokens_in_ragged_batches(smollm2: Any, start: int) -> None:
    check_batch(smollm2, list(PROMPTS)[start::5], 256)
