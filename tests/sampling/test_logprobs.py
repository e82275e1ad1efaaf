"""Log-probabilities equal those of the target, teacher-forced, whatever became of the draft (B82)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import ScriptedDrafter, accepting, base, decoder_for, following, ids, oracle, planted, tiny_llama

from specdec_core import SamplingParams

PROMPT = ids(9, 4)
SECOND = [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def forced(prompt: list[int], said: list[int]) -> torch.Tensor:
    """Raw log-softmax before each generated token: [len(said), V]."""
    with torch.no_grad():
        logits = tiny_llama()(input_ids=torch.tensor([prompt + said]), use_cache=False).logits[0]
    return logits[len(prompt) - 1 : -1].float().log_softmax(dim=-1)


def check(result: Any, top: int) -> None:
    expected = forced(result.prompt_token_ids, result.token_ids)
    assert [one.token_id for one in result.logprobs] == result.token_ids
    for row, one in zip(expected, result.logprobs, strict=True):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)
        values, best = row.topk(top) if top else (torch.tensor([]), torch.tensor([]))
        assert [token for token, _ in one.top] == best.tolist()
        assert [value for _, value in one.top] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top", [0, 3])
def test_accepted_recovered_and_bonus_tokens(top: int, temperature: float) -> None:
    ahead = oracle(tiny_llama(), PROMPT)
    params = SamplingParams(max_new_tokens=24, logprobs=top, temperature=temperature, seed=1)
    for drafter in (
        ScriptedDrafter(accepting(ahead, [2, 0, 4, 1], 4)),
        ScriptedDrafter(planted(SECOND, [1, 5, 13], ahead), depth=3, nodes=14, trees=True),
        "prompt_lookup",
        "none",
    ):
        check(decoder_for(tiny_llama(), drafter).generate(PROMPT, params), top)


def test_they_are_raw_also_where_the_logits_are_processed() -> None:
    params = SamplingParams(
        max_new_tokens=10, logprobs=2, repetition_penalty=1.5, top_k=3, temperature=0.7, seed=2
    )
    check(decoder_for(tiny_llama()).generate(PROMPT, params), 2)


def test_rows_of_a_batch_ask_for_their_own_number() -> None:
    params = [SamplingParams(max_new_tokens=8, logprobs=n) for n in (None, 0, 5)]
    results = decoder_for(tiny_llama()).generate([PROMPT, ids(3), ids(20)], params)
    assert results[0].logprobs is None
    check(results[1], 0)
    check(results[2], 5)


def test_they_end_with_the_row() -> None:
    said = base(tiny_llama(), PROMPT, 10)
    ahead = following([*PROMPT, *said])
    chain = ScriptedDrafter(accepting(ahead, [8], 8))
    params = SamplingParams(max_new_tokens=30, logprobs=1, eos_token_id=said[4])
    result = decoder_for(tiny_llama(), chain).generate(PROMPT, params)
    assert len(result.logprobs) == len(result.token_ids) == said.index(said[4]) + 1
    check(result, 1)
