"""A few SVG primitives: what the charts are drawn with. No scripts, no fonts, nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

INK, MUTED, GRID, PAPER = "#1f2328", "#5b6470", "#dfe3e8", "#ffffff"
_PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b8478f", "#b07d00", "#3aa0d8", "#6f4e9c", "#7a4b1e")
PLAIN_COLOUR = "#8a919b"

Point = tuple[float, float]


def colour(index: int) -> str:
    """Give the colour of the index-th method beside plain decoding."""
    return _PALETTE[index % len(_PALETTE)]


def figure(width: float, height: float, parts: Sequence[str], title: str) -> str:
    """Put parts together; the figure scales with its column, up to its own size."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}" '
        f'style="max-width:{width:g}px" xmlns="http://www.w3.org/2000/svg">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def text(
    x: float,
    y: float,
    said: str,
    *,
    anchor: str = "start",
    fill: str = INK,
    size: int = 12,
    bold: bool = False,
) -> str:
    """Write a line; y is its baseline."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-size="{size}"{weight}>'
        f"{escape(said)}</text>"
    )


def rect(x: float, y: float, width: float, height: float, fill: str, tip: str = "") -> str:
    """Fill a rectangle; `tip` shows when a pointer rests on it."""
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height:.1f}" fill="{fill}">'
        f"{title}</rect>"
    )


def line(a: Point, b: Point, stroke: str = GRID, *, width: float = 1, dash: str = "") -> str:
    """Draw a straight line."""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}" stroke="{stroke}" '
        f'stroke-width="{width:g}"{dashed}/>'
    )


def path(points: Sequence[Point], stroke: str, *, width: float = 2) -> str:
    """Draw a line through points."""
    said = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{said}" fill="none" stroke="{stroke}" stroke-width="{width:g}"/>'


def dot(at: Point, fill: str, tip: str, radius: float = 3.5) -> str:
    """Mark a point."""
    return (
        f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="{radius:g}" fill="{fill}" stroke="{PAPER}">'
        f"<title>{escape(tip)}</title></circle>"
    )


def ticks(largest: float, wanted: int = 4) -> list[float]:
    """Choose round numbers from 0 to at least `largest`."""
    if largest <= 0:
        return [0.0, 1.0]
    rough = largest / wanted
    power = 10.0 ** len(str(int(rough))) / 10 if rough >= 1 else 1.0
    while power > rough:
        power /= 10
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    count = int(largest / step + 0.999)
    return [round(step * i, 10) for i in range(max(count, 1) + 1)]
