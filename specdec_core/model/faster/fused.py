"""Projections of one input, multiplied at once: q, k and v; gate and up.

No model code is changed. Each projection stays a module of its own; the first one that is called multiplies
by all weights, one below the other, and the others give what it kept for them, if they are called with the
very same tensor.
"""

from __future__ import annotations

import threading
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


class _Kept:
    """A product that was made for all projections, until each has taken its part."""

    def __init__(self, x: Tensor, version: int, output: Tensor) -> None:
        self.input, self.version, self.output = x, version, output
        self.taken: set[int] = set()

    def is_for(self, x: Tensor, version: int, start: int) -> bool:
        return x is self.input and version == self.version and start not in self.taken


class _Group:
    """Remembers, for each thread that runs the model, a product until each projection has taken its part."""

    def __init__(self, product: Product, parts: int) -> None:
        self.product, self._parts = product, parts
        self._kept: dict[int, _Kept] = {}  # by thread

    def take(self, x: Tensor, rows: slice) -> Tensor:
        # Somebody may have written into it meanwhile; what traces for compiling knows of neither.
        compiling = torch.compiler.is_compiling()
        version = 0 if compiling or x.is_inference() else x._version
        thread = 0 if compiling else threading.get_ident()
        kept = self._kept.get(thread)
        if kept is None or not kept.is_for(x, version, rows.start):
            kept = self._kept[thread] = _Kept(x, version, self.product(x))
        kept.taken.add(rows.start)
        if len(kept.taken) == self._parts:
            del self._kept[thread]
        return kept.output[..., rows]

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is kept for the forward under way."""
        return vars(self) | {"_kept": {}}


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
