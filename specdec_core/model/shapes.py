"""Fixed shapes: the short list of block, batch and cache sizes that captured forwards run at."""

from __future__ import annotations

from dataclasses import dataclass

_SMALL = (0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
VIEW = 256  # a view is a multiple of this, or a power of two


@dataclass(frozen=True)
class Shape:
    """Sizes of one forward; whatever shares a Shape can share a captured graph."""

    rows: int
    columns: int  # of pending tokens
    nodes: int  # fed in this call
    fed: int  # nodes fed before
    view: int  # slots that attention sees
    tree: bool = False  # of the nodes; chains are told by their lengths alone

    def bucketed(self, slots: int, rows: int | None = None) -> Shape:
        """Round every size up to one of the short list.

        slots, rows: the capacity, a limit on the view and on the rows.
        """
        assert self.view <= slots
        view = -(-self.view // VIEW) * VIEW if self.view <= 8 * VIEW else _power(self.view)
        return Shape(
            rows=rows_up(self.rows, rows),
            columns=_up(self.columns),
            nodes=_up(self.nodes),
            fed=self.fed,
            view=min(view, slots),
            tree=self.tree,
        )


def rows_up(rows: int, most: int | None = None) -> int:
    """Round a number of rows up, to no more than there may be."""
    return _up(rows) if most is None else max(min(_up(rows), most), rows)


def _up(size: int) -> int:
    return next((step for step in _SMALL if step >= size), _power(size))


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
