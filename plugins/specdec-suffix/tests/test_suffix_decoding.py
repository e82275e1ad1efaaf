"""The whole: what is said is what plain decoding says, whatever was learned, and memory stays bounded."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specdec_core import Registry, SamplingParams, SpecDecoder
from specdec_core.testing.models import copier, ids, markov_llama, tiny_model
from specdec_core.testing.reference import base, sampled
from specdec_suffix import Suffix, SuffixConfig

RAGGED = (1, 3, 9, 20)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"shared": False},
    {"tree": True},
    {"tree": True, "shared": False, "nodes": 5},
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def decoder(
    model: Any, verifier: str = "auto", options: dict[str, Any] | None = None, **others: Any
) -> SpecDecoder:
    drafter = Suffix(SuffixConfig(**(options or {})))
    return SpecDecoder(
        model, drafter=drafter, verifier=verifier, **{"strict": True, "draft_tokens": 16, **others}
    )


def verifiers(options: dict[str, Any], *, sampling: bool) -> list[str]:
    chains = [] if options.get("tree") else ["rejection", "block"]
    return ["match", "tree_mask", *chains, *([] if sampling else ["greedy"])]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_greedy_output_is_that_of_plain_decoding(options: dict[str, Any]) -> None:
    """B01, B42, B54: alone and in a ragged batch, twice on one decoder: the second run drafts a lot."""
    model = tiny_model("llama")
    prompts = [ids(length) for length in RAGGED]
    wanted = [base(model, prompt, 24) for prompt in prompts]
    for verifier in verifiers(options, sampling=False):
        tried = decoder(model, verifier, options, max_batch=3)
        rounds = []
        for _ in range(2):
            results = tried.generate(prompts, SamplingParams(max_new_tokens=24))
            assert [result.token_ids for result in results] == wanted
            rounds.append(sum(result.stats.rounds for result in results))
        if options.get("shared", True):
            assert rounds[1] <= rounds[0] / 3
        assert tried.generate(prompts[0], SamplingParams(max_new_tokens=24)).token_ids == wanted[0]


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2"])
def test_other_architectures(architecture: str) -> None:
    model, prompt = tiny_model(architecture), ids(7)
    tried = decoder(model, options={"tree": True})
    for _ in range(2):
        assert tried.generate(prompt, SamplingParams(max_new_tokens=20)).token_ids == base(model, prompt, 20)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_with_match_a_seed_gives_one_text_whatever_was_learned(options: dict[str, Any]) -> None:
    """B57, B72."""
    model = tiny_model("llama")
    prompts = [ids(length, 5) for length in RAGGED]
    params = [SamplingParams(max_new_tokens=12, temperature=0.7, seed=seed) for seed in (3, 3, 1, 2)]
    wanted = [sampled(model, prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    state = torch.get_rng_state()
    tried = decoder(model, "match", options)
    for _ in range(3):
        assert [result.token_ids for result in tried.generate(prompts, params)] == wanted
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("verifier", "tree"), [("rejection", False), ("block", False), ("tree_mask", True)])
def test_a_seed_that_is_used_again_leaves_the_law_as_it_is(verifier: str, tree: bool) -> None:
    """A draft learned from a row depends on its draws: another row of that seed must make others."""
    vocab, rows = 40, 300
    log_p = torch.full((vocab, vocab), -30.0)
    log_p[:, :2] = 0.0  # 0 or 1 follows, one as likely as the other
    prompts = [[2 + i // 30, 2 + i % 30, 39, 0, 2 + i // 30, 2 + i % 30, 39] for i in range(rows)]
    tried = decoder(markov_llama(log_p), verifier, {"tree": tree}, max_batch=rows)
    params = [SamplingParams(max_new_tokens=2, temperature=1.0, seed=seed) for seed in range(rows)]
    for _ in range(3):
        results = tried.generate(prompts, params)
        drafted = sum(result.stats.drafted_tokens for result in results)
        zeros = sum(result.token_ids[0] == 0 for result in results)
        assert drafted >= rows * 0.9
        assert abs(zeros - rows / 2) < 5 * (rows / 4) ** 0.5


def test_a_fresh_decoder_repeats_itself() -> None:
    """B72: the same calls of a fresh decoder give the same text, with any verifier."""
    model, prompts = tiny_model("llama"), [ids(5), ids(6)]
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=4)
    texts = []
    for _ in range(2):
        tried = decoder(model, "rejection")
        texts.append([[r.token_ids for r in tried.generate(prompts, params)] for _ in range(2)])
    assert texts[0] == texts[1]


def test_an_eos_in_mid_block_and_a_full_context_end_the_row() -> None:
    """B31, B60."""
    model, prompt = tiny_model("llama", context=48), ids(12)
    said = base(model, prompt, 36)
    tried = decoder(model)
    tried.generate(prompt, SamplingParams(max_new_tokens=30))
    for at in (2, 5, 9):
        if said[at] in said[:at]:
            continue
        result = tried.generate(prompt, SamplingParams(max_new_tokens=30, eos_token_id=said[at]))
        assert (result.token_ids, result.finish_reason) == (said[: at + 1], "eos")
    whole = tried.generate(prompt, SamplingParams(max_new_tokens=99))
    assert (whole.token_ids, whole.finish_reason) == (said, "context")


def test_a_text_that_repeats_itself_is_accepted_whole() -> None:
    """B45, B46: nothing repeats in the prompt, and the output does."""
    model = copier({1: 2, 2: 3, 3: 4, 4: 1})
    result = decoder(model).generate([9, 8, 1], SamplingParams(max_new_tokens=200))
    assert result.token_ids == base(model, [9, 8, 1], 200)
    assert result.stats.acceptance_rate >= 0.95
    assert result.stats.rounds <= 20


def test_depth_and_nodes_are_what_was_asked_for() -> None:
    """B78, B89, B105."""
    model, prompt = copier({1: 2, 2: 3, 3: 4, 4: 1}), [1, 2, 3, 4] * 5
    for k in (0, 1, 3):
        stats = decoder(model, draft_tokens=k).generate(prompt, SamplingParams(max_new_tokens=12)).stats
        assert stats.drafted_tokens == sum(min(k, room) for room in range(11, -1, -k - 1))
    tree = decoder(tiny_model("llama"), options={"tree": True})
    for seed in range(4):
        tree.generate(ids(9), SamplingParams(max_new_tokens=12, temperature=1.5, seed=seed))
    rounds = list(tree.rounds(ids(9), SamplingParams(max_new_tokens=12, temperature=1.5, seed=9)))
    assert any(done.draft.nodes > done.draft.depth for done in rounds)


def test_a_row_that_was_left_alone_is_learned_from() -> None:
    model, prompt = tiny_model("llama"), ids(6)
    tried = decoder(model)
    run = tried.rounds(prompt, SamplingParams(max_new_tokens=30))
    for _ in range(5):
        next(run)
    run.close()
    drafter: Any = tried.drafter
    (_, said), *more = drafter.history.sequences()
    assert not more
    assert list(said) == base(model, prompt, 30)[: len(said)]
    assert len(said) >= 5


@pytest.mark.parametrize("shared", [True, False])
def test_memory_is_bounded(shared: bool) -> None:
    """B90: the history is full after a while, and then stays as large as it is."""
    drafter = Suffix(SuffixConfig(max_history=4000, shared=shared))
    tokens = iter(ids(20_000, vocab=50_000))
    template = ids(100, vocab=50_000)

    def learn(rows: int) -> int:
        for _ in range(rows):
            text = [token if i % 7 else next(tokens) for i, token in enumerate(template)]
            drafter.history.learn(text if shared else [], 0)
        assert drafter.history.size <= 4000
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        learn(100)
        full = learn(50)
        assert learn(300) <= full * 1.1 + 1000
        assert full < 4000 * 600  # bytes a token
    finally:
        tracemalloc.stop()


def test_in_a_combination_it_learns_of_every_row() -> None:
    model, prompt = tiny_model("llama"), ids(8)
    tried = SpecDecoder(model, drafter="suffix,prompt_lookup", draft_tokens=16, strict=True)
    assert tried.drafter.capabilities.learns
    first, second = (tried.generate(prompt, SamplingParams(max_new_tokens=24)) for _ in range(2))
    assert first.token_ids == second.token_ids == base(model, prompt, 24)
    assert second.stats.rounds <= first.stats.rounds / 3


def test_it_is_found_by_its_name_and_says_what_is_wrong() -> None:
    registry = Registry.discover()
    assert registry.build_drafter("suffix", {"tree": "true", "alpha": "2.5"}).config.alpha == 2.5
    for option, value in (("alpha", "0"), ("min_probability", "1.5"), ("max_history", "10"), ("trees", "1")):
        with pytest.raises(ValueError, match=option):
            registry.build_drafter("suffix", {option: value})
