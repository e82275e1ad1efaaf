"""What one forward feeds: pending tokens and nodes of some rows, and the tensors that they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_core.contract.draft import HOLE, on_device
from specdec_core.contract.tree import Tree
from specdec_core.model.graphs import Inputs
from specdec_core.model.ragged import Ragged
from specdec_core.model.shapes import Shape

_LEAST_PADDING = 3  # columns that cost as much as telling rows apart


@dataclass(frozen=True, eq=False)
class Block:
    """What one forward feeds, one entry a member row."""

    places: tuple[int, ...]
    pending: list[list[int]]
    ends: list[int]  # slots held once the pending tokens are fed
    tokens: Tensor | None = None  # int64 [B, m]
    parents: Tensor | None = None  # int64 [B, fed + m]; None: chains
    fed: int = 0
    counts: Sequence[int] | None = None  # most nodes of each row that are fed here, if known
    tree: Tree | None = None  # of the parents, where it is made already

    @property
    def nodes(self) -> int:
        return 0 if self.tokens is None else self.tokens.shape[1]

    @property
    def chained(self) -> int:
        """Nodes fed before that a chain goes on behind."""
        return self.fed if self.parents is None else 0

    @property
    def widths(self) -> list[int]:
        """Columns of each row that hold a token, as far as is known."""
        counts = [self.nodes] * len(self.places) if self.counts is None else self.counts
        return [len(tokens) + count for tokens, count in zip(self.pending, counts, strict=True)]

    def span(self) -> tuple[int, int] | None:
        """The range of slots that a single row without a tree fills, so that a copy can write it."""
        if len(self.places) > 1 or self.parents is not None:
            return None
        end = self.ends[0] + self.fed
        return end - len(self.pending[0]), end + self.nodes

    def without_padding(self, at: Sequence[int], shape: Shape, device: torch.device) -> Ragged | None:
        """Leave out the padding, if there is more than a little; at: each member's row of the range."""
        widths = self.widths
        if shape.rows * (shape.columns + shape.nodes) - sum(widths) < _LEAST_PADDING:
            return None
        pending = list(map(len, self.pending))
        counts = [width - length for width, length in zip(widths, pending, strict=True)]
        ends = [end + self.fed + count for end, count in zip(self.ends, counts, strict=True)]
        return Ragged.of(at, pending, counts, ends, (shape.rows, shape.columns, shape.nodes), device)

    def inputs(
        self, at: list[int], shape: Shape, span: tuple[int, int] | None, device: torch.device
    ) -> Inputs:
        """Make the tensors, [rows of the range, ...]; rows that are not members are padding.

        host: int64 [B, 2 + P]: slots held, tokens behind them (of chains the nodes too), pending tokens.
        Of a tree that is made already its tensors are there, else the parents that it follows from.
        """
        inputs: Inputs = {}
        if span is None or shape.columns:
            behind = 0 if shape.tree else shape.nodes
            host = [[0] * (2 + shape.columns)] * shape.rows
            for row, tokens, end in zip(at, self.pending, self.ends, strict=True):
                start, padding = end - len(tokens) + self.chained, shape.columns - len(tokens)
                host[row] = [start, len(tokens) + behind, *[0] * padding, *tokens]
            inputs["host"] = on_device(host, device)
        if self.tokens is not None:
            inputs["tokens"] = _padded(self.tokens, shape.nodes, at, shape.rows, 0)
        if self.tree is not None:
            for name in ("ancestors", "depths", "real"):
                inputs[name] = _padded(getattr(self.tree, name), self.nodes, at, shape.rows, 0)
        elif self.parents is not None:
            inputs["parents"] = _padded(self.parents, shape.fed + shape.nodes, at, shape.rows, HOLE)
        return inputs


def _padded(x: Tensor, width: int, at: list[int], rows: int, fill: int) -> Tensor:
    """Pad [B, w, ...] to [rows, width, ...], each row at its place."""
    if width > x.shape[1]:
        x = torch.nn.functional.pad(x, (0, width - x.shape[1]), value=fill)
    if at == list(range(rows)):
        return x
    return x.new_full((rows, *x.shape[1:]), fill).index_copy_(0, on_device(at, x.device), x)
