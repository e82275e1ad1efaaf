"""Rows that begin alike feed their common prefix once: several samples, later calls, the turns of a chat."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import ScriptedDrafter, accepting, base, decoder_for, following, greedy, ids, planted, tiny_llama

from specdec_core import Drafter, Registry, SamplingParams

PROMPT = ids(40, 7)
TREE = [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def early_exit() -> Drafter:
    return Registry.discover().build_drafter("early_exit", {"layer": "1"})


@pytest.mark.parametrize("make", [lambda: "prompt_lookup", lambda: "none", early_exit])
def test_samples_of_a_prompt_share_one_prefill(make: Callable[[], str | Drafter]) -> None:
    decoder = decoder_for(tiny_llama(), make(), max_batch=4)
    params = SamplingParams(max_new_tokens=6, temperature=1.0, seed=5, n=4)
    results = decoder.generate(PROMPT, params)
    assert [r.sample for r in results] == [0, 1, 2, 3]
    assert [r.stats.reused_tokens for r in results] == [0, 39, 39, 39]
    alone = [
        decoder_for(tiny_llama(), make()).generate(PROMPT, params.replace(n=1, seed=r.seed)).token_ids
        for r in results
    ]
    assert [r.token_ids for r in results] == alone
    assert len({tuple(r.token_ids) for r in results}) > 1


def test_the_second_turn_feeds_only_what_is_new() -> None:
    """B21: ids equal a cold run."""
    decoder = decoder_for(tiny_llama())
    first = decoder.generate(PROMPT, greedy(12))
    second = [*PROMPT, *first.token_ids, *ids(5, 9)]
    result = decoder.generate(second, greedy(12))
    assert result.token_ids == base(tiny_llama(), second, 12)
    assert result.stats.reused_tokens >= len(PROMPT) + 11 - 1


def test_after_a_tree_the_kept_slots_hold_the_accepted_path() -> None:
    said = base(tiny_llama(), PROMPT, 20)
    script = planted(TREE, [1, 5, 13], following([*PROMPT, *said]))
    decoder = decoder_for(tiny_llama(), ScriptedDrafter(script, depth=3, nodes=14, trees=True))
    decoder.generate(PROMPT, greedy(20))
    longer = [*PROMPT, *said, 3]
    assert decoder.generate(longer, greedy(8)).token_ids == base(tiny_llama(), longer, 8)


def test_a_stream_closed_early_leaves_a_right_prefix() -> None:
    said = base(tiny_llama(), PROMPT, 30)
    chain = ScriptedDrafter(accepting(following([*PROMPT, *said]), [3, 0, 5], 5))
    decoder = decoder_for(tiny_llama(), chain)
    for rounds in (1, 2, 3):
        stream = decoder.stream(PROMPT, greedy(30))
        for _ in range(rounds):
            next(stream)
        stream.close()
        longer = [*PROMPT, *said[:9], *ids(4, rounds)]
        assert decoder.generate(longer, greedy(8)).token_ids == base(tiny_llama(), longer, 8)


def test_an_exception_in_a_forward_leaves_no_wrong_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = decoder_for(tiny_llama())
    decoder.generate(PROMPT, greedy(8))
    other = [*ids(20, 3), *PROMPT]
    layer = decoder.target.model.model.layers[1]

    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", broken)
        with pytest.raises(RuntimeError, match="luck"):
            decoder.generate(other, greedy(8))
    for prompt in (PROMPT, other):
        assert decoder.generate(prompt, greedy(8)).token_ids == base(tiny_llama(), prompt, 8)


def test_it_can_be_switched_off() -> None:
    decoder = decoder_for(tiny_llama(), reuse_prefixes=False, max_batch=3)
    results = decoder.generate([PROMPT] * 3, greedy(5)) + decoder.generate([PROMPT], greedy(5))
    assert [r.stats.reused_tokens for r in results] == [0] * 4
    assert {r.stats.rounds for r in results} == {results[0].stats.rounds}


def test_changed_weights_are_noticed() -> None:
    model = copy.deepcopy(tiny_llama())
    decoder = decoder_for(model)
    decoder.generate(PROMPT, greedy(8))
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(1.5)
    result = decoder.generate(PROMPT, greedy(8))
    assert result.stats.reused_tokens == 0
    assert result.token_ids == base(model, PROMPT, 8)


def test_prompts_that_part_early_share_what_they_have() -> None:
    decoder = decoder_for(tiny_llama(), max_batch=3)
    prompts = [PROMPT, [*PROMPT[:20], *ids(9, 1)], [*PROMPT[:30], 5], ids(33, 8), PROMPT[:25]]
    for _ in range(2):
        results = decoder.generate(prompts, greedy(10))
        assert [r.token_ids for r in results] == [base(tiny_llama(), p, 10) for p in prompts]
