"""Linear layers whose weights lie in the order in which oneDNN reads them: faster on the CPU.

The kernels that PyTorch takes by default read a weight anew, and slowly, for every few rows of a block; with
a packed one a block of four or eight tokens costs little more than one.

`torch.compile` cannot look into a packed weight. What is traced calls an operator of ours instead, which
finds the product by its number; the number is a tensor, so that graphs do not depend on it.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

_ROWS_HINT = 8  # rows that the layout is made for; between 2 and 32 it made no difference
_LEAST_ROWS = 4  # oneDNN multiplies four rows in less time than one, two or three
_PROBED = (1, 4, 33)  # rows
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TIMES, _FLOOR = 3, 1e-6  # how far off a packed product may be: this often what `F.linear` is, and a little


class Product(Protocol):
    """x W^T + b, wherever W is: [..., in] -> [..., out]."""

    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""

    def weight(self) -> Tensor:
        """Give W, [out, in]."""


class DenseProduct:
    """W as PyTorch keeps it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        return nn.functional.linear(x, self._weight, self.bias)

    def weight(self) -> Tensor:
        """Give W, [out, in]."""
        return self._weight


class PackedProduct:
    """W packed by oneDNN.

    Args:
        kept: W itself, where somebody else holds it anyway; else it is unpacked when it is asked for.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, kept: Tensor | None = None) -> None:
        self._kept, self.bias = kept, bias
        self._hold(weight.detach())

    def _hold(self, weight: Tensor) -> None:
        _define()
        self._packed, self._width = _pack(weight), weight.shape[0]
        number = next(_NUMBERS)
        self._number = torch.tensor(number, device="cpu")
        _PRODUCTS[number] = self

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply."""
        if x.requires_grad and torch.is_grad_enabled():  # the packed kernel has no backward pass
            return nn.functional.linear(x, self.weight(), self.bias)
        if torch.compiler.is_compiling():
            return _traced(x, self._number, self._width)
        return self.multiply(x)

    def multiply(self, x: Tensor) -> Tensor:
        """Multiply, whatever calls: no gradient flows."""
        return _product(x, self._packed, self.bias)

    def weight(self) -> Tensor:
        """Give W, [out, in]."""
        return self._packed.to_dense() if self._kept is None else self._kept

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the packed tensor, which can be neither copied nor pickled."""
        return {"weight": self.weight(), "kept": self._kept is not None, "bias": self.bias}

    def __setstate__(self, state: dict[str, Any]) -> None:
        weight = state["weight"]
        self._kept, self.bias = weight if state["kept"] else None, state["bias"]
        self._hold(weight.detach())


_NUMBERS = itertools.count()
_PRODUCTS: WeakValueDictionary[int, PackedProduct] = WeakValueDictionary()  # by their numbers


class Projection(nn.Module):
    """Stands where an `nn.Linear` stood, with the same sizes, weight and bias: rows of a product."""

    def __init__(self, product: Product, rows: slice, in_features: int) -> None:
        super().__init__()
        self.product, self.rows = product, rows
        self.in_features, self.out_features = in_features, rows.stop - rows.start
        self.training = False

    @property
    def weight(self) -> Tensor:
        """[out, in]; unpacked at every call, where it is packed."""
        weight = self.product.weight()
        return weight if self.out_features == weight.shape[0] else weight[self.rows]

    @property
    def bias(self) -> Tensor | None:
        """[out]."""
        bias = self.product.bias
        return bias if bias is None or self.out_features == bias.shape[0] else bias[self.rows]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name in ("weight", "bias"):
            if (value := getattr(self, name)) is not None:
                destination[prefix + name] = value if keep_vars else value.detach()


class PackedLinear(Projection):
    """A packed `nn.Linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply: [..., in] -> [..., out]."""
        return self.product(x)


def packed(linear: nn.Linear, *, keep: bool) -> PackedLinear:
    """Pack a layer; keep: its weight has another owner, so that dropping it would free nothing."""
    product = PackedProduct(linear.weight, linear.bias, linear.weight if keep else None)
    return PackedLinear(product, slice(0, linear.out_features), linear.in_features)


@functools.cache
def why_not_packed(device: str, dtype: torch.dtype) -> str:
    """Say why weights of this kind cannot be packed here; empty if they can.

    oneDNN is tried on a small layer, once: what this machine and this PyTorch can do is not told otherwise.
    """
    name = str(dtype).removeprefix("torch.")
    if device != "cpu":
        return f"weights are packed on the CPU only, and these are on {device}"
    if dtype not in _DTYPES:
        return f"there is no packed product for {name}"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return "this PyTorch was built without oneDNN"
    try:
        error, usual = _errors(dtype)
    except (RuntimeError, AttributeError, NotImplementedError) as problem:
        return f"oneDNN cannot do it here in {name}: {str(problem).splitlines()[0]}"
    if error <= _TIMES * usual + _FLOOR:
        return ""
    return f"packed products are off by {error:.2g} in {name} here, others by {usual:.2g}"


@torch.no_grad()
def _errors(dtype: torch.dtype) -> tuple[float, float]:
    """How far packed and other products are off exact ones at most, relative to their spread."""
    weight, bias = _wave(48, 64).to(dtype), _wave(1, 48)[0].to(dtype)
    product = PackedProduct(weight, bias)
    if not torch.equal(product.weight(), weight):
        return float("inf"), 0.0
    errors = []
    for rows in _PROBED:
        x = _wave(rows, 64).to(dtype)
        exact = nn.functional.linear(x.double(), weight.double(), bias.double())
        for y in (product(x[None])[0], nn.functional.linear(x, weight, bias)):
            off = (y.double() - exact).abs().max() / exact.std()
            errors.append(float(off.nan_to_num(nan=float("inf"))))
    return max(errors[::2]), max(errors[1::2])


def _wave(rows: int, columns: int) -> Tensor:
    """Numbers without a pattern that a wrong order of reading would leave in place."""
    return torch.sin(torch.arange(rows * columns, dtype=torch.float64) ** 1.5).reshape(rows, columns)


def _pack(weight: Tensor) -> Tensor:
    done: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
    return done


@functools.cache
def _define() -> object:
    """Make the operator known; it is, while the result lives."""
    made: Any = torch.library.Library  # not typed
    library = made("specdec", "FRAGMENT")
    library.define("packed_linear(Tensor x, Tensor number, int width) -> Tensor")
    library.impl("packed_linear", _found, "CPU")
    torch.library.register_fake("specdec::packed_linear", _shaped, lib=library)
    return library


def _found(x: Tensor, number: Tensor, width: int) -> Tensor:
    return _PRODUCTS[int(number)].multiply(x)


def _shaped(x: Tensor, number: Tensor, width: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))


def _traced(x: Tensor, number: Tensor, width: int) -> Tensor:
    """Call the operator; a single row is filled up here, where that becomes a part of what made the row."""
    if x.numel() != x.shape[-1]:
        done: Tensor = torch.ops.specdec.packed_linear(x, number, width)
        return done
    filled = nn.functional.pad(x.reshape(1, x.shape[-1]), (0, 0, 0, _LEAST_ROWS - 1))
    done = torch.ops.specdec.packed_linear(filled, number, width)
    return done[:1].view(*x.shape[:-1], width)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.numel() // x.shape[-1]
    if rows >= _LEAST_ROWS:
        return _multiplied(x, weight, bias)
    filled = nn.functional.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, _LEAST_ROWS - rows))
    done = _multiplied(filled, weight, bias)
    return done[:rows].view(*x.shape[:-1], done.shape[-1])


def _multiplied(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    done: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return done
