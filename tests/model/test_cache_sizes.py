"""How large caches are: they follow what rows of late needed, keep to a limit, and tell their bytes."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from typing import Any

import pytest
from harness import View, admit, check_cache, outcome, random_tokens

from specdec_core import Capture
from specdec_core.engine.target import Target
from specdec_core.model.allowance import Allowance
from specdec_core.model.places import _REMEMBERED
from specdec_core.model.runner import Runner
from specdec_core.testing.models import tiny_model

SHORT, LONG = 20, 200  # tokens of a prompt
BOTH = pytest.mark.parametrize("capture", [Capture.OFF, Capture.FIXED])


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_tokens(random.Random(seed), length)


def serve(runner: Runner, texts: dict[int, list[int]], **room: int) -> None:
    """Admit rows, read their prompts, and let them leave."""
    admit(runner, texts, **room)
    runner.extend(View(texts))
    runner.keep(outcome({place: [] for place in texts}))
    runner.release(list(texts))


def allocated(runner: Runner) -> int:
    return sum(buffer.nbytes for buffer in (*runner.cache.keys, *runner.cache.values))


# --- shrinking -----------------------------------------------------------------------------------------


def test_what_one_long_row_widened_shrinks_again() -> None:
    """Small rows would hold on to its slots for good."""
    runner = Runner(tiny_model())
    serve(runner, {0: prompt(SHORT)})
    before = allocated(runner)
    serve(runner, {0: prompt(LONG)})
    assert allocated(runner) == 4 * before
    for i in range(_REMEMBERED):
        assert allocated(runner) == 4 * before, "a second long one may come"
        serve(runner, {0: prompt(SHORT, i)})
    assert allocated(runner) == before == runner.places.bytes_now


@BOTH
def test_places_that_many_rows_took_are_given_back(capture: Capture) -> None:
    runner = Runner(tiny_model(), capture=capture)
    serve(runner, {place: prompt(SHORT, place) for place in range(8)})
    assert runner.cache.places == 8
    for i in range(_REMEMBERED):
        serve(runner, {7: prompt(SHORT, i)})
    assert runner.cache.places == 1


def test_sizes_that_take_turns_do_not_move_the_buffers() -> None:
    runner = Runner(tiny_model())
    for i in range(2 * _REMEMBERED):
        moves = runner.cache.moves
        serve(runner, {place: prompt(LONG if i % 9 == 0 else SHORT, i) for place in range(1 + i % 4)})
        assert runner.cache.moves == moves or i < 10
    assert runner.cache.moves <= 4


def test_buffers_up_to_twice_too_large_stay() -> None:
    runner = Runner(tiny_model())
    serve(runner, {0: prompt(90)})  # 128 slots
    for i in range(3 * _REMEMBERED):
        serve(runner, {0: prompt(SHORT, i)})  # 64
    assert (runner.cache.slots, runner.cache.moves) == (128, 1)


def test_a_long_row_that_is_there_keeps_its_slots() -> None:
    """However many short ones come and go beside it; once it has left, theirs count."""
    runner = Runner(tiny_model())
    texts = {0: prompt(LONG)}
    admit(runner, texts)
    runner.extend(View(texts))
    runner.keep(outcome({0: []}))
    for i in range(2 * _REMEMBERED):
        serve(runner, {1: prompt(SHORT, i)})
        texts[0].append(i)
        runner.extend(View(texts))
        runner.keep(outcome({0: []}))
        assert runner.cache.slots == 256
    check_cache(runner, texts)
    runner.release([0])
    assert runner.cache.slots == 64


def test_rows_that_stay_move_together_when_places_are_given_back() -> None:
    runner = Runner(tiny_model())
    texts = {place: prompt(SHORT, place) for place in range(8)}
    admit(runner, texts)
    runner.extend(View(texts))
    runner.keep(outcome({place: [] for place in texts}))
    runner.release(range(6))
    for i in range(_REMEMBERED):
        serve(runner, {i % 6: prompt(SHORT, i)})
    assert runner.cache.places == 3
    rest = {6: texts[6], 7: texts[7]}
    check_cache(runner, rest)
    for text in rest.values():
        text.append(5)
    runner.extend(View(rest))
    check_cache(runner, rest)


def test_what_was_cut_off_is_no_longer_known() -> None:
    """Else a row would take over slots that are not there."""
    runner = Runner(tiny_model())
    long = prompt(LONG, 99)
    serve(runner, {1: prompt(30, 98), 0: long})
    for i in range(_REMEMBERED):
        assert runner.knows(long) or i > 0
        serve(runner, {0: [*long[:30], *prompt(6, i)]})
        admit(runner, {0: long[:30], 1: prompt(30, 98)})
        runner.release([0, 1])
    for text in (long, prompt(30, 98)):
        texts = {0: text}
        admit(runner, texts)
        for _ in runner.prefill(View(texts)):
            pass
        assert runner.held(0) <= runner.cache.slots - 1
        runner.extend(View(texts))
        runner.keep(outcome({0: []}))
        check_cache(runner, texts)
        runner.release([0])


def test_the_last_slot_is_not_taken_over() -> None:
    """It takes what padding writes, wherever the end is now."""
    runner = Runner(tiny_model())
    long = prompt(LONG)
    serve(runner, {0: long})
    for i in range(_REMEMBERED):  # at another index, so that the long one's slots stay as they are
        admit(runner, {0: prompt(SHORT, i), 1: prompt(SHORT, i)})
        runner.release([0, 1])
    assert runner.cache.slots == 64
    assert runner.knows(long[:64])
    assert not runner.knows(long[:65])


def test_steps_are_dropped_when_the_cache_shrinks() -> None:
    runner = Runner(tiny_model(), capture=Capture.FIXED)
    serve(runner, {0: prompt(LONG)})
    for i in range(_REMEMBERED - 1):
        serve(runner, {0: prompt(6, i)})
    before = dict(runner.steps._steps)
    assert before
    serve(runner, {0: prompt(6)})
    assert runner.cache.slots == 64
    assert not set(map(id, before.values())) & set(map(id, runner.steps._steps.values()))


def test_nothing_grows_with_the_rows_that_were_served() -> None:
    target = Target(tiny_model(layers=3), None, max_rows=3, capture=Capture.FIXED)
    early: Any = target.early_layers(1)

    def kept() -> dict[str, int]:
        runner, places = target.runner, target.runner.places
        parts = {"own": runner, "early": early, "places": places, "prefixes": places.prefixes}
        return {
            f"{part}.{name}": len(value)
            for part, owner in {**parts, "steps": runner.steps}.items()
            for name, value in vars(owner).items()
            if hasattr(value, "__len__")
        }

    sizes = []
    for i in range(3 * _REMEMBERED):
        texts = {place: prompt(9 + i % 5, i) for place in range(1 + i % 3)}
        for runner in (target.runner, early):
            admit(runner, texts)
        for runner in (early, target.runner):
            runner.extend(View(texts))
            runner.keep(outcome({place: [] for place in texts}))
        target.release(list(texts))
        early.release(list(texts))
        sizes.append(kept())
    assert sizes[-1] == sizes[-1 - 15]
    for part, name in itertools.product(("own", "early"), ("_held", "_nodes", "_fresh")):
        assert sizes[-1][f"{part}.{name}"] == 0


# --- bytes ---------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("rows", [1, 5, 7])
def test_bytes_are_known_before_anything_is_fed(rows: int, capture: Capture) -> None:
    target = Target(tiny_model(layers=3), None, max_rows=7, capture=capture)
    runner = target.runner
    assert (target.bytes_now, allocated(runner)) == (0, 0)
    slots = runner.slots_for(SHORT, 24, 8)
    assert slots == SHORT + 24 + 8
    told = runner.bytes_for(rows, slots)
    texts = {place: prompt(SHORT, place) for place in range(rows)}
    admit(runner, texts)
    assert target.bytes_now == told
    runner.extend(View(texts))
    assert allocated(runner) == told == target.bytes_now > 0


def test_a_row_takes_no_more_slots_than_there_are_positions() -> None:
    runner = Runner(tiny_model(context=64))
    assert runner.slots_for(40, 500, 7) == 64 + 7
    assert runner.bytes_for(1, 71) == 0, "nobody has looked at this model's slots"


@BOTH
def test_bytes_of_all_caches_are_summed(capture: Capture) -> None:
    target = Target(tiny_model(layers=3), None, max_rows=4, capture=capture)
    needs, own = [(SHORT, 24), (LONG, 24), (SHORT, 4)], target.runner.bytes_for(3, LONG + 24 + 8)
    assert target.bytes_after(needs, 8) == own
    early = target.early_layers(1)
    assert target.bytes_after(needs, 8) == own
    draft: Any = target.cached(tiny_model(layers=1, context=128))
    both = own + draft.bytes_for(3, 128 + 8)
    assert target.bytes_after(needs, 8) == both
    assert target.bytes_after([], 8) == 0
    texts = {place: prompt(count, place) for place, (count, _) in enumerate(needs)}
    admit(target.runner, texts)
    for model in (early, draft):
        admit(model, texts)  # type: ignore[arg-type]
    assert target.bytes_now == both


@pytest.mark.parametrize("seed", range(3))
@BOTH
def test_caches_keep_to_a_limit_that_their_rows_fit(seed: int, capture: Capture) -> None:
    """What was kept ready is given up, also by a cache that admits nobody, and what rows hold stays right."""
    rng = random.Random(seed)
    target = Target(tiny_model(), None, max_rows=4, capture=capture)
    draft: Any = target.cached(tiny_model(layers=1))
    target.most_bytes = target.bytes_after([(100, 20)] * 4, 8)
    texts: dict[int, list[int]] = {}
    waited = tight = 0
    for i in range(60):
        new = {p: prompt(rng.choice([5, 20, 90, 190]), 100 * i + p) for p in range(4) if p not in texts}
        for place, text in new.items():
            after = target.bytes_after([(len(known), 20) for known in (*texts.values(), text)], 8)
            if after > target.most_bytes:
                waited += 1
                continue
            texts[place] = text
            for runner in (target.runner, draft):
                admit(runner, {place: text}, new=20)
            assert target.bytes_now <= target.most_bytes
            tight += target.bytes_now == after
        for runner in (target.runner, draft):
            runner.extend(View(texts))
            runner.keep(outcome({place: [] for place in texts}))
            check_cache(runner, texts)
        gone = rng.sample(sorted(texts), rng.randrange(1, len(texts) + 1))
        for runner in (target.runner, draft):
            runner.release(gone)
        texts = {place: [*text, i] for place, text in texts.items() if place not in gone}
        assert target.bytes_now <= target.most_bytes
    assert waited > 5
    assert tight > 5


def test_a_cache_that_admits_nobody_gives_up_what_is_spare() -> None:
    """What another one's row needs is more than what ended rows have left."""
    target = Target(tiny_model(), None, max_rows=2)
    draft: Any = target.cached(tiny_model(layers=1))
    serve(target.runner, {0: prompt(LONG), 1: prompt(LONG)})
    held = {0: prompt(SHORT)}
    admit(target.runner, held)
    target.runner.extend(View(held))
    target.runner.keep(outcome({0: []}))
    short, long = (target.runner.slots_for(length, 24, 8) for length in (SHORT, LONG))
    need = target.runner.bytes_for(1, short) + draft.bytes_for(2, long)
    assert target.bytes_now == target.runner.bytes_for(2, long) > target.runner.bytes_for(1, short)
    target.most_bytes = need
    admit(draft, {0: prompt(LONG), 1: prompt(LONG, 1)})
    assert target.bytes_now == need
    check_cache(target.runner, held)


def test_without_a_limit_nobody_is_told_to_give_up_anything() -> None:
    allowance = Allowance()
    assert not allowance.lacks(1 << 60)
    allowance.most = 10
    assert allowance.lacks(11)
    assert not allowance.lacks(10)


def test_buffers_go_with_their_runner() -> None:
    """They may be most of a GPU: they do not wait until somebody looks for cycles."""
    allowance = Allowance()
    runner = Runner(tiny_model(), allowance=allowance)
    serve(runner, {0: prompt(SHORT)})
    buffers = [weakref.ref(buffer) for buffer in (*runner.cache.keys, *runner.cache.values)]
    assert allowance.bytes_now == allocated(runner) > 0
    gc.disable()
    try:
        del runner
        assert not any(buffer() is not None for buffer in buffers)
        assert allowance.bytes_now == 0
    finally:
        gc.enable()
