"""The slot cache's buffers: how they grow, and that no place is lost on the way."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec_core.model.cache import SlotCache
from specdec_core.model.graphs import Capture, FixedSteps


def filled(places: int, slots: int) -> SlotCache:
    cache = SlotCache()
    cache.resize(*cache.grown(places, slots))
    cache.aim(0, places, slots, span=(0, slots))
    for layer in range(2):
        states = torch.randn(places, 2, slots, 4)
        cache.update(states, -states, layer)
    return cache


def test_ever_longer_rows_move_the_buffers_a_few_times_only() -> None:
    """Each move drops captured graphs; in steps of 64 there would be 94 for 6,000 slots."""
    cache = SlotCache()
    for slots in range(1, 6000):
        cache.resize(*cache.grown(1, slots))
        assert slots < cache.slots < 1.6 * slots + 128
    assert cache.moves <= 14


def test_the_first_reservation_is_no_larger_than_asked() -> None:
    cache = SlotCache()
    cache.resize(*cache.grown(3, 1000))
    assert (cache.places, cache.slots, cache.moves) == (3, 1024, 1)


def test_no_more_is_kept_ready_than_anybody_may_ask_for() -> None:
    """What lies beyond the context limit is of no use."""
    cache = SlotCache()
    cache.resize(*cache.grown(1, 900))
    cache.resize(*cache.grown(1, 1000, most=1100))
    assert cache.slots == 1152
    cache.resize(*cache.grown(1, 1150, most=1100))  # asked for all the same
    assert cache.slots == 1152


def test_growing_keeps_what_is_held() -> None:
    cache = filled(2, 5)
    before = [buffer[:, :, :5].clone() for buffer in (*cache.keys, *cache.values)]
    cache.resize(*cache.grown(3, 300))
    assert (cache.places, cache.slots) == (3, 320)
    for now, then in zip((*cache.keys, *cache.values), before, strict=True):
        assert now.shape == (3, 2, 320, 4)
        assert torch.equal(now[:2, :, :5], then)
        assert not now[2].any()


def test_a_key_that_was_not_used_for_long_is_forgotten() -> None:
    """Else a long run at many shapes would hold inputs, and graphs, for each of them for ever."""
    steps = FixedSteps(Capture.FIXED, most=3)

    def double(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
        return (x["a"] * 2,)

    for key in (1, 2, 3, 1, 4, 5):
        (out,) = steps.run(key, {"a": torch.full((2,), float(key))}, double)
        assert out.tolist() == [2 * key] * 2
    assert list(steps._steps) == [1, 4, 5]
    assert steps._steps[1].uses == 2
