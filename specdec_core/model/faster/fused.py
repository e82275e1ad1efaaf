"""Projections of one input, multiplied at once: q, k and v; gate and up.

No model code is changed. Each projection stays a module of its own; the first one that is called multiplies
by all weights, one below the other, and the others give what it kept for them, if they are called with the
very same tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specdec_core.model.faster.packed import DenseProduct, PackedProduct, Product, Projection

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # names that siblings have


class FusedLinear(Projection):
    """One of several projections that share an input."""

    def __init__(self, group: _Group, rows: slice, in_features: int) -> None:
        super().__init__(group.product, rows, in_features)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """Multiply, or take what a sibling has multiplied: [..., in] -> [..., out]."""
        return self._group.take(x, self.rows)


class _Group:
    """Remembers a product until each projection has taken its part."""

    def __init__(self, product: Product, parts: int) -> None:
        self.product, self._parts = product, parts
        self._input: Tensor | None = None
        self._version = 0
        self._output: Tensor | None = None
        self._taken: set[int] = set()

    def take(self, x: Tensor, rows: slice) -> Tensor:
        # Somebody may have written into it meanwhile; what traces for compiling cannot know.
        version = 0 if torch.compiler.is_compiling() or x.is_inference() else x._version
        if x is not self._input or version != self._version or rows.start in self._taken:
            self._input, self._version, self._output = x, version, self.product(x)
            self._taken.clear()
        assert self._output is not None
        part = self._output[..., rows]
        self._taken.add(rows.start)
        if len(self._taken) == self._parts:
            self._input = self._output = None
        return part


def groups_of(
    parent: nn.Module, names: Sequence[str], is_plain: Callable[[nn.Module], bool]
) -> list[tuple[str, ...]]:
    """Find children, among those of these names, that stand for projections of one input."""
    found: list[tuple[str, ...]] = []
    for group in GROUPS:
        children: list[Any] = [parent._modules[name] for name in group if name in names]
        if len(children) == len(group) and all(child is not None and is_plain(child) for child in children):
            kinds = {(c.in_features, c.weight.dtype, c.weight.device, c.bias is None) for c in children}
            found += [group] if len(kinds) == 1 else []
    return found


@torch.no_grad()
def fused(linears: Sequence[nn.Linear], *, pack: bool) -> list[FusedLinear]:
    """Make modules to stand where these linear layers stood; their weights are copied."""
    weights: list[Tensor] = [linear.weight for linear in linears]
    biases: list[Any] = [linear.bias for linear in linears]  # all of them, or none
    weight = torch.cat(weights)
    bias = None if biases[0] is None else torch.cat(biases)
    product: Product = PackedProduct(weight, bias) if pack else DenseProduct(weight, bias)
    group, start, made = _Group(product, len(linears)), 0, []
    for linear in linears:
        rows = slice(start, start + linear.out_features)
        made.append(FusedLinear(group, rows, linear.in_features))
        start = rows.stop
    return made
