"""Chains without a tree: what the general way gives, in fewer steps; and nothing that others could see."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from harness import ROUNDING, View, admit, check_cache, distance, outcome, plain, random_tokens
from support import base, greedy
from torch import Tensor

from specdec_core import HOLE, ROOT, Capture, SpecDecoder
from specdec_core.contract.tree import Tree
from specdec_core.model.layout import lay_out, lay_out_row
from specdec_core.model.runner import Runner
from specdec_core.model.shapes import Shape
from specdec_core.testing.models import tiny_model

N = 5


def chains(lengths: Sequence[int], n: int = N) -> Tensor:
    """Parents of chains, whose holes come last: int64 [B, n]."""
    rows = [[*range(ROOT, length - 1), *[HOLE] * (n - length)] for length in lengths]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(lengths), n)


@pytest.mark.parametrize("capture", [Capture.OFF, Capture.FIXED])
@pytest.mark.parametrize(("name", "window"), [("llama", None), ("mistral", 4), ("gemma2", 4), ("gpt2", None)])
@pytest.mark.parametrize("places", [(0,), (3,), (0, 1), (1, 3, 4)], ids=str)
def test_chains_get_the_logits_of_plain_passes(
    name: str, window: int | None, capture: Capture, places: tuple[int, ...]
) -> None:
    """Of any lengths, in any places, behind rows of any lengths, round after round; others lie between."""
    rng = random.Random(sum(places))
    model = tiny_model(name, window=window)
    runner = Runner(model, chunk=8, capture=capture)
    texts = {place: random_tokens(rng, rng.randrange(1, 30)) for place in range(5)}
    admit(runner, texts, nodes=N)
    runner.extend(View(texts))
    runner.keep(outcome({place: [] for place in texts}))
    for _ in range(3):
        for place in places:
            texts[place].append(rng.randrange(97))
        lengths = [rng.randrange(N + 1) for _ in places]
        tokens = torch.tensor([random_tokens(rng, N) for _ in places])
        logits = runner.extend(View({place: texts[place] for place in places}), tokens)
        assert logits.shape == (len(places), 1 + N, 97)
        for row, place in enumerate(places):
            said = tokens[row, : lengths[row]].tolist()
            expected = plain(model, texts[place] + said)[len(texts[place]) - 1 :]
            assert distance(logits[row, : lengths[row] + 1], expected) < ROUNDING
        kept = {
            place: list(range(rng.randrange(length + 1)))
            for place, length in zip(places, lengths, strict=True)
        }
        runner.keep(outcome(kept))
        for row, place in enumerate(places):
            texts[place] += tokens[row, : len(kept[place])].tolist()
    check_cache(runner, texts)


@pytest.mark.parametrize("capture", [Capture.OFF, Capture.FIXED])
@pytest.mark.parametrize("places", [(0,), (1, 3)], ids=str)
def test_a_chain_grows_token_by_token(capture: Capture, places: tuple[int, ...]) -> None:
    """As a draft model drafts: each call goes on behind the nodes of those before."""
    rng = random.Random(4)
    model = tiny_model("mistral", window=6)
    runner = Runner(model, capture=capture)
    texts = {place: random_tokens(rng, rng.randrange(1, 12)) for place in places}
    admit(runner, texts, nodes=N)
    tokens = torch.tensor([random_tokens(rng, N) for _ in places])
    got = [runner.extend(View(texts))]
    for at, width in ((0, 1), (1, 1), (2, 3)):
        got.append(runner.extend(View(texts), tokens[:, at : at + width], None, at))
        assert got[-1].shape[1] == width
    for row, text in enumerate(texts.values()):
        expected = plain(model, text + tokens[row].tolist())[len(text) - 1 :]
        assert distance(torch.cat(got, dim=1)[row], expected) < ROUNDING
        text += tokens[row, :4].tolist()
    runner.keep(outcome({place: [0, 1, 2, 3] for place in places}))
    check_cache(runner, texts)
    if capture is Capture.FIXED:  # every step of one token runs at one shape, however many came before
        shapes = [shape for shape in runner.steps._steps if isinstance(shape, Shape) and not shape.columns]
        assert {shape.nodes for shape in shapes} == {1, 3}
        assert len(shapes) == 2


@pytest.mark.parametrize("capture", [Capture.OFF, Capture.FIXED])
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_columns_behind_the_last_position_harm_nothing(name: str, capture: Capture) -> None:
    """A row at its end, beside one that drafts on, and shapes rounded up: there is no such position."""
    model = tiny_model(name, context=32)
    runner = Runner(model, capture=capture)
    rng = random.Random(5)
    texts = {0: random_tokens(rng, 31), 1: random_tokens(rng, 3)}
    admit(runner, texts, nodes=N)
    tokens = torch.tensor([random_tokens(rng, N) for _ in texts])
    logits = runner.extend(View(texts), tokens)
    assert torch.isfinite(logits).all()
    assert distance(logits[0, :2], plain(model, texts[0] + tokens[0, :1].tolist())[30:]) < ROUNDING
    assert distance(logits[1], plain(model, texts[1] + tokens[1].tolist())[2:]) < ROUNDING
    runner.keep(outcome({0: [0], 1: [0, 1, 2, 3, 4]}))
    check_cache(runner, {0: texts[0] + tokens[0, :1].tolist(), 1: texts[1] + tokens[1].tolist()})


@pytest.mark.parametrize("windows", [(None,), (3,), (None, 2)], ids=str)
@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 6), (7, 8), (7, 12)])
def test_one_row_is_laid_out_as_several_are(start: int, end: int, windows: tuple[int | None, ...]) -> None:
    one = lay_out_row(start, end, windows, torch.device("cpu"))
    held, pending = torch.tensor([start]), torch.tensor([end - start])
    many = lay_out(held, pending, None, end - start, 0, end, windows, trash=63)
    assert one.slots is None
    assert many.slots is not None
    assert torch.equal(one.positions, many.positions)
    assert torch.equal(one.positions, many.slots)
    assert one.masks.keys() == many.masks.keys()
    for window in windows:
        assert torch.equal(one.masks[window], many.masks[window])


def test_a_row_that_is_no_member_writes_to_the_trash_only() -> None:
    layout = lay_out(torch.tensor([4, 0]), torch.tensor([3, 0]), None, 3, 0, 7, (None,), trash=63, limit=6)
    assert layout.slots is not None
    assert layout.slots.tolist() == [[4, 5, 6], [63, 63, 63]]
    assert layout.positions.tolist() == [[4, 5, 5], [0, 0, 0]]  # there are six positions
    beyond = lay_out(torch.tensor([61]), torch.tensor([5]), None, 5, 0, 66, (None,), trash=63)
    assert beyond.slots is not None
    assert beyond.slots.tolist() == [[61, 62, 63, 63, 63]]


def test_chains_have_the_ancestors_that_any_tree_has() -> None:
    parents = chains([3, 0, 5])
    one, any_ = Tree.of_chains(parents), Tree.of(parents)
    assert torch.equal(one.real, any_.real)
    assert torch.equal(one.depths[one.real], any_.depths[any_.real])
    assert torch.equal(one.ancestors[one.real], any_.ancestors[any_.real])


@pytest.mark.parametrize("capture", [Capture.OFF, Capture.FIXED])
def test_a_batch_is_never_wider_than_the_places_there_are(capture: Capture) -> None:
    """Five places stay five: the bucket of five rows is six."""
    model = tiny_model()
    decoder = SpecDecoder(model, max_batch=5, capture=capture)
    prompts = [[3, 4, 5] * n for n in range(1, 6)]
    for prompt, result in zip(prompts, decoder.generate(prompts, greedy(12)), strict=True):
        assert result.token_ids == base(model, prompt, 12)
    assert decoder.target.runner.cache.places == 5
    assert Shape(5, 1, 0, 0, 9).bucketed(64).rows == 6
    assert Shape(5, 1, 0, 0, 9).bucketed(64, 5).rows == 5
