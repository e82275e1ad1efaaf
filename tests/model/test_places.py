"""Where rows lie in the cache: they move down when others have left, with all that they hold."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from drafting import small
from harness import (
    View,
    admit,
    check_cache,
    check_tree,
    distance,
    outcome,
    plain,
    random_parents,
    random_path,
    random_tokens,
)
from support import base, sampled

from specdec_core import Capture, Outcome, Rows, SamplingParams, SpecDecoder
from specdec_core.engine.target import Target
from specdec_core.model.graphs import Inputs, Outputs
from specdec_core.model.runner import Runner
from specdec_core.model.shapes import Shape
from specdec_core.testing.models import tiny_model

BOTH = pytest.mark.parametrize("capture", [Capture.OFF, Capture.FIXED])


@contextmanager
def fed_rows(runner: Runner) -> Iterator[list[int]]:
    """Note how many rows each forward within computes."""
    seen: list[int] = []
    real = runner._model_forward

    def spy(x: Inputs, first: int, shape: Shape, *rest: Any, **options: Any) -> Outputs:
        seen.append(shape.rows)
        return real(x, first, shape, *rest, **options)

    runner._model_forward = spy  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        runner._model_forward = real  # type: ignore[method-assign]


def read(runner: Runner, texts: dict[int, list[int]]) -> None:
    """Feed prompts, prefixes that are known taken over, and let nothing be drafted."""
    runner.extend(View(texts))
    runner.keep(outcome({place: [] for place in texts}))


def step(runner: Runner, texts: dict[int, list[int]]) -> None:
    """Commit one more token of each row, and see that the logits after it are right."""
    for place, text in texts.items():
        text.append((7 * len(text) + place) % 97)
    logits = runner.extend(View(texts))
    runner.keep(outcome({place: [] for place in texts}))
    for row, place in zip(logits, sorted(texts), strict=True):
        assert distance(row[-1], plain(runner.model, texts[place])[-1]) < 1e-4, place


def begun(runner: Runner, rows: int, seed: int = 0) -> dict[int, list[int]]:
    rng = random.Random(seed)
    texts = {place: random_tokens(rng, rng.randrange(9, 20)) for place in range(rows)}
    admit(runner, texts)
    read(runner, texts)
    return texts


@BOTH
def test_the_last_of_eight_rows_is_fed_as_one(capture: Capture) -> None:
    runner = Runner(tiny_model(), capture=capture, max_rows=8)
    texts = begun(runner, 8)
    runner.release(range(7))
    last = {7: texts[7]}
    with fed_rows(runner) as rows:
        step(runner, last)
        step(runner, last)
    assert rows == [1, 1]
    check_cache(runner, last)


@BOTH
def test_the_rows_that_stay_are_fed_without_gaps(capture: Capture) -> None:
    runner = Runner(tiny_model(), capture=capture, max_rows=8)
    texts = begun(runner, 8)
    runner.release([0, 2, 3, 5])
    rest = {place: texts[place] for place in (1, 4, 6, 7)}
    with fed_rows(runner) as rows:
        step(runner, rest)
        step(runner, rest)
    assert rows == [4, 4]
    assert sorted(runner.places.at(list(rest))) == [0, 1, 2, 3]
    check_cache(runner, rest)


def test_nothing_is_moved_where_no_fewer_rows_would_be_fed() -> None:
    """A row alone is one row wherever it lies, and seven rows are fed as eight."""
    eager = Runner(tiny_model())
    texts = begun(eager, 3)
    eager.release([0])
    step(eager, {2: texts[2]})
    assert eager.places.at([1, 2]) == [1, 2]
    fixed = Runner(tiny_model(), capture=Capture.FIXED)
    texts = begun(fixed, 8)
    fixed.release([0])
    rest = {place: texts[place] for place in range(1, 8)}
    step(fixed, rest)
    assert fixed.places.at(list(rest)) == list(range(1, 8))


@BOTH
def test_rows_that_come_fill_the_gaps_before_anybody_moves(capture: Capture) -> None:
    runner = Runner(tiny_model(), capture=capture)
    texts = begun(runner, 4)
    runner.release([0, 1])
    new = {9: random_tokens(random.Random(9), 12), 0: random_tokens(random.Random(8), 12)}
    admit(runner, new)
    texts = {2: texts[2], 3: texts[3], **new}
    moves = runner.cache.moves
    for _ in range(2):
        step(runner, texts)
    assert runner.places.at([0, 9, 2, 3]) == [0, 1, 2, 3]
    assert runner.cache.moves == moves
    check_cache(runner, texts)


def test_captured_steps_outlive_a_move() -> None:
    """Graphs hold addresses; what lies there may be another row."""
    runner = Runner(tiny_model(), capture=Capture.FIXED)
    texts = begun(runner, 2)
    one = {1: texts[1]}
    step(runner, {0: texts[0]})  # one row, at the lowest index
    before = dict(runner.steps._steps)
    runner.release([0])
    step(runner, one)
    assert runner.places.at([1]) == [0]
    assert dict(runner.steps._steps) == before
    check_cache(runner, one)


@BOTH
@pytest.mark.parametrize("place", [0, 2])
def test_what_ended_rows_left_is_still_known_after_a_move(capture: Capture, place: int) -> None:
    runner = Runner(tiny_model(), capture=capture)
    texts = begun(runner, 4)
    runner.release([0, 2])
    rest = {1: texts[1], 3: texts[3]}
    step(runner, rest)
    assert runner.places.at([3, 1]) == [0, 1]
    assert all(map(runner.knows, texts.values()))
    again = {5: [*texts[place], 11]}
    admit(runner, again)
    for _ in runner.prefill(View(again)):
        pass
    assert runner.held(5) == len(texts[place])
    read(runner, again)
    check_cache(runner, {**rest, **again})
    step(runner, rest)


def test_what_was_left_may_be_longer_than_the_row_that_takes_its_place() -> None:
    runner = Runner(tiny_model(), capture=Capture.FIXED)
    rng = random.Random(1)
    texts = {0: random_tokens(rng, 60), 1: random_tokens(rng, 3)}
    admit(runner, texts)
    read(runner, texts)
    runner.release([0])
    step(runner, {1: texts[1]})
    assert runner.places.at([1]) == [0]
    again = {0: [*texts[0], 5]}
    admit(runner, again)
    assert runner.knows(again[0])
    read(runner, again)
    check_cache(runner, {1: texts[1], **again})


@BOTH
def test_a_row_moves_between_draft_and_verdict(capture: Capture) -> None:
    """Others may be read meanwhile; what was fed for it moves along."""
    runner = Runner(tiny_model(), capture=capture)
    texts = {place: random_tokens(random.Random(place), 9 if place < 4 else 30) for place in range(5)}
    admit(runner, texts)
    read(runner, texts)
    last, others = {4: [*texts[4], 5]}, {place: texts[place] for place in (0, 3)}
    both = torch.tensor([[[4, 6, 8, 9], [-1, -1, 1, 2]]])
    runner.extend(View(last), both[:, 0], both[:, 1])
    runner.release([1, 2])
    step(runner, others)
    assert runner.places.at([0, 3, 4]) == [0, 1, 2]
    runner.keep(outcome({4: [1, 2, 3]}))
    last[4] += [6, 8, 9]
    assert runner.held(4) == len(last[4])
    check_cache(runner, {**last, **others})


@BOTH
def test_a_borrower_follows_its_lender(capture: Capture) -> None:
    rng = random.Random(4)
    target = Target(tiny_model(layers=4), None, max_rows=6, capture=capture)
    early: Any = target.early_layers(2)
    texts = {place: random_tokens(rng, rng.randrange(2, 14)) for place in range(6)}
    for runner in (target.runner, early):
        admit(runner, texts)
    read(target.runner, texts)
    gone = [0, 1, 3]
    target.release(gone)
    early.release(gone)
    rest = {place: [*texts[place], 5] for place in (2, 4, 5)}
    tokens = torch.tensor([random_tokens(rng, 3) for _ in rest])
    parents = torch.tensor([[-1, -1, 1]] * 3)
    for n in range(2):
        with fed_rows(early) as rows:
            got = early.extend(View(rest), tokens, parents)
        assert rows == [3]
        for row, text, drafted in zip(got, rest.values(), tokens.tolist(), strict=True):
            check_tree(early.model, row, text, drafted, parents[0].tolist())
        whole = target.runner.extend(View(rest), tokens, parents)
        for row, text, drafted in zip(whole, rest.values(), tokens.tolist(), strict=True):
            check_tree(target.model, row, text, drafted, parents[0].tolist())
        done = outcome({place: [1, 2] for place in rest})
        target.runner.keep(done)
        early.keep(done)
        for i, text in enumerate(rest.values()):
            text += [*tokens[i, 1:].tolist(), n]
    check_cache(target.runner, rest)
    target.release([2, 4, 5])
    assert not early._held


def test_a_borrower_that_leaves_takes_nothing_from_its_lender() -> None:
    """A drafter that failed releases its rows, and the target goes on with them."""
    target = Target(tiny_model(layers=3), None, max_rows=2)
    early: Any = target.early_layers(1)
    texts = begun(target.runner, 2)
    admit(early, texts)
    early.release([0, 1])
    step(target.runner, texts)
    admit(early, texts)  # in the middle of their texts
    assert [early.held(place) for place in texts] == [len(text) for text in texts.values()]
    for text in texts.values():
        text.append(8)
    got = early.extend(View(texts))
    for row, text in zip(got, texts.values(), strict=True):
        assert distance(row[-1], plain(early.model, text)[-1]) < 1e-4


@BOTH
def test_a_row_is_admitted_again_in_the_middle_of_its_text(capture: Capture) -> None:
    """As a row that had to make room, or a drafter's after a failure; what was held is not fed again."""
    runner = Runner(tiny_model(), capture=capture, chunk=8)
    texts = begun(runner, 2)
    for _ in range(12):
        step(runner, texts)
    runner.release([0, 1])
    texts = {3: [*texts[1], 4, 5], 0: [*texts[0], 6]}
    admit(runner, texts)
    with fed_rows(runner) as rows:
        step(runner, texts)
    assert len(rows) == 1, "all but the last tokens were known"
    other = Runner(runner.model, capture=capture, chunk=8)  # that knows nothing of them
    admit(other, texts)
    step(other, texts)
    check_cache(runner, texts)
    check_cache(other, texts)


def test_all_but_the_last_token_of_a_prompt_is_known() -> None:
    target = Target(tiny_model(), None, max_rows=2)
    prompt = random_tokens(random.Random(1), 20)
    assert not target.knows(prompt)
    admit(target.runner, {1: prompt})
    assert not target.knows(prompt)
    read(target.runner, {1: prompt})
    assert target.knows(prompt)
    assert target.knows(prompt[:12])
    assert not target.knows([*prompt, 1, 2])
    assert not target.knows(prompt[:8]), "so short a prompt is not worth a copy"
    target.release([1])
    assert target.knows(prompt)
    target.runner.hidden_layers = (1,)
    assert not target.knows(prompt), "states of all its tokens are wanted"
    assert not Target(tiny_model(), None, max_rows=2, reuse_prefixes=False).knows(prompt)


# --- at random ---------------------------------------------------------------------------------------


class Driver:
    """Drives a runner at random, and checks every logit it gives against plain passes."""

    def __init__(self, seed: int, runner: Runner, rows: int, borrower: Runner | None = None) -> None:
        self.rng, self.runner, self.rows, self.borrower = random.Random(seed), runner, rows, borrower
        self.texts: dict[int, list[int]] = {}
        self.ends: dict[int, int] = {}  # place -> how long its text may be
        self.past: list[list[int]] = []
        self.ids = self.made = 0

    def come(self) -> None:
        free = [place for place in range(self.rows) if place not in self.texts]
        chosen = self.rng.sample(free, self.rng.randrange(min(len(free), 3) + 1))
        new = {place: self._prompt() for place in chosen}
        self.ends.update((place, len(text) + self.rng.randrange(9, 16)) for place, text in new.items())
        for runner in filter(None, (self.runner, self.borrower)):
            ids = tuple(range(self.ids, self.ids + len(new)))
            params = tuple(
                SamplingParams(max_new_tokens=self.ends[place] - len(text)) for place, text in new.items()
            )
            runner.admit(Rows(ids, tuple(new), tuple(map(tuple, new.values())), params), 6)
        self.ids += len(new)
        self.texts.update(new)

    def _prompt(self) -> list[int]:
        self.made += 1
        length = 180 if self.made % 40 == 5 else self.rng.choice([1, 4, 9, 12, 20])
        begin = self.rng.choice([[], *self.past])[: self.rng.randrange(3, 20)]
        return [*begin, *random_tokens(self.rng, length)]

    def go(self) -> None:
        gone = [
            p for p, text in self.texts.items() if len(text) + 8 > self.ends[p] or self.rng.random() < 0.3
        ]
        self.past = [*self.past, *(self.texts.pop(place) for place in gone)][-6:]
        self.runner.release(gone)
        if self.borrower is not None:
            self.borrower.release(gone)

    def round(self) -> None:
        places = self.rng.sample(sorted(self.texts), self.rng.randrange(1, len(self.texts) + 1))
        members = {place: self.texts[place] for place in sorted(places)}
        n = self.rng.randrange(7)
        drafts = {place: (random_tokens(self.rng, n), random_parents(self.rng, n)) for place in members}
        both = torch.tensor(list(drafts.values())) if n else None
        given = (None, None) if both is None else (both[:, 0], both[:, 1])
        if self.borrower is not None and self.rng.random() < 0.7:
            self._check(self.borrower.extend(View(members), *given), self.borrower, drafts)
        self._check(self.runner.extend(View(members), *given), self.runner, drafts)
        paths = {place: random_path(self.rng, drafts[place][1]) for place in members}
        said = tuple([*(drafts[p][0][node] for node in paths[p]), self.rng.randrange(97)] for p in members)
        places = tuple(members)
        done = Outcome(places, places, said, tuple(paths.values()), (None,) * len(places))
        for runner in filter(None, (self.borrower, self.runner)):
            runner.keep(done)
        for place, tokens in zip(members, said, strict=True):
            self.texts[place] += tokens
            assert self.runner.held(place) == len(self.texts[place]) - 1

    def _check(self, got: Any, runner: Runner, drafts: dict[int, tuple[list[int], list[int]]]) -> None:
        for row, (place, draft) in zip(got, drafts.items(), strict=True):
            check_tree(runner.model, row, self.texts[place], *draft)


@BOTH
@pytest.mark.parametrize("seed", range(4))
def test_rows_that_come_and_go_at_random(seed: int, capture: Capture) -> None:
    """Prompts of 1 to 200 tokens, some of which begin as earlier ones; trees, and rows that miss rounds."""
    runner = Runner(tiny_model(), capture=capture, chunk=64, max_rows=6)
    driver = Driver(seed, runner, 6)
    sizes, moved = [], 0
    for _ in range(60):
        driver.come()
        before = runner.places.at(list(driver.texts))
        if driver.texts:
            driver.round()
        moved += before != runner.places.at(list(driver.texts))
        sizes.append(runner.cache.slots)
        driver.go()
    check_cache(runner, driver.texts)
    assert moved > 3
    assert sum(b < a for a, b in itertools.pairwise(sizes)) > 0


@BOTH
@pytest.mark.parametrize("seed", range(2))
def test_a_borrowers_rows_that_come_and_go_at_random(seed: int, capture: Capture) -> None:
    target = Target(tiny_model(layers=3), None, max_rows=5, capture=capture)
    early: Any = target.early_layers(2)
    driver = Driver(seed, target.runner, 5, early)
    for _ in range(25):
        driver.come()
        if driver.texts:
            driver.round()
        driver.go()
    check_cache(target.runner, driver.texts)


@BOTH
@pytest.mark.parametrize("drafter", ["prompt_lookup", "small", "early_exit:layer=1"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_plain_decoding(temperature: float, drafter: str, capture: Capture) -> None:
    """Rows of many lengths through few places, a long one among them, call after call."""
    rng, model = random.Random(5), tiny_model(layers=3)
    made: Any = small(tiny_model(layers=1), num_tokens=3) if drafter == "small" else drafter
    decoder = SpecDecoder(
        model, drafter=made, verifier="match", max_batch=4, capture=capture, strict=True, prefill_chunk=32
    )
    runner, sizes = decoder.target.runner, set()
    for call in range(12):
        prompts = [random_tokens(rng, rng.choice([2, 9, 20])) for _ in range(rng.randrange(1, 9))]
        prompts += [prompts[0] + random_tokens(rng, 4)]
        lengths = [rng.choice([1, 3, 8, 20]) for _ in prompts]
        if call == 1:
            prompts[0], lengths[0] = random_tokens(rng, 190), 20
        params = [
            SamplingParams(max_new_tokens=n, temperature=temperature, seed=i) for i, n in enumerate(lengths)
        ]
        for prompt, each, result in zip(prompts, params, decoder.generate(prompts, params), strict=True):
            n = each.max_new_tokens
            said = sampled(model, prompt, each) if temperature else base(model, prompt, n)
            assert result.token_ids == said
        sizes.add(runner.cache.slots)
    assert max(sizes) >= 256
    assert runner.cache.slots <= 128
