"""Logits processors see exactly what was said before each index, and mean what they mean in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from support import ScriptedDrafter, base, decoder_for, following, ids, planted, tiny_llama, wrong
from torch import Tensor

from specdec_core import SamplingParams
from specdec_core.contract.tree import Tree
from specdec_core.sampling.history import NOTHING, History, RowFacts, node_paths
from specdec_core.sampling.processors import process

PROMPTS = [[10], ids(2), [3, 4, 5, 6] * 4, ids(20, 2)]
TREE = [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def theirs(prompt: Sequence[int], n: int, **options: Any) -> list[int]:
    """Greedy ids of transformers' own generation."""
    x = torch.tensor([prompt])
    y = tiny_llama().generate(
        x, attention_mask=torch.ones_like(x), max_new_tokens=n, do_sample=False, pad_token_id=0, **options
    )
    said: list[int] = y[0, len(prompt) :].tolist()
    return said


CASES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "repetition below one": {"repetition_penalty": 0.7},
    "no repeated bigram": {"no_repeat_ngram_size": 2},
    "no repeated token": {"no_repeat_ngram_size": 1},
    "bad words": {"bad_words_ids": ((24,), (55, 34), (3, 4, 5))},
    "several": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": ((7,),)},
}


@pytest.mark.parametrize("drafter", ["prompt_lookup", "none", "tree"])
@pytest.mark.parametrize("case", CASES)
def test_greedy_equals_transformers_with_the_same_options(case: str, drafter: str) -> None:
    """B66: under a chain, a tree and plain decoding, alone and in a ragged batch."""
    options = CASES[case]
    hf = {k: [list(word) for word in v] if k == "bad_words_ids" else v for k, v in options.items()}
    expected = [theirs(prompt, 24, **hf) for prompt in PROMPTS]
    ahead = following(*([*p, *said] for p, said in zip(PROMPTS, expected, strict=True)))
    tree = ScriptedDrafter(planted(TREE, [1, 5, 13], ahead), depth=3, nodes=14, trees=True)
    decoder = decoder_for(tiny_llama(), tree if drafter == "tree" else drafter)
    params = SamplingParams(max_new_tokens=24, **options)
    results = decoder.generate(PROMPTS, params)
    assert [r.token_ids for r in results] == expected
    assert decoder.generate(PROMPTS[2], params).token_ids == expected[2]
    if drafter == "tree":
        assert sum(r.stats.accepted_tokens for r in results) > 40


@pytest.mark.parametrize("least", [0, 1, 7, 8])
def test_min_new_tokens_bans_eos_to_the_token(least: int) -> None:
    """B67: EOS is possible again exactly after `min_new_tokens`."""
    prompt = PROMPTS[3]
    eos = base(tiny_llama(), prompt, 3)[2]
    options: dict[str, Any] = {"min_new_tokens": least} if least else {}
    expected = theirs(prompt, 30, eos_token_id=eos, **options)
    ahead = following([*prompt, *expected])
    chain = ScriptedDrafter(lambda ask: ahead(ask.tokens, min(8, ask.depth)))
    result = decoder_for(tiny_llama(), chain).generate(
        prompt, SamplingParams(max_new_tokens=30, eos_token_id=eos, min_new_tokens=least)
    )
    assert result.token_ids == expected
    assert len(result.token_ids) > least


def test_a_users_processor_sees_prompt_output_and_path_alone() -> None:
    """B67: for every committed position i it saw exactly prompt + output[:i]; the rest are drafted paths."""
    prompt, seen = PROMPTS[2], set()
    said = base(tiny_llama(), prompt, 16)
    ahead = following([*prompt, *said])

    def recording(input_ids: Tensor, scores: Tensor) -> Tensor:
        assert input_ids.shape[0] == scores.shape[0]
        seen.update(tuple(row) for row in input_ids.tolist())
        return scores

    script = planted(TREE, [1, 4, 11], ahead)
    tree = ScriptedDrafter(script, depth=3, nodes=14, trees=True)
    params = SamplingParams(max_new_tokens=16, logits_processors=(recording,))
    assert decoder_for(tiny_llama(), tree).generate(prompt, params).token_ids == said
    texts = {(*prompt, *said[:i]) for i in range(16)}
    assert texts <= seen
    for other in seen - texts:  # a wrong branch: what was said, and then a drafted path
        length = next(i for i in range(len(other)) if other[: i + 1] != (*prompt, *said)[: i + 1])
        assert length >= len(prompt)
        assert len(other) - length <= 3
        assert NOTHING not in other


def test_a_users_processor_rules_every_position() -> None:
    """B69's kind: a rule that depends on the path is kept at accepted, recovered and bonus tokens."""

    def rising(input_ids: Tensor, scores: Tensor) -> Tensor:
        allowed = torch.arange(scores.shape[1]) > input_ids[:, -1:]
        return scores.masked_fill(~allowed & (input_ids[:, -1:] < 90), -torch.inf)

    drafters = [
        ScriptedDrafter(lambda ask: [ask.tokens[-1] + 1, 3, ask.tokens[-1] + 2][: ask.depth]),
        "prompt_lookup",
        "none",
    ]
    params = SamplingParams(max_new_tokens=20, temperature=1.5, seed=3, logits_processors=(rising,))
    outputs = [decoder_for(tiny_llama(), d).generate([5], params).token_ids for d in drafters]
    assert outputs[0] == outputs[1] == outputs[2]
    said = [5, *outputs[0]]
    assert all(b > a or a >= 90 for a, b in pairwise(said))


def test_bias_forces_and_forbids() -> None:
    ahead = following([10] + [4] * 30)
    chain = ScriptedDrafter(lambda ask: [*ahead(ask.tokens, 2), wrong(4)][: ask.depth])
    params = SamplingParams(max_new_tokens=8, logit_bias={4: 1e4})
    result = decoder_for(tiny_llama(), chain).generate([10], params)
    assert result.token_ids == [4] * 8
    assert result.stats.accepted_tokens > 3


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    scores = torch.zeros(1, 1, 6)
    history = History(
        [RowFacts(3, frozenset())], lambda: (torch.tensor([[1, 2, 2, 4, 4, 5, 0]]), torch.tensor([6]))
    )
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    assert process(scores, [params], history)[0, 0].tolist() == [0, 0, 0, 0, -1.0, -0.75]


def test_rows_that_did_not_ask_are_left_alone() -> None:
    scores = torch.randn(2, 3, 97, generator=torch.Generator().manual_seed(0))
    paths = torch.tensor([[[-1, -1], [5, -1], [5, 6]]] * 2)
    facts = [RowFacts(2, frozenset({9})), RowFacts(2, frozenset({9}))]
    committed = torch.tensor([[1, 2, 3], [1, 2, 0]]), torch.tensor([3, 2])
    asks = SamplingParams(
        repetition_penalty=2.0,
        presence_penalty=1.0,
        no_repeat_ngram_size=1,
        bad_words_ids=((3,),),
        min_new_tokens=5,
        logit_bias={7: 1.0},
    )
    out = process(scores, [SamplingParams(), asks], History(facts, lambda: committed, lambda: paths))
    assert torch.equal(out[0], scores[0])
    assert not torch.equal(out[1], scores[1])


def test_history_holds_committed_tokens_and_each_nodes_path() -> None:
    parents = torch.tensor([[-1, 0, -1, 2, 3], [-1, -2, 0, 2, -2]])
    tree = Tree.of(parents)
    tokens = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]])
    committed = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([3, 1])
    history = History(
        [RowFacts(1, frozenset())] * 2,
        lambda: committed,
        lambda: node_paths(tokens, tree.ancestors, tree.depths, 3),
    )

    def said(row: int, index: int) -> list[int]:
        length = int(history.lengths[row, index])
        assert (history.ids[row, index, length:] == NOTHING).all()
        sequence: list[int] = history.ids[row, index, :length].tolist()
        return sequence

    first = [[], [10], [10, 11], [12], [12, 13], [12, 13, 14]]
    assert [said(0, i) for i in range(6)] == [[1, 2, 3, *path] for path in first]
    assert [said(1, i) for i in (0, 1, 3, 4)] == [[4], [4, 20], [4, 20, 22], [4, 20, 22, 23]]
