"""Greedy output is that of plain decoding, whatever drafts: any drafter, length, shape or round."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    VOCAB,
    Ask,
    ScriptedDrafter,
    accepting,
    base,
    decoder_for,
    depth_of,
    following,
    greedy,
    ids,
    oracle,
    planted,
    registered_drafters,
    sampled,
    tiny_llama,
    wrong,
)
from transformers import DynamicCache

from specdec_core import HOLE, ROOT, Capture, SamplingParams, SpecDecoder
from specdec_core.testing.models import tiny_model

PROMPTS = [[10], ids(2), ids(5, 1), [3, 4, 5, 6] * 5, ids(40, 2)]
DRAFTERS = registered_drafters()

CHAIN = [-1, 0, 1]
BINARY = [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]  # 2 x 2 x 2
WIDE = [-1, -1, -1]
UNEVEN = [-1, 0, -1, 2, 2, 4, 0]
SHAPES = {
    "chain": (CHAIN, [0, 1, 2]),
    "chain, nothing right": (CHAIN, []),
    "2x2x2 first": (BINARY, [0, 2, 6]),
    "2x2x2 second child": (BINARY, [1, 5, 13]),
    "2x2x2 zigzag": (BINARY, [1, 4, 11]),
    "3 wide, middle": (WIDE, [1]),
    "3 wide, last": (WIDE, [2]),
    "uneven, long": (UNEVEN, [2, 4, 5]),
    "uneven, short": (UNEVEN, [0, 6]),
}


@pytest.mark.parametrize("k", [0, 1, 5, 8])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_at_every_draft_length_says_what_plain_decoding_says(name: str, k: int) -> None:
    """B01: one-token prompts too."""
    model = tiny_llama()
    decoder = decoder_for(model, name, draft_tokens=k)
    for prompt in PROMPTS:
        result = decoder.generate(prompt, greedy(32))
        assert result.token_ids == base(model, prompt, 32), prompt
        assert result.finish_reason == "length"


def test_draft_length_does_not_change_the_output() -> None:
    """B03: the drafter finds something at every length, and is wrong now and then."""
    model = tiny_llama()
    for prompt in PROMPTS:
        outputs, drafted = set(), set()
        for k in range(1, 9):
            script = accepting(oracle(model, prompt), [3, 0, 8, 1, 5], 8)
            result = SpecDecoder(
                model, drafter=ScriptedDrafter(script), draft_tokens=k, strict=True
            ).generate(prompt, greedy(24))
            outputs.add(tuple(result.token_ids))
            drafted.add(result.stats.rounds)
        assert outputs == {tuple(base(model, prompt, 24))}
        assert len(drafted) > 1  # the lengths made a difference to the rounds


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_few_tokens_are_exactly_that_many(name: str, n: int) -> None:
    """B05: the token of the prefill is the first of the output."""
    model = tiny_llama()
    decoder = decoder_for(model, name)
    for prompt in PROMPTS:
        assert decoder.generate(prompt, greedy(n)).token_ids == base(model, prompt, n)


@pytest.mark.parametrize("name", DRAFTERS)
def test_the_first_token_ends_the_row_when_it_is_an_eos(name: str) -> None:
    """B05."""
    model = tiny_llama()
    for prompt in PROMPTS:
        first = base(model, prompt, 1)
        result = decoder_for(model, name).generate(prompt, greedy(9, eos_token_id=first[0]))
        assert (result.token_ids, result.finish_reason) == (first, "eos")


@pytest.mark.parametrize("chunk", [2, 3, 16, 63, 64, 512])
@pytest.mark.parametrize("length", [1, 2, 7, 64])
def test_the_first_tokens_do_not_depend_on_prefill_chunks(length: int, chunk: int) -> None:
    """B02."""
    model, prompt = tiny_llama(), ids(length, 3)
    decoder = SpecDecoder(model, prefill_chunk=chunk, strict=True)
    result = decoder.generate(prompt, greedy(6))
    assert result.token_ids == base(model, prompt, 6)
    assert result.stats.prefill_calls == max(-(-length // chunk) - 1, 0)


@pytest.mark.parametrize("capture", [Capture.OFF, Capture.FIXED])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_shape_of_a_tree_does_not_change_the_output(shape: str, capture: Capture) -> None:
    """B08: and the planted path is accepted, so the shapes were really used."""
    model, prompt = tiny_llama(), ids(6, 4)
    parents, path = SHAPES[shape]
    drafter = ScriptedDrafter(
        planted(parents, path, oracle(model, prompt)), depth=depth_of(parents), nodes=len(parents), trees=True
    )
    decoder = SpecDecoder(model, drafter=drafter, strict=True, capture=capture, draft_tokens=None)
    result = decoder.generate(prompt, greedy(37))
    assert result.token_ids == base(model, prompt, 37)
    assert result.stats.rounds == -(-37 // (len(path) + 1))
    assert result.stats.acceptance_histogram[len(path)] >= 37 // (len(path) + 1) - 1


@pytest.mark.parametrize("path", [[1, 5, 13], [1, 4, 11]], ids=["always second", "second, first, second"])
def test_ten_rounds_of_second_children_leave_the_cache_of_a_cold_prefill(path: list[int]) -> None:
    """B75, B07."""
    model, prompt = tiny_llama(), ids(6, 4)
    drafter = ScriptedDrafter(
        planted(BINARY, path, oracle(model, prompt)), depth=3, nodes=len(BINARY), trees=True
    )
    decoder = SpecDecoder(model, drafter=drafter, strict=True, draft_tokens=None)
    rounds = 0
    for done in decoder.rounds(prompt, greedy(40)):
        [row] = done.batch.rows
        rounds += 1
        assert done.outcome.paths == (path,)
        if row.finished:  # and its place is free
            break
        held = decoder.target.runner.held(row.place)
        assert held == len(row.tokens) - 1
        with torch.no_grad():
            output = model(input_ids=torch.tensor([row.tokens[:held]]), use_cache=True)
        [cold] = [part for part in output.values() if isinstance(part, DynamicCache)]
        cache = decoder.target.runner.cache
        for layer, warm in enumerate(zip(cache.keys, cache.values, strict=True)):
            for got, expected in zip(warm, (cold.layers[layer].keys, cold.layers[layer].values), strict=True):
                torch.testing.assert_close(got[0, :, :held], expected[0], atol=1e-4, rtol=1e-4)
    assert rounds == 10
    assert row.output == base(model, prompt, 40)


@pytest.mark.parametrize("total", range(61, 67))
def test_a_tree_has_room_behind_the_last_tokens(total: int) -> None:
    """B08, B60: caches are made in steps; a wide block at the end of a row does not fit by chance."""
    model, prompt = tiny_llama(), ids(40, 7)
    drafter = ScriptedDrafter(
        planted(BINARY, [], oracle(model, prompt)), depth=3, nodes=len(BINARY), trees=True
    )
    result = SpecDecoder(model, drafter=drafter, strict=True, draft_tokens=None).generate(
        prompt, greedy(total - 40)
    )
    assert result.token_ids == base(model, prompt, total - 40)


@pytest.mark.parametrize("name", DRAFTERS)
def test_after_every_round_the_cache_holds_all_but_the_last_token(name: str) -> None:
    """B07: for prompts in chunks, in a batch."""
    model = tiny_llama()
    decoder = decoder_for(model, name, prefill_chunk=8)
    for done in decoder.rounds(PROMPTS, greedy(20)):
        for row in done.batch.rows:
            if not row.finished:
                assert decoder.target.runner.held(row.place) == len(row.tokens) - 1
    assert row.finished


@pytest.mark.parametrize("name", DRAFTERS)
def test_one_decoder_serves_prompts_of_any_lengths_in_turn(name: str) -> None:
    """B25."""
    model = tiny_llama()
    decoder = decoder_for(model, name)
    for length in (5, 50, 3, 50):
        prompt = ids(length, 5)
        assert decoder.generate(prompt, greedy(20)).token_ids == base(model, prompt, 20)


@pytest.mark.parametrize("capture", [Capture.OFF, Capture.FIXED])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_sliding_window_is_passed_without_a_trace(name: str, attention: str, capture: Capture) -> None:
    """B26."""
    model = windowed(attention)
    prompt = [7, 8, 9, 7, 8, 9]
    result = decoder_for(model, name, capture=capture).generate(prompt, greedy(40))
    assert result.token_ids == base(model, prompt, 40)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_tree_across_a_sliding_window_is_lossless(attention: str) -> None:
    """B26: with drafts that are accepted on every side of the border."""
    model, prompt = windowed(attention), ids(6)
    drafter = ScriptedDrafter(
        planted(UNEVEN, [2, 4, 5], oracle(model, prompt)), depth=3, nodes=len(UNEVEN), trees=True
    )
    result = SpecDecoder(model, drafter=drafter, strict=True, draft_tokens=None).generate(prompt, greedy(40))
    assert result.token_ids == base(model, prompt, 40)
    assert result.stats.rounds == 10


def windowed(attention: str) -> Any:
    return tiny_model("mistral", window=8, attention=attention)


@pytest.mark.parametrize("kind", ["static", "quantized", "offloaded", "hybrid"])
def test_a_target_that_is_set_to_another_kind_of_cache_is_served_all_the_same(kind: str) -> None:
    """B24: the setting is left as it was."""
    model = tiny_model("mistral", window=8, fresh=True)
    model.generation_config.cache_implementation = kind
    result = SpecDecoder(model, strict=True).generate([7, 8, 9, 7, 8, 9], greedy(20))
    assert result.token_ids == base(model, [7, 8, 9, 7, 8, 9], 20)
    assert model.generation_config.cache_implementation == kind


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("capture", [Capture.OFF, Capture.FIXED])
def test_no_mask_row_is_empty_and_no_logit_is_lost(
    capture: Capture, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B65: trees of other sizes in a ragged batch, rows without a draft among them."""
    model = windowed(attention)
    prompts = [ids(length, 6) for length in (1, 3, 9, 20)]
    ahead = oracle(model, *prompts)
    shapes = [planted(*SHAPES[name], ahead) for name in ("2x2x2 zigzag", "3 wide, last", "uneven, long")]

    def script(ask: Ask) -> Any:
        which = (ask.i + ask.call) % 4
        return [] if which == 3 else shapes[which](ask)

    drafter = ScriptedDrafter(script, depth=3, nodes=len(BINARY), trees=True)
    decoder = SpecDecoder(model, drafter=drafter, strict=True, capture=capture, draft_tokens=None)
    seen = 0
    running = decoder.target.model
    forward = running.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        mask = kwargs["attention_mask"]
        open_ = mask if mask.dtype == torch.bool else mask == 0
        assert open_.any(dim=-1).all()
        output = forward(*args, **kwargs)
        assert output.logits.isfinite().all()
        seen += 1
        return output

    # the decoder read the model's signature when it was built; from now on it calls this
    monkeypatch.setattr(running, "forward", watched)
    results = decoder.generate(prompts, greedy(16))
    monkeypatch.undo()
    assert seen >= 6
    assert [result.token_ids for result in results] == [base(model, prompt, 16) for prompt in prompts]


def test_wrong_drafts_alone_cost_rounds_and_nothing_else() -> None:
    """B01: a drafter that is always wrong."""
    model, prompt = tiny_llama(), ids(9)
    ahead = oracle(model, prompt)
    drafter = ScriptedDrafter(lambda ask: [wrong(token) for token in ahead(ask.tokens, ask.depth)])
    result = SpecDecoder(model, drafter=drafter, strict=True, draft_tokens=None).generate(prompt, greedy(20))
    assert result.token_ids == base(model, prompt, 20)
    assert (result.stats.rounds, result.stats.accepted_tokens) == (20, 0)
    assert result.stats.drafted_tokens == sum(min(8, 19 - i) for i in range(20))


def random_tree(random: Random, ahead: Any, ask: Ask) -> list[tuple[int, int]]:
    """A tree of up to eight nodes with holes, at most three children each, most tokens right."""
    right, nodes, depths = ahead(ask.tokens, 8), list[tuple[int, int]](), list[int]()
    for node in range(random.randrange(9) if ask.depth else 0):
        parent = random.choice([ROOT, ROOT, *range(node)])
        depth = 1 if parent == ROOT else depths[parent] + 1
        full = [above for _, above in nodes].count(parent) == 3
        if depth > ask.depth or full or (parent >= 0 and depths[parent] == 0):
            parent, depth = HOLE, 0
        known = 0 < depth <= len(right) and random.random() < 0.7
        nodes.append((right[depth - 1] if known else random.randrange(VOCAB), parent))
        depths.append(depth)
    return nodes


@settings(max_examples=25, deadline=None)
@given(
    random=st.randoms(use_true_random=False),
    rows=st.lists(
        st.tuples(st.sampled_from([1, 2, 7, 20, 60, 64]), st.integers(0, 12)), min_size=1, max_size=4
    ),
    places=st.integers(1, 3),
    chunk=st.sampled_from([2, 16, 512]),
    capture=st.sampled_from([Capture.OFF, Capture.FIXED]),
    window=st.booleans(),
)
def test_any_trees_in_any_batch_are_lossless(
    random: Random, rows: list[tuple[int, int]], places: int, chunk: int, capture: Capture, window: bool
) -> None:
    """B01, B08, B54, B55, B60: up to the context limit, greedy and sampled rows side by side, two calls."""
    model: Any = tiny_model("mistral", window=8, context=64) if window else tiny_llama(context=64)
    prompts = [ids(length, 9) for length, _ in rows]
    params = [
        SamplingParams(max_new_tokens=n, temperature=i % 3 / 2, seed=i) for i, (_, n) in enumerate(rows)
    ]
    plain = []
    for prompt, one in zip(prompts, params, strict=True):
        n = min(one.max_new_tokens, 64 - len(prompt))
        plain.append(
            base(model, prompt, n) if one.greedy else sampled(model, prompt, one.replace(max_new_tokens=n))
        )
    ahead = following(*([*prompt, *said] for prompt, said in zip(prompts, plain, strict=True)))
    drafter = ScriptedDrafter(partial(random_tree, random, ahead), depth=4, nodes=8, trees=True)
    decoder = SpecDecoder(
        model,
        drafter=drafter,
        strict=True,
        max_batch=places,
        prefill_chunk=chunk,
        capture=capture,
        draft_tokens=None,
    )
    for _ in range(2):
        assert [one.token_ids for one in decoder.generate(prompts, params)] == plain
