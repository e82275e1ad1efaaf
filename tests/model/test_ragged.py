"""Blocks without padding: a model computes the tokens there are, and each gets the logits it gets anyway."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from harness import (
    ONCE_EACH,
    ROUNDING,
    View,
    admit,
    check_cache,
    check_tree,
    distance,
    outcome,
    random_parents,
    random_path,
    random_tokens,
)
from support import base, greedy

from specdec_core import HOLE, SpecDecoder
from specdec_core.contract.tree import Tree
from specdec_core.model import grouped
from specdec_core.model.graphs import Capture
from specdec_core.model.probe import probe
from specdec_core.model.ragged import Ragged
from specdec_core.model.runner import Runner
from specdec_core.testing.models import tiny_model

NODES = 6
CPU = torch.device("cpu")


@contextmanager
def fed(model: Any) -> Iterator[list[tuple[int, ...]]]:
    """Note the shapes of the ids that a model is fed within."""
    shapes: list[tuple[int, ...]] = []
    hook = model.register_forward_pre_hook(
        lambda _, __, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        yield shapes
    finally:
        hook.remove()


def trees(rng: random.Random, counts: list[int]) -> torch.Tensor:
    """Tokens and parents, [rows, 2, NODES]: random trees of so many nodes."""
    rows = []
    for count in counts:
        parents = random_parents(rng, count) + [HOLE] * (NODES - count)
        rows.append([random_tokens(rng, NODES), parents])
    return torch.tensor(rows)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("model", ONCE_EACH, indirect=True)
def test_trees_of_any_sizes_round_after_round(model: Any, seed: int) -> None:
    """Prompts of several lengths, empty places, rows that miss rounds, and trees of none to six nodes."""
    rng = random.Random(seed)
    lengths = {0: 1, 2: 3, 3: 9, 5: 20}
    texts = {place: random_tokens(rng, length) for place, length in lengths.items()}
    runner = Runner(model)
    runner.hidden_layers = (1,)
    padded = Runner(model)
    padded.plan, padded.hidden_layers = padded.plan.padded(), (1,)
    for one in (runner, padded):
        admit(one, texts, nodes=NODES)
    for absent in [(), (3,), (0, 5), ()]:
        members = {place: text for place, text in texts.items() if place not in absent}
        counts = [rng.choice([0, 0, 1, NODES, rng.randrange(NODES)]) for _ in members]
        both = trees(rng, counts)
        pending = sum(len(text) - runner.held(place) for place, text in members.items())
        made = None if absent == (3,) else Tree.of(both[:, 1])  # beforehand, or not
        with fed(runner.model) as shapes:
            forward = runner.forward(View(members), both[:, 0], both[:, 1], counts=counts, tree=made)
        if runner.plan.ragged:
            assert shapes == [(1, pending + sum(counts))]
        other = padded.forward(View(members), both[:, 0], both[:, 1])
        for i, text in enumerate(members.values()):
            tokens, parents = both[i].tolist()
            check_tree(model, forward.logits.whole[i], text, tokens, parents)
            own = slice(forward.columns - forward.pending[i], forward.columns + counts[i])
            assert distance(forward.hidden[1][i, own], other.hidden[1][i, own]) < ROUNDING
            assert forward.logits.argmax[i].tolist() == forward.logits.whole[i].argmax(dim=-1).tolist()
        paths = {place: random_path(rng, both[i, 1].tolist()) for i, place in enumerate(members)}
        for one in (runner, padded):
            one.keep(outcome(paths))
        for i, place in enumerate(members):
            texts[place] += [*both[i, 0][paths[place]].tolist(), *random_tokens(rng, 1)]
    check_cache(runner, texts)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_chains_of_any_lengths(name: str) -> None:
    rng = random.Random(3)
    model = tiny_model(name, window=8 if name == "mistral" else None)
    texts = {place: random_tokens(rng, 4 + 3 * place) for place in range(5)}
    runner = Runner(model)
    admit(runner, texts, nodes=NODES)
    counts = [0, NODES, 1, 0, 3]
    tokens = torch.tensor([random_tokens(rng, NODES) for _ in texts])
    with fed(runner.model) as shapes:
        logits = runner.forward(View(texts), tokens, None, counts=counts).logits.whole
    assert shapes == [(1, sum(map(len, texts.values())) + sum(counts))]
    for i, text in enumerate(texts.values()):
        parents = [*range(-1, counts[i] - 1), *[HOLE] * (NODES - counts[i])]
        check_tree(model, logits[i], text, tokens[i].tolist(), parents)


@pytest.mark.parametrize("more", [0, 2])
def test_a_block_with_hardly_any_padding_stays_a_rectangle(more: int) -> None:
    model = tiny_model()
    runner = Runner(model)
    texts = {0: [1, 2, 3], 1: [4, 5, 6, 7, 8][: 3 + more]}
    admit(runner, texts)
    with fed(runner.model) as shapes:
        runner.forward(View(texts), torch.ones((2, 4), dtype=torch.int64))
    assert shapes == [(2, 7 + more)]


@pytest.mark.parametrize("capture", [Capture.FIXED, Capture.OFF])
def test_fixed_shapes_keep_their_padding(capture: Capture) -> None:
    model = tiny_model()
    runner = Runner(model, capture=capture)
    texts = {0: [1, 2, 3, 4], 1: [4]}
    admit(runner, texts)
    with fed(runner.model) as shapes:
        runner.forward(View(texts))
    assert runner.ragged == (capture is Capture.OFF)
    assert shapes == [(1, 5) if runner.ragged else (2, 4)]


def test_a_wide_row_attends_by_itself_and_others_together() -> None:
    def parts(counts: list[int], pending: list[int]) -> list[tuple[slice, int, int]]:
        rows = list(range(len(counts)))
        size = (len(counts), max(pending), max(counts))
        ragged = Ragged.of(rows, pending, counts, [50 + count for count in counts], size, CPU)
        return [(part.rows, part.columns, part.view) for part in ragged.parts]

    many = slice(0, 8)
    assert parts([0, 0, 9, 0, 0, 0, 0, 0], [1] * 8) == [(many, 1, 50), (slice(2, 3), 10, 59)]
    assert parts([1, 0, 1, 1, 0, 1, 1, 1], [1] * 8) == [(many, 2, 51)]  # too little to be called for again
    assert parts([0, 0], [40, 90]) == [(slice(0, 1), 40, 50), (slice(1, 2), 90, 50)]


def test_a_model_that_minds_is_fed_rectangles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say, one that reads the first position of each row, and takes the others to follow it."""
    model = tiny_model()
    forward = type(model).forward

    @functools.wraps(forward)
    def minds(self: Any, position_ids: Any = None, **arguments: Any) -> Any:
        if position_ids is not None and position_ids.shape[0] == 1:
            position_ids = position_ids[:, :1] + torch.arange(position_ids.shape[1])
        return forward(self, position_ids=position_ids, **arguments)

    monkeypatch.setattr(type(model), "forward", minds)
    runner = Runner(model)
    assert runner.ragged
    found = probe(runner)
    assert found.trees
    assert not runner.ragged
    assert runner.plan.group is not None  # its attention may still be ours


@pytest.mark.parametrize("kept", ["all", "asked"])
def test_a_model_that_keeps_logits_by_their_number_only(kept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remote code may know `logits_to_keep` as a number, and give all where it is none."""
    model = tiny_model("llama", context=512, fresh=True)
    forward = type(model).forward

    @functools.wraps(forward)
    def ints(self: Any, logits_to_keep: Any = 0, **arguments: Any) -> Any:
        keep = logits_to_keep if isinstance(logits_to_keep, int) or kept == "asked" else 0
        return forward(self, logits_to_keep=keep, **arguments)

    monkeypatch.setattr(type(model), "forward", ints)
    prompts = [[5, 6, 7, 8] * 4, list(range(10, 29)), [3] * 7]
    decoder = SpecDecoder(model, drafter="none", strict=True)
    assert decoder.target.runner.ragged
    said = [base(model, prompt, 8) for prompt in prompts]
    assert [result.token_ids for result in decoder.generate(prompts, greedy(8))] == said


@pytest.mark.parametrize("draft_tokens", [4, "auto"])
def test_what_is_said_is_that_of_plain_decoding(draft_tokens: Any) -> None:
    """Rows of a batch draft as much as each is worth, rows come and go, and all say what they would alone."""
    model = tiny_model("llama", context=512, fresh=True)
    prompts = [[5, 6, 7, 8] * 4, list(range(10, 29)), [3] * 7, [40, 41, 42] * 3, [9, 8]]
    said = [base(model, prompt, 40) for prompt in prompts]
    decoder = SpecDecoder(model, drafter="prompt_lookup", draft_tokens=draft_tokens, max_batch=4, strict=True)
    assert decoder.target.runner.ragged
    uneven = sum(len(set(done.draft.counts or ())) > 1 for done in decoder.rounds(prompts, greedy(40)))
    assert uneven or draft_tokens == "auto"  # which depends on what rounds took
    assert [result.token_ids for result in decoder.generate(prompts, greedy(40))] == said


def test_a_thread_does_not_meet_the_block_of_another() -> None:
    """They may run one model, whose configs name one attention for all of them."""
    ragged = Ragged.of([0, 1], [1, 2], [0, 0], [1, 2], (2, 2, 0), CPU)
    seen: list[Any] = []

    def other() -> None:
        with grouped.feeding(None):
            seen.append(grouped._thread.ragged)

    with grouped.feeding(ragged):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert grouped._thread.ragged is ragged
    assert seen == [None]
    assert grouped._thread.ragged is None
