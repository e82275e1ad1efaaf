"""On trained models drafts are partly right at every depth: the text stays, acceptance is as it should be."""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import Any

import pytest
import torch
from pair import decoder, pair, prompts
from support import base, greedy, plugins, sampled
from transformers import Qwen3Config, Qwen3ForCausalLM

from specdec_core import SamplingParams, Stats
from specdec_core.demo import DRAFT

N = 24
CHAINS = ["greedy", "match", "rejection", "block", "tree_mask"]
METHODS = {  # drafter: verifiers, and the least share of drafted tokens that is accepted
    "prompt_lookup:num_tokens=4": (["rejection"], 0.15),
    "small_model:num_tokens=4": (CHAINS, 0.5),
    "small_model:num_tokens=4,draft=sampled": (["block", "tree_mask"], 0.5),
    "small_model:num_tokens=4,draft=coupled": (["match"], 0.5),
    "small_model:min_confidence=0.6": (["rejection"], 0.7),
    "early_exit:num_tokens=4": (["greedy", "match", "block"], 0.5),
    "early_exit:layer=3,draft=sampled": (["block"], 0.5),
    "tree_top2": (["greedy", "tree_mask"], 0.15),
    "tree_top2:layer=2,children=sampled": (["tree_mask"], 0.15),
    "prompt_lookup:num_tokens=4,small_model:num_tokens=4": (["block"], 0.3),
}


@functools.cache
def plain() -> list[list[int]]:
    model, tokenizer = pair()
    return [base(model, prompt, N, eos=[tokenizer.eos_token_id]) for prompt in prompts()]


def said(results: Any) -> list[list[int]]:
    return [result.token_ids for result in results]


@functools.cache
def greedy_stats(drafter: str) -> Stats:
    results = decoder(drafter, draft_tokens=None).generate(prompts(), greedy(N))
    assert said(results) == plain()
    stats: Stats = results.stats
    return stats


@pytest.mark.parametrize(
    ("drafter", "verifier", "least"),
    [(drafter, verifier, least) for drafter, (those, least) in METHODS.items() for verifier in those],
)
def test_a_ragged_batch_says_what_plain_decoding_says(drafter: str, verifier: str, least: float) -> None:
    """Three places for four rows, so that a row starts where another's rejected states lie."""
    results = decoder(drafter, verifier=verifier, max_batch=3, draft_tokens=None).generate(
        prompts(), greedy(N)
    )
    assert said(results) == plain()
    assert results.stats.acceptance_rate >= least
    assert len([count for count in results.stats.acceptance_histogram if count]) > 2


MATCHED = {
    "prompt_lookup:num_tokens=4": 0.1,
    "small_model:num_tokens=4": 0.5,
    "small_model:num_tokens=4,draft=coupled": 0.7,
    "early_exit:num_tokens=4,draft=coupled": 0.7,
    "tree_top2:depth=4": 0.2,
}


@pytest.mark.parametrize("drafter", MATCHED)
def test_a_seed_gives_one_text_with_every_drafter(drafter: str) -> None:
    """That of plain sampling with the target's noise, which a coupled draft shares."""
    params = SamplingParams(max_new_tokens=N, temperature=0.8, top_p=0.95, seed=3, ignore_eos=True)
    results = decoder(drafter, verifier="match", draft_tokens=None).generate(prompts(), params)
    assert said(results) == [sampled(pair()[0], prompt, params) for prompt in prompts()]
    assert results.stats.acceptance_rate >= MATCHED[drafter]


def test_a_trained_draft_is_worth_more_than_a_random_one() -> None:
    torch.manual_seed(0)
    config = Qwen3Config.from_pretrained(str(DRAFT))
    random = plugins().build_drafter("small_model", {"model": Qwen3ForCausalLM(config).eval()})
    results = decoder(random, draft_tokens=None).generate(prompts(), greedy(N))
    assert said(results) == plain()
    assert results.stats.acceptance_rate < 0.05
    assert greedy_stats("small_model").acceptance_rate > 0.4


@pytest.mark.parametrize(
    "rising",
    [
        ["early_exit:layer=1", "early_exit:layer=2", "early_exit:layer=3", "early_exit:layer=7"],
        ["prompt_lookup:num_tokens=3", "small_model:num_tokens=3", "tree_top2"],
    ],
    ids=["deeper exits", "better sources, then trees"],
)
def test_more_is_accepted(rising: list[str]) -> None:
    """At one depth each gives more tokens a target call than the one before it."""
    per_call = {drafter: greedy_stats(drafter).tokens_per_target_call for drafter in rising}
    assert all(less + 0.1 < more for less, more in pairwise(per_call.values())), per_call
