"""Blocks without padding: the tokens of all rows, one behind the other, in a single row of the model.

A block of B rows is as wide as its widest row, and a model computes all of it: where one row of sixteen
drafts four tokens, eighty columns for twenty tokens. Here the model is fed the tokens alone, [1, N]: its
linear layers and norms do not know rows. Attention does, and takes the rows in parts: those that are no wider
than most, as a small rectangle, and each wider one by itself; see `grouped`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec_core.contract.draft import on_device
from specdec_core.model.layout import fold

_OWN = 4  # columns of a rectangle that take as long as calling attention once more


Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of rectangles, as `grouped_attention`: [R, heads, C, D] and so on -> [R, C, heads, D']."""


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """Rows that attend together: R rows of C columns."""

    rows: slice  # of the block's range of places
    columns: int
    view: int  # slots that they see
    tokens: slice | Tensor  # of the N: a run of them, or int64 [R * C], where there is none some other
    entries: slice | Tensor  # of the block's whole rectangle, row by row: the same for what it has there

    def attend(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """Give what these rows attend to: [N, heads, D] -> [R * C, heads, D']; key and value by place."""
        q = _selected(query, self.tokens).view(-1, self.columns, *query.shape[1:]).transpose(1, 2)
        done = attention(q, key[self.rows, :, : self.view], value[self.rows, :, : self.view], mask)
        return done.flatten(0, 1)

    def mask_of(self, mask: Tensor) -> Tensor:
        """Give these rows' part of a mask, [entries, S] -> [R, 1, C, view]."""
        return _selected(mask, self.entries)[:, : self.view].view(-1, 1, self.columns, self.view)


@dataclass(frozen=True, eq=False)
class Ragged:
    """Where the N tokens of a block stand."""

    size: tuple[int, int]  # rows and columns of the rectangle that the block would be
    parts: tuple[Part, ...]
    order: Tensor  # int64 [N]: where each token lies in what the parts attend to, one behind the other
    take: Tensor  # int64 [N]: the entry of the rectangle, row by row, that each token is
    give: Tensor  # int64 [rows * columns]: the token in each entry; where there is none, some other
    row: Tensor  # int64 [1, N]: the row of each token
    kept: Tensor  # int64 [K]: tokens whose logits are wanted
    index: Tensor  # int64 [members, 1 + m]: which of those stands at the last pending token and at each node
    _masks: list[tuple[Tensor, list[Tensor]]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        at: Sequence[int],  # row of the rectangle that each member is
        pending: Sequence[int],  # pending tokens of each member, right-aligned in `columns`
        counts: Sequence[int],  # nodes of each member, behind them
        ends: Sequence[int],  # slots that each member sees
        size: tuple[int, int, int],  # rows, columns of pending tokens, nodes
        device: torch.device,
    ) -> Ragged:
        """Find them on the host, where all of these are known."""
        rows, columns, nodes = size
        width, before = columns + nodes, 1 if columns else 0
        take, row_of, kept, index = list[int](), list[int](), list[int](), list[int]()
        give = [0] * (rows * width)
        spans: list[_Span] = []
        for row, length, count, end in zip(at, pending, counts, ends, strict=True):
            entry, first = row * width + columns - length, len(take)
            behind = first + length + count
            take += range(entry, entry + length + count)
            row_of += [row] * (length + count)
            give[entry : entry + length + count] = range(first, behind)
            read = range(behind - count - min(length, before), behind)
            index += [0] * (before - min(length, before))
            index += range(len(kept), len(kept) + len(read))
            index += [0] * (nodes - count)
            kept += read
            spans.append(_Span(row, first, behind, entry, end))
        parts, order = _parts(rows, width, spans, device)
        lists = (order, take, give, row_of, kept, index)
        whole = on_device([number for numbers in lists for number in numbers], device)
        order_at, entries, tokens, row_at, wanted, where = torch.split(whole, list(map(len, lists)))
        where = where.view(len(at), -1)
        return cls((rows, width), parts, order_at, entries, tokens, row_at[None], wanted, where)

    def tokens(self, x: Tensor) -> Tensor:
        """Take the tokens' entries: [rows, columns] -> [1, N]."""
        return x.flatten().index_select(0, self.take)[None]

    def rectangle(self, x: Tensor) -> Tensor:
        """Put tokens in their places: [1, N, H] -> [rows, columns, H]."""
        return x[0].index_select(0, self.give).view(*self.size, -1)

    def attend(
        self, attention: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, group: int
    ) -> Tensor:
        """Attend part by part.

        Args:
            attention: of rectangles.
            query: [1, heads, N, D].
            key: [rows, kv_heads, S, D].
            value: [rows, kv_heads, S, D'].
            mask: [rows, 1, columns, S], of the rectangle.
            group: query heads to a key-value head.

        Returns:
            [1, N, heads, D'].
        """
        flat = query[0].transpose(0, 1)
        done = [
            part.attend(attention, flat, key, value, own)
            for part, own in zip(self.parts, self._masks_of(mask, group), strict=True)
        ]
        return _selected(done[0] if len(done) == 1 else torch.cat(done), self.order)[None]

    def _masks_of(self, mask: Tensor, group: int) -> list[Tensor]:
        """Cut a mask for the parts; all layers of a kind come with the same one."""
        for known, own in self._masks:
            if known is mask:
                return own
        entries = mask.reshape(-1, mask.shape[3])
        own = [fold(part.mask_of(entries), group) for part in self.parts]
        self._masks.append((mask, own))
        return own


@dataclass(frozen=True, slots=True)
class _Span:
    """A member's tokens, first to behind - 1 of the N, and entry and on of the rectangle."""

    row: int
    first: int
    behind: int
    entry: int
    end: int

    @property
    def width(self) -> int:
        return self.behind - self.first


def _parts(
    rows: int, width: int, spans: Sequence[_Span], device: torch.device
) -> tuple[tuple[Part, ...], list[int]]:
    """Choose which rows attend together: those up to some width, all others one by one.

    Returns:
        The parts, and where each token lies in them.
    """

    def cost(most: int) -> int:
        return rows * most + sum(span.width + _OWN for span in spans if span.width > most)

    most = min({0, *(span.width for span in spans)}, key=cost)
    together = [span for span in spans if 0 < span.width <= most]
    parts, first = list[Part](), 0
    if together:
        parts.append(_rectangle(rows, width, most, together, device))
        first = rows * most
    order: list[int] = []
    for span in spans:
        start = span.row * most
        if span.width > most:
            tokens, entries = slice(span.first, span.behind), slice(span.entry, span.entry + span.width)
            parts.append(Part(slice(span.row, span.row + 1), span.width, span.end, tokens, entries))
            start, first = first, first + span.width
        order += range(start, start + span.width)
    return tuple(parts), order


def _rectangle(rows: int, width: int, columns: int, spans: Sequence[_Span], device: torch.device) -> Part:
    """Let some rows of the block's attend together; those of the others attend to something, unread."""
    tokens, entries = [0] * (rows * columns), [row * width for row in range(rows) for _ in range(columns)]
    for span in spans:
        start = span.row * columns
        tokens[start : start + span.width] = range(span.first, span.behind)
        entries[start : start + span.width] = range(span.entry, span.entry + span.width)
    both = on_device([tokens, entries], device)
    return Part(slice(0, rows), columns, max(span.end for span in spans), both[0], both[1])


def _selected(x: Tensor, index: slice | Tensor) -> Tensor:
    """Select along the first dimension; a model may lie on several devices."""
    return x[index] if isinstance(index, slice) else x.index_select(0, index.to(x.device))
