"""The report's charts, drawn by matplotlib as SVG: speed-up, acceptance, cost of a block, time.

Each is narrow enough for a telephone, and a pointer that rests on a bar or a point is told its figures.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from xml.dom import minidom

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

INK, MUTED, GRID, LATE = "#1f2328", "#5b6470", "#dfe3e8", "#b3261e"
_PLAIN = "#8a919b"
_PALETTE = ("#0072b2", "#d55e00", "#009e73", "#b8478f", "#b07d00", "#3aa0d8", "#6f4e9c", "#7a4b1e")
PARTS = {
    "prefill_seconds": ("reading prompts", "#b9a7d6"),
    "draft_seconds": ("drafting", "#e2a03f"),
    "target_seconds": ("target forwards", "#3f7fb5"),
    "other_seconds": ("other", "#c9ced6"),
}

_POINTS = 72  # of matplotlib, an inch: one of them is one unit of the drawing
_WIDTH = 360  # of a drawing: what a telephone shows
_BAR, _STEP, _FOOT = 13, 40, 28  # of a bar chart: a bar's height, a row's, and what the scale takes
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, in the page's own font
    "font.size": 12,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.spines.bottom": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.titlesize": 11,
    "axes.titlecolor": MUTED,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 12,
    "grid.color": GRID,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
}

Row = Mapping[str, Any]


def colours(methods: Sequence[str]) -> dict[str, str]:
    """Give each method its colour, the same in every chart; plain decoding is grey."""
    others = [name for name in methods if name != "none"]
    return {"none": _PLAIN} | {name: _PALETTE[i % len(_PALETTE)] for i, name in enumerate(others)}


def speedups(rows: Sequence[Row], paint: Mapping[str, str], largest: float, title: str) -> str:
    """Draw a bar for each method's speed-up, with its interval; panels share the scale up to `largest`."""
    with _drawing(title) as drawing:
        axes = drawing.bars(len(rows), max(largest, 1.0), "{:g}x".format)
        for y, row in enumerate(rows):
            value, low, high = row["speedup"], row["speedup_low"], row["speedup_high"]
            said = f"{value:.2f}x" if low == high else f"{value:.2f}x ({low:.2f}-{high:.2f})"
            drawing.name(axes, y, shortened(row["method"], 30), said, LATE if high < 1 else INK)
            (bar,) = axes.barh(y, value, _BAR / _STEP, color=paint[row["method"]])
            drawing.tip(bar, f"{row['method']}: {said}")
            axes.plot([1, 1], [y - 0.22, y + 0.22], color=INK, linewidth=1, linestyle=(0, (3, 2)))
            if low != high:
                ends = [[value - low], [high - value]]
                axes.errorbar(value, y, xerr=ends, ecolor=INK, elinewidth=1.5, capsize=4, capthick=1.5)
        return drawing.svg()


def acceptance(rows: Sequence[Row], paint: Mapping[str, str], title: str) -> str:
    """Draw the share of rounds that accepted a token at depth 1, 2, ... of each method that tells."""
    with _drawing(title) as drawing:
        axes = drawing.lines("depth", "share of rounds")
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        for row in rows:
            shares = row.get("acceptance_by_depth") or []
            tips = [f"{row['method']}, depth {i}: {share:.0%}" for i, share in enumerate(shares, start=1)]
            drawing.points(axes, range(1, len(shares) + 1), shares, paint[row["method"]], tips)
        return drawing.svg()


def block_cost(cost: Row, title: str) -> str:
    """Draw t_v(m) / t_v(1), with what a free check and one that costs as much as its tokens would be."""
    widths, _, ratios = zip(*cost["widths"], strict=True)
    with _drawing(title) as drawing:
        axes = drawing.lines("tokens in the block, m", "time, in forwards over one token")
        top = max(1.05 * max(ratios), 2.0)
        end = min(widths[-1], top)
        axes.plot([1, end], [1, end], color=MUTED, linewidth=1, linestyle=(0, (2, 3)))
        axes.plot([1, widths[-1]], [1, 1], color=MUTED, linewidth=1, linestyle=(0, (6, 3)))
        tips = [f"m = {m}: {r:.2f}x, {s * 1000:.2f} ms" for m, s, r in cost["widths"]]
        drawing.points(axes, widths, ratios, PARTS["target_seconds"][1], tips)
        last = (widths[-1], ratios[-1])
        axes.annotate(
            f"{ratios[-1]:.2f}x", last, (0, 6), textcoords="offset points", ha="right", weight="bold"
        )
        axes.set_ylim(0, top)
        return drawing.svg()


def time_parts(rows: Sequence[Row], title: str) -> str:
    """Draw where a token's time goes: milliseconds by part, a bar for each method."""
    with _drawing(title) as drawing:
        longest = max(row["seconds"] / row["new_tokens"] for row in rows) * 1000
        axes = drawing.bars(len(rows), longest, "{:g} ms".format)
        for y, row in enumerate(rows):
            at, each = 0.0, 1000 / row["new_tokens"]
            drawing.name(axes, y, shortened(row["method"], 36), f"{row['seconds'] * each:.3g} ms", INK)
            for part, (name, fill) in PARTS.items():
                took = (row[part] or 0.0) * each
                (bar,) = axes.barh(y, took, _BAR / _STEP, left=at, color=fill)
                drawing.tip(bar, f"{name}: {took:.2f} ms ({(row[part] or 0.0) / row['seconds']:.0%})")
                at += took
        return drawing.svg()


def shortened(name: str, most: int) -> str:
    """Cut a long name in the middle, where paths are dull."""
    if len(name) <= most:
        return name
    head = most // 2 - 1
    return f"{name[:head]}…{name[-(most - head - 1) :]}"


@contextmanager
def _drawing(title: str) -> Iterator[_Drawing]:
    """Begin a drawing; what matplotlib is set to elsewhere does not show in it."""
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()
        # Names are what they are called within a page: those of two drawings must not be the same.
        mpl.rcParams.update({**_STYLE, "svg.hashsalt": title})
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the reader's font draws it
        yield _Drawing(title)


class _Drawing:
    """One figure of the page, and what is said where a pointer rests."""

    def __init__(self, title: str) -> None:
        self._title, self._tips, self._figure = title, dict[str, str](), Figure()

    def bars(self, count: int, largest: float, scale: Any) -> Axes:
        """Make room for so many horizontal bars, the first on top, each below its name."""
        height = _STEP * count + _FOOT
        axes = self._axes(height, (6, 4, 6, _FOOT))
        axes.set_ylim(count - 1 + _BAR / _STEP, _BAR / _STEP - 1)
        ticks = MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]).tick_values(0, largest)
        axes.set_xlim(0, max(ticks))
        axes.set_xticks(ticks)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: scale(value)))
        axes.set_yticks([])
        first, *_, last = axes.get_xticklabels()
        first.set_horizontalalignment("left")
        last.set_horizontalalignment("right")
        return axes

    def lines(self, below: str, above: str) -> Axes:
        """Make a frame for lines over whole numbers from 1 on."""
        axes = self._axes(246, (42, 30, 14, 42))
        axes.set_title(above, loc="left", x=-0.11, pad=12)
        axes.set_xmargin(0.03)
        axes.set_xlabel(below)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        axes.spines["bottom"].set(visible=True, color=MUTED)
        axes.grid(visible=False, axis="x")
        return axes

    def _axes(self, height: float, margins: tuple[float, float, float, float]) -> Axes:
        left, top, right, bottom = margins
        self._figure.set_size_inches(_WIDTH / _POINTS, height / _POINTS)
        size = (left / _WIDTH, bottom / height, 1 - (left + right) / _WIDTH, 1 - (top + bottom) / height)
        return self._figure.add_axes(size)

    def name(self, axes: Axes, y: float, name: str, said: str, tone: str) -> None:
        """Write above a bar whose it is, and how long."""
        at = y - 0.4
        options: dict[str, Any] = {"va": "center", "transform": axes.get_yaxis_transform()}
        axes.text(0, at, name, ha="left", **options)
        axes.text(1, at, said, ha="right", color=tone, weight="bold", **options)

    def points(
        self, axes: Axes, x: Sequence[float], y: Sequence[float], fill: str, tips: Sequence[str]
    ) -> None:
        """Draw a line with a point that tells its figures at each place."""
        axes.plot(x, y, color=fill, linewidth=2)
        for at, value, said in zip(x, y, tips, strict=True):
            (point,) = axes.plot(at, value, "o", color=fill, markersize=7, markeredgecolor="white")
            self.tip(point, said)

    def tip(self, artist: Artist, said: str) -> None:
        """Say something where a pointer rests on it."""
        name = f"tip{len(self._tips)}"
        artist.set_gid(name)
        self._tips[name] = said

    def svg(self) -> str:
        """Give the drawing as an element of a page: with its title, and without names that nobody uses."""
        file = io.BytesIO()
        self._figure.savefig(
            file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
        document = minidom.parseString(file.getvalue())
        root: Any = document.documentElement
        for name in ("width", "height"):  # the page's style says how large; the view box in which form
            root.removeAttribute(name)
        root.setAttribute("role", "img")
        root.setAttribute("aria-label", self._title)
        _entitle(document, root, self._title)
        for group in root.getElementsByTagName("g"):
            if (name := group.getAttribute("id")) in self._tips:
                _entitle(document, group, self._tips[name])
            if name:  # clips and markers are used by name, groups are not
                group.removeAttribute("id")
        text: str = root.toxml()
        return text


def _entitle(document: minidom.Document, element: Any, said: str) -> None:
    title = document.createElement("title")
    title.appendChild(document.createTextNode(said))
    element.insertBefore(title, element.firstChild)
