"""Packed weights: the same product, the same weight, and a reason where it cannot be."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from specdec_core.model.faster import packed as module
from specdec_core.model.faster.packed import packed, why_not_packed

needs_packing = pytest.mark.skipif(bool(why_not_packed("cpu", torch.float32)), reason="oneDNN is not here")


def linear(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(40, 24, bias=bias, dtype=dtype)


def inputs(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.fixture
def fresh() -> Iterator[None]:
    """Let oneDNN be tried anew, in this test and after it."""
    why_not_packed.cache_clear()
    yield
    why_not_packed.cache_clear()


@needs_packing
@pytest.mark.parametrize("shape", [(1, 1, 40), (3, 40), (2, 5, 40)])
def test_the_operator_for_compiling_keeps_its_word(shape: tuple[int, ...]) -> None:
    layer = packed(linear(), keep=False)
    product, x = layer.product, inputs(*shape)
    assert isinstance(product, module.PackedProduct)
    operator, number = torch.ops.specdec.packed_linear.default, product._number
    torch.library.opcheck(operator, (x, number, 24), test_utils=("test_schema", "test_faketensor"))
    assert torch.equal(operator(x, number, 24), layer(x))
    assert torch.equal(module._traced(x, number, 24), layer(x))
    assert int(number) in module._PRODUCTS
    del layer, product
    assert int(number) not in module._PRODUCTS


@needs_packing
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(40,), (0, 40), (1, 1, 40), (2, 5, 40), (300, 40)])
def test_multiplies_as_the_layer_does(shape: tuple[int, ...], bias: bool) -> None:
    layer, x = linear(bias), inputs(*shape)
    with torch.no_grad():
        torch.testing.assert_close(packed(layer, keep=False)(x), layer(x), rtol=1e-5, atol=1e-5)


@needs_packing
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_few_rows_are_multiplied_as_four(rows: int) -> None:
    """By one kernel, so that a token alone has the very logits that it has in a small block."""
    layer, x = packed(linear(), keep=False), inputs(4, 40)
    seen: list[int] = []
    multiplied = module._multiplied

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(x.shape[0])
        return multiplied(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(module, "_multiplied", watched)
        assert torch.equal(layer(x[:rows]), layer(x)[:rows])
    assert seen == [4, 4]


@needs_packing
def test_inputs_may_lie_anyhow_in_memory() -> None:
    layer, x = linear(), inputs(3, 40, 7).transpose(1, 2)
    with torch.no_grad():
        torch.testing.assert_close(packed(layer, keep=False)(x), layer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(bool(why_not_packed("cpu", torch.bfloat16)), reason="no packed product for bfloat16")
def test_half_precision() -> None:
    layer, x = linear(dtype=torch.bfloat16), inputs(5, 40, dtype=torch.bfloat16)
    with torch.no_grad():
        torch.testing.assert_close(packed(layer, keep=False)(x), layer(x), rtol=0.02, atol=0.02)


@needs_packing
@pytest.mark.parametrize("keep", [True, False])
def test_weight_bias_and_state_are_as_they_were(keep: bool) -> None:
    layer = linear()
    made = packed(layer, keep=keep)
    assert (made.in_features, made.out_features) == (40, 24)
    assert (made.weight is layer.weight) == keep
    assert torch.equal(made.weight, layer.weight)
    assert made.bias is layer.bias
    state, wanted = made.state_dict(), layer.state_dict()
    assert list(state) == list(wanted)
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


@needs_packing
def test_gradients_flow_through_it() -> None:
    layer, x = linear(), inputs(3, 40).requires_grad_()
    [wanted] = torch.autograd.grad(layer(x).square().sum(), x)
    [got] = torch.autograd.grad(packed(layer, keep=False)(x).square().sum(), x)
    torch.testing.assert_close(got, wanted)


def test_reasons(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    assert "on cuda" in why_not_packed("cuda", torch.float32)
    assert "float64" in why_not_packed("cpu", torch.float64)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert "without oneDNN" in why_not_packed("cpu", torch.float32)


@needs_packing
def test_a_kernel_that_is_not_there_or_wrong_is_found_out(
    monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    right = module._product
    monkeypatch.setattr(module, "_product", lambda x, w, b: right(x, w, b) * (1 + 1e-4))
    assert "off by" in why_not_packed("cpu", torch.float32)
    why_not_packed.cache_clear()
    monkeypatch.setattr(module, "_product", lambda x, w, b: right(x, w, b) * float("nan"))
    assert "off by" in why_not_packed("cpu", torch.float32)
    why_not_packed.cache_clear()

    def missing(weight: Tensor) -> Tensor:
        raise NotImplementedError("no such kernel\nand much more")

    monkeypatch.setattr(module, "_pack", missing)
    reason = why_not_packed("cpu", torch.float32)
    assert reason.endswith("no such kernel")


@needs_packing
@pytest.mark.parametrize("keep", [False, True])
def test_it_can_be_copied_and_pickled(keep: bool) -> None:
    layer, x = packed(linear(), keep=keep), inputs(3, 40)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(other(x), layer(x))
        torch.testing.assert_close(other.weight, linear().weight)
        assert other.product is not layer.product
