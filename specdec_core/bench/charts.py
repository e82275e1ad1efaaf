"""The report's charts, each narrow enough for a telephone: speed-up, acceptance, cost of a block, time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec_core.bench.svg import (
    INK,
    MUTED,
    PLAIN_COLOUR,
    Point,
    colour,
    dot,
    figure,
    line,
    path,
    rect,
    text,
    ticks,
)

_WIDTH = 360.0
_PLOT = (40.0, 26.0, 340.0, 200.0)  # left, top, right, bottom of a line chart
PARTS = {
    "prefill_seconds": ("reading prompts", "#b9a7d6"),
    "draft_seconds": ("drafting", "#e2a03f"),
    "target_seconds": ("target forwards", "#3f7fb5"),
    "other_seconds": ("other", "#c9ced6"),
}

Row = Mapping[str, Any]


def colours(methods: Sequence[str]) -> dict[str, str]:
    """Give each method its colour, the same in every chart; plain decoding is grey."""
    others = [name for name in methods if name != "none"]
    return {"none": PLAIN_COLOUR} | {name: colour(i) for i, name in enumerate(others)}


def speedups(rows: Sequence[Row], paint: Mapping[str, str], largest: float, title: str) -> str:
    """Draw a bar for each method's speed-up, with its interval; panels share the scale up to `largest`."""
    left, right, top, step = 6.0, _WIDTH - 10, 6.0, 40.0
    axis = ticks(max(largest, 1.0))
    bottom = top + step * len(rows)

    def x(value: float) -> float:
        return left + (right - left) * min(value / axis[-1], 1.0)

    parts = [line((x(value), top), (x(value), bottom)) for value in axis]
    parts += [text(x(value), bottom + 15, f"{value:g}x", anchor="middle", fill=MUTED) for value in axis[:-1]]
    for i, row in enumerate(rows):
        y, value = top + step * i, row["speedup"]
        low, high = row["speedup_low"], row["speedup_high"]
        said = f"{value:.2f}x" if low == high else f"{value:.2f}x ({low:.2f}-{high:.2f})"
        parts.append(text(left + 2, y + 13, shortened(row["method"], 30)))
        parts.append(text(right, y + 13, said, anchor="end", bold=True, fill=_tone(row)))
        parts.append(
            rect(left, y + 19, x(value) - left, 13, paint[row["method"]], f"{row['method']}: {said}")
        )
        parts.append(line((x(1), y + 16), (x(1), y + 35), INK, dash="3 2"))
        if low != high:
            middle = y + 25.5
            parts.append(line((x(low), middle), (x(high), middle), INK, width=1.5))
            parts += [line((x(end), middle - 4), (x(end), middle + 4), INK, width=1.5) for end in (low, high)]
    return figure(_WIDTH, bottom + 22, parts, title)


def acceptance(rows: Sequence[Row], paint: Mapping[str, str], title: str) -> str:
    """Draw the share of rounds that accepted a token at depth 1, 2, ... of each method that tells."""
    drawn = [row for row in rows if row.get("acceptance_by_depth")]
    deepest = max((len(row["acceptance_by_depth"]) for row in drawn), default=1)
    axes = _Axes(deepest, 1.0, "depth", first=1)
    parts = axes.grid([0, 0.25, 0.5, 0.75, 1.0], "share of rounds", percent=True)
    for row in drawn:
        shares, fill = row["acceptance_by_depth"], paint[row["method"]]
        points = [axes.at(depth, share) for depth, share in enumerate(shares, start=1)]
        parts.append(path(points, fill))
        parts += [
            dot(point, fill, f"{row['method']}, depth {depth}: {share:.0%}")
            for depth, (point, share) in enumerate(zip(points, shares, strict=True), start=1)
        ]
    return figure(_WIDTH, 242, parts, title)


def block_cost(cost: Row, title: str) -> str:
    """Draw t_v(m) / t_v(1), with what a free check and one that costs as much as its tokens would be."""
    widths = [(m, seconds, ratio) for m, seconds, ratio in cost["widths"]]
    last, highest = widths[-1][0], max(ratio for _, _, ratio in widths)
    axis = ticks(max(highest * 1.05, 2.0))
    axes = _Axes(last, axis[-1], "tokens in the block, m", first=1)
    parts = axes.grid(axis, "time, in forwards over one token")
    end = min(last, axis[-1])
    parts.append(line(axes.at(1, 1), axes.at(end, end), MUTED, dash="2 3"))
    parts.append(line(axes.at(1, 1), axes.at(last, 1), MUTED, dash="6 3"))
    points = [axes.at(m, ratio) for m, _, ratio in widths]
    parts.append(path(points, "#3f7fb5"))
    for (m, seconds, ratio), point in zip(widths, points, strict=True):
        parts.append(dot(point, "#3f7fb5", f"m = {m}: {ratio:.2f}x, {seconds * 1000:.2f} ms"))
    x, y = points[-1]
    if last > 1:
        parts.append(text(x - 2, y - 9, f"{widths[-1][2]:.2f}x", anchor="end", bold=True))
    return figure(_WIDTH, 242, parts, title)


def time_parts(rows: Sequence[Row], title: str) -> str:
    """Draw where a token's time goes: milliseconds by part, a bar for each method."""
    left, right, top, step = 6.0, _WIDTH - 10, 6.0, 40.0
    longest = max(row["seconds"] / row["new_tokens"] for row in rows) * 1000
    axis = ticks(longest)
    bottom = top + step * len(rows)
    scale = (right - left) / axis[-1]
    parts = [line((left + value * scale, top), (left + value * scale, bottom)) for value in axis]
    parts += [
        text(left + value * scale, bottom + 15, f"{value:g}", anchor="middle", fill=MUTED)
        for value in axis[1:-1]
    ]
    parts.append(text(right, bottom + 15, "ms a token", anchor="end", fill=MUTED))
    for i, row in enumerate(rows):
        y, at = top + step * i, left
        each = 1000 / row["new_tokens"]
        parts.append(text(left + 2, y + 13, shortened(row["method"], 36)))
        parts.append(text(right, y + 13, f"{row['seconds'] * each:.2g} ms", anchor="end", bold=True))
        for part, (name, fill) in PARTS.items():
            took = (row[part] or 0.0) * each
            share = (row[part] or 0.0) / row["seconds"]
            parts.append(rect(at, y + 19, took * scale, 13, fill, f"{name}: {took:.2f} ms ({share:.0%})"))
            at += took * scale
    return figure(_WIDTH, bottom + 22, parts, title)


def shortened(name: str, most: int) -> str:
    """Cut a long name in the middle, where paths are dull."""
    if len(name) <= most:
        return name
    head = most // 2 - 1
    return f"{name[:head]}…{name[-(most - head - 1) :]}"


def _tone(row: Row) -> str:
    """Red where a method is surely slower than the baseline."""
    return "#b3261e" if row["speedup_high"] < 1 else INK


class _Axes:
    """The frame of a line chart."""

    def __init__(self, last: float, highest: float, below: str, *, first: float) -> None:
        self._first, self._last, self._highest, self._below = first, last, highest, below

    def at(self, x: float, y: float) -> Point:
        left, top, right, bottom = _PLOT
        span = max(self._last - self._first, 1e-9)
        across = (x - self._first) / span if self._last > self._first else 0.5
        return left + (right - left) * across, bottom - (bottom - top) * y / self._highest

    def grid(self, values: Sequence[float], beside: str, *, percent: bool = False) -> list[str]:
        left, _, right, bottom = _PLOT
        parts = [text(4, 10, beside, fill=MUTED, size=11)]
        for value in values:
            y = self.at(self._first, value)[1]
            said = f"{value:.0%}" if percent else f"{value:g}"
            parts.append(line((left, y), (right, y)))
            parts.append(text(left - 5, y + 4, said, anchor="end", fill=MUTED, size=11))
        step = max(1, round((self._last - self._first) / 8))
        for value in range(int(self._first), int(self._last) + 1, step):
            x = self.at(value, 0)[0]
            parts.append(text(x, bottom + 16, str(value), anchor="middle", fill=MUTED, size=11))
        parts.append(line((left, bottom), (right, bottom), MUTED))
        parts.append(text((left + right) / 2, bottom + 34, self._below, anchor="middle", fill=MUTED))
        return parts
