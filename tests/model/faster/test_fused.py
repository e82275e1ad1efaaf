"""Fused projections: multiplied once, whatever the order, and never stale."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from specdec_core.model.faster.fused import FusedLinear, fused
from specdec_core.model.faster.packed import why_not_packed

PACKS = [
    False,
    pytest.param(
        True, marks=pytest.mark.skipif(bool(why_not_packed("cpu", torch.float32)), reason="no oneDNN")
    ),
]


def layers(bias: bool = True) -> list[nn.Linear]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [nn.Linear(40, width, bias=bias).requires_grad_(False) for width in (24, 8, 16)]


def inputs(seed: int = 1) -> Tensor:
    return torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(seed))


class Counted:
    """A product that counts how often it multiplies."""

    def __init__(self, parts: list[FusedLinear]) -> None:
        self.calls, group = 0, parts[0]._group
        self._product = group.product
        group.product = self

    @property
    def bias(self) -> Tensor | None:
        return self._product.bias

    def weight(self) -> Tensor:
        return self._product.weight()

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self._product(x)


def check(part: nn.Module, layer: nn.Linear, x: Tensor) -> None:
    torch.testing.assert_close(part(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_one_product_for_all_in_any_order(order: tuple[int, ...], pack: bool) -> None:
    linears = layers()
    parts = fused(linears, pack=pack)
    counted, x = Counted(parts), inputs()
    for times in (1, 2):  # the same tensor comes again in the next forward
        for i in order:
            check(parts[i], linears[i], x)
        assert counted.calls == times
    assert not parts[0]._group._kept, "it must not keep what is done with"


@pytest.mark.parametrize("pack", PACKS)
@pytest.mark.parametrize("bias", [True, False])
def test_weights_and_biases_are_as_they_were(bias: bool, pack: bool) -> None:
    linears = layers(bias)
    for part, layer in zip(fused(linears, pack=pack), linears, strict=True):
        assert (part.in_features, part.out_features) == (40, layer.out_features)
        state, wanted = part.state_dict(), layer.state_dict()
        assert list(state) == list(wanted)
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)


def test_another_tensor_is_multiplied_anew() -> None:
    linears = layers()
    parts = fused(linears, pack=False)
    check(parts[0], linears[0], inputs(1))
    check(parts[1], linears[1], inputs(2))
    check(parts[2], linears[2], inputs(1))


def test_a_tensor_that_was_written_to_is_multiplied_anew() -> None:
    linears = layers()
    parts, x = fused(linears, pack=False), inputs()
    check(parts[0], linears[0], x)
    x.mul_(2)
    check(parts[1], linears[1], x)
    check(parts[2], linears[2], x)


def test_one_that_is_called_twice_is_multiplied_anew() -> None:
    linears = layers()
    parts, x = fused(linears, pack=False), inputs()
    first = parts[0](x)
    parts[0](x).zero_()
    torch.testing.assert_close(first, linears[0](x))
    check(parts[1], linears[1], x)


def test_inference_mode() -> None:
    linears = layers()
    parts = fused(linears, pack=False)
    with torch.inference_mode():
        x = inputs()
        for part, layer in zip(parts, linears, strict=True):
            check(part, layer, x)


def test_threads_keep_what_they_multiplied_apart() -> None:
    """They may run one model at once, their calls in any order."""
    linears = layers()
    parts = fused(linears, pack=False)
    counted = Counted(parts)
    given = inputs(1), inputs(2)
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        for part, layer in zip(parts, linears, strict=True):
            for thread, x in zip((one, other), given, strict=True):
                thread.submit(check, part, layer, x).result()
    assert counted.calls == 2
    assert not parts[0]._group._kept
