"""Blocks of pending tokens and trees give what plain passes give, and `keep` leaves what a prefill leaves."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from harness import (
    MODELS,
    ONCE_EACH,
    ROUNDING,
    View,
    admit,
    check_cache,
    check_tree,
    counted,
    distance,
    outcome,
    plain,
    random_parents,
    random_path,
    random_tokens,
)

from specdec_core import HOLE, ROOT
from specdec_core.model.layers import head_of
from specdec_core.model.runner import Runner
from specdec_core.testing.models import tiny_model

NODES = 7


def feed(
    runner: Runner, rng: random.Random, texts: dict[int, list[int]], n: int = NODES
) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Feed a random tree behind each of these rows and compare every logit; give tokens and parents."""
    tokens = {place: random_tokens(rng, n, runner.vocab_size) for place in texts}
    parents = {place: random_parents(rng, n) for place in texts}
    both = torch.tensor([[tokens[place], parents[place]] for place in sorted(texts)])
    logits = runner.extend(View(texts), both[:, 0], both[:, 1])
    assert logits.shape == (len(texts), 1 + n, runner.vocab_size)
    for row, place in zip(logits, sorted(texts), strict=True):
        check_tree(runner.model, row, texts[place], tokens[place], parents[place])
    return tokens, parents


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_trees_behind_ragged_rows_round_after_round(model: Any) -> None:
    """B65, B75, B76, B77: lengths 1 to 30, shorter windows; rows miss rounds, and places are empty."""
    rng = random.Random(7)
    lengths = {0: 1, 2: 3, 3: 9, 5: 20, 6: 30}  # nobody is at places 1 and 4
    texts = {place: random_tokens(rng, length) for place, length in lengths.items()}
    runner = Runner(model, chunk=16)
    admit(runner, texts, nodes=NODES)
    for number, absent in enumerate([(), (3,), (0, 5, 6)]):
        members = {place: text for place, text in texts.items() if place not in absent}
        tokens, parents = feed(runner, rng, members)
        paths = {place: random_path(rng, parents[place]) for place in members}
        lengths = {place: len(text) for place, text in members.items()}
        runner.keep(outcome(paths))
        for place, path in paths.items():
            assert runner.held(place) == lengths[place] + len(path)
            texts[place] += [*(tokens[place][node] for node in path), *random_tokens(rng, 1 + number % 2)]
    check_cache(runner, texts)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("seed", range(4))
def test_accepted_second_children_are_moved_together(name: str, seed: int) -> None:
    """B75: ten rounds in which every accepted node is its parent's second child."""
    rng = random.Random(seed)
    runner = Runner(tiny_model(name, window=8 if name == "mistral" else None))
    texts = {0: random_tokens(rng, 5), 1: random_tokens(rng, 1)}
    admit(runner, texts, nodes=6, new=60)
    parents = [ROOT, ROOT, 1, 1, 3, 3]
    for _ in range(10):
        tokens = [random_tokens(rng, 6) for _ in texts]
        logits = runner.extend(View(texts), torch.tensor(tokens), torch.tensor([parents, parents]))
        paths = {0: [1, 3, 5], 1: [1, 3, 5][: rng.randrange(4)]}
        for place, text in texts.items():
            check_tree(runner.model, logits[place], text, tokens[place], parents)
        runner.keep(outcome(paths))
        for place, text in texts.items():
            text += [*(tokens[place][node] for node in paths[place]), rng.randrange(97)]
            assert runner.held(place) == len(text) - 1
        check_cache(runner, texts)


@pytest.mark.parametrize("chunk", [2, 8, 512])
@pytest.mark.parametrize("model", [p for p in ONCE_EACH if "full" not in str(p.id)], indirect=True)
def test_a_prompt_in_chunks_gives_the_logits_of_a_whole_one(model: Any, chunk: int) -> None:
    rng = random.Random(1)
    texts = {0: random_tokens(rng, 30), 1: random_tokens(rng, 1), 3: random_tokens(rng, 9)}
    runner = Runner(model, chunk=chunk)
    admit(runner, texts)
    with counted(runner.model) as calls:
        logits = runner.extend(View(texts))
    assert logits.shape == (3, 1, 97)
    for row, text in zip(logits, texts.values(), strict=True):
        assert distance(row[0], plain(model, text)[-1]) < ROUNDING
    chunks = {2: 14 + 4, 8: 3 + 1, 512: 0}[chunk]
    assert len(calls) == chunks + 1
    check_cache(runner, texts)


def test_prefill_leaves_at_most_a_chunk_and_at_least_one_token() -> None:
    runner = Runner(tiny_model(), chunk=8)
    text = random_tokens(random.Random(2), 24)
    admit(runner, {0: text})
    calls = [(i, fed) for i, _, fed in runner.prefill(View({0: text}))]
    assert calls == [(0, 8), (0, 8)]
    assert runner.held(0) == 16


@pytest.mark.parametrize(
    ("levels", "path"),
    [
        ([[ROOT], [0], [1], [2]], [0, 1, 2, 3]),
        ([[ROOT, ROOT], [0, 0, 1, 1], [2, 5, 5]], [1, 5, 8]),
        ([[ROOT, ROOT, HOLE], [1, HOLE], [3]], [1, 3, 5]),
    ],
    ids=["chain", "tree", "holes"],
)
@pytest.mark.parametrize(("name", "window"), [("llama", None), ("mistral", 8), ("gemma2", 8), ("gpt2", None)])
def test_a_draft_model_steps_level_by_level(
    name: str, window: int | None, levels: list[list[int]], path: list[int]
) -> None:
    """Each level is fed behind those fed before: `extend(fed=m)`."""
    rng = random.Random(3)
    model = tiny_model(name, window=window)
    runner = Runner(model, chunk=8)
    texts = {0: random_tokens(rng, 12), 2: random_tokens(rng, 1), 3: random_tokens(rng, 5)}
    parents = [parent for level in levels for parent in level]
    tokens = [random_tokens(rng, len(parents)) for _ in texts]
    admit(runner, texts)
    got, fed = [], 0
    for level in levels:
        upto = fed + len(level)
        drafted = torch.tensor([row[fed:upto] for row in tokens])
        got.append(runner.extend(View(texts), drafted, torch.tensor([parents[:upto]] * 3), fed))
        assert got[-1].shape[1] == len(level) + (fed == 0)
        fed = upto
    for row, text, drafted in zip(torch.cat(got, dim=1), texts.values(), tokens, strict=True):
        check_tree(model, row, text, drafted, parents)
    runner.keep(outcome(dict.fromkeys(texts, path)))
    for place, text in texts.items():
        text += [tokens[sorted(texts).index(place)][node] for node in path]
        assert runner.held(place) == len(text)
    check_cache(runner, texts)


def test_what_was_not_fed_is_not_kept() -> None:
    """A drafter need not feed its last proposal: that node is still pending."""
    rng = random.Random(4)
    runner = Runner(tiny_model())
    texts = {0: random_tokens(rng, 4), 1: random_tokens(rng, 2)}
    admit(runner, texts)
    drafted = torch.tensor([[5, 6], [7, 8]])
    runner.extend(View(texts), drafted, torch.tensor([[-1, 0], [-1, 0]]))
    runner.keep(outcome({0: [0, 1, 2], 1: []}))  # node 2 was proposed, never fed
    assert (runner.held(0), runner.held(1)) == (6, 2)
    texts = {0: [*texts[0], 5, 6, 9, 3], 1: [*texts[1], 1]}
    logits = runner.extend(View(texts))
    for row, text in zip(logits, texts.values(), strict=True):
        assert distance(row[0], plain(runner.model, text)[-1]) < ROUNDING


def test_what_one_round_fed_is_forgotten_by_the_next() -> None:
    """A drafter may propose again without feeding anything."""
    runner = Runner(tiny_model())
    admit(runner, {0: [1, 2, 3]})
    runner.extend(View({0: [1, 2, 3]}), torch.tensor([[5, 6]]), torch.tensor([[-1, 0]]))
    runner.keep(outcome({0: [0]}))
    runner.keep(outcome({0: [0, 1]}))
    assert runner.held(0) == 4


def test_padding_never_writes_where_a_row_may() -> None:
    """Rows may fill what was reserved to the last slot, and sit between those of a later block."""
    rng = random.Random(3)
    runner = Runner(tiny_model())
    texts = {0: random_tokens(rng, 2), 1: random_tokens(rng, 60), 2: random_tokens(rng, 40)}
    admit(runner, texts, nodes=4, new=0)  # 64 slots, and one more for padding
    parents = torch.tensor([[-1, HOLE, HOLE, HOLE], [-1, 0, 1, 2], [HOLE] * 4])
    tokens = [random_tokens(rng, 4) for _ in texts]
    logits = runner.extend(View(texts), torch.tensor(tokens), parents)
    for place, text in texts.items():
        check_tree(runner.model, logits[place], text, tokens[place], parents[place].tolist())
    runner.keep(outcome({0: [], 1: [0, 1, 2, 3], 2: []}))
    full = {1: texts.pop(1) + tokens[1]}
    assert runner.held(1) == 64
    texts[0].append(3)
    texts[2].append(4)
    runner.extend(View(texts), torch.tensor(tokens[:2]), parents[:2])
    check_cache(runner, full)


def test_a_row_that_was_not_drafted_for_keeps_its_prefix() -> None:
    """`keep` hears of every row of a round, also of those that a drafter left out."""
    rng = random.Random(5)
    runner = Runner(tiny_model())
    texts = {0: random_tokens(rng, 4), 1: random_tokens(rng, 6)}
    admit(runner, texts)
    runner.extend(View(texts))
    runner.keep(outcome({0: [], 1: []}))
    texts[0].append(1)
    texts[1].append(2)
    runner.extend(View({1: texts[1]}), torch.tensor([[3]]), torch.tensor([[-1]]))
    runner.keep(outcome({0: [], 1: [0]}))
    assert (runner.held(0), runner.held(1)) == (4, 8)


def test_a_place_serves_one_row_after_another() -> None:
    """What the last row left in the slots is never seen."""
    rng = random.Random(6)
    runner = Runner(tiny_model())
    for length in (40, 3, 64, 1):
        text = {0: random_tokens(rng, length), 1: random_tokens(rng, 5)}
        admit(runner, text, nodes=NODES)
        feed(runner, rng, text)
        runner.release([0, 1])


def test_growing_the_cache_keeps_what_rows_hold() -> None:
    """B25: a later row may be longer and sit further back."""
    rng = random.Random(8)
    runner = Runner(tiny_model())
    texts = {0: random_tokens(rng, 5)}
    admit(runner, texts, new=8)
    feed(runner, rng, texts)
    runner.keep(outcome({0: []}))
    texts |= {2: random_tokens(rng, 150)}
    moves = runner.cache.moves
    admit(runner, {2: texts[2]}, new=40)
    assert runner.cache.moves == moves + 1
    texts[0].append(9)
    feed(runner, rng, texts)
    check_cache(runner, texts)


def test_hidden_states_are_those_of_the_blocks() -> None:
    """As HF's `hidden_states`, but the last one has no final norm: it is what the head is applied to."""
    model = tiny_model("qwen3", layers=3)
    runner = Runner(model, hidden_layers=(0, 2, 3))
    text = random_tokens(random.Random(9), 6)
    admit(runner, {0: text})
    forward = runner.forward(View({0: text}), None, None)
    with torch.no_grad():
        wanted = model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
    assert sorted(forward.hidden) == [0, 2, 3]
    for layer in (0, 2):
        assert distance(forward.hidden[layer], wanted[layer]) < ROUNDING
    assert distance(model.model.norm(forward.hidden[3]), wanted[3]) < ROUNDING
    assert distance(head_of(model)(forward.hidden[3])[0], plain(model, text)) < ROUNDING
