"""The report as one HTML file that needs nothing else: readable on a wide screen and on a telephone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from specdec_core.bench import charts
from specdec_core.bench.page_style import STYLE
from specdec_core.bench.report import ids_shown, prediction_text, verdict
from specdec_core.bench.summary import ALL

Row = Mapping[str, Any]

_BARS = (
    "A bar that ends right of the dashed line is faster than the baseline. The black whisker is the 95% "
    "interval: where it crosses the dashed line, the measurements do not tell faster from slower."
)
_SHARES = (
    "How many of all rounds accepted a token at depth 1, 2, ...; rounds without a draft count. The sum of a "
    "line, plus one, is the tokens that a round gives."
)
_TIMES = (
    "Target forwards behind the prompts are what speculation saves; the rest it adds or cannot touch. What "
    "transformers spends on drafting is part of the other time; on a GPU its parts are not told apart."
)

_TERMS = (
    "predicted: by the formula, over plain decoding. accepted: of the drafted tokens. length: tokens a "
    "round, 1 + accepted. drafted: tokens a round. forwards: of the target."
)

_COLUMNS = (
    "method",
    "tokens/s",
    "speed-up",
    "predicted",
    "accepted",
    "length",
    "drafted",
    "forwards",
    "tokens",
    "same ids",
)


def make_page(report: Mapping[str, Any]) -> str:
    """Write the report of `make_report` as HTML."""
    settings = report["settings"]
    target = str(settings["target"]).rstrip("/").rpartition("/")[2] or str(settings["target"])
    title = f"specdec bench: {target}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{escape(_subtitle(settings))}</p>',
        *(_section(section, settings) for section in report["results"]),
        _costs(report["costs"]),
        _facts(report),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n'
        f"<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _subtitle(settings: Row) -> str:
    count, kind = settings["questions"]["count"], settings["prompts"]
    return (
        f"{settings['device_name']}, {settings['dtype']}, {settings['threads']} threads. {count} questions "
        f"({kind} prompts), at most {settings['max_new_tokens']} new tokens, {settings['repeats']} repeats."
    )


def _section(section: Row, settings: Row) -> str:
    kind = "greedy" if not section["temperature"] else f"sampled at temperature {section['temperature']:g}"
    parts = section["categories"]
    methods = [row["method"] for row in parts[0]["methods"]]
    paint, base = charts.colours(methods), section["baseline"]
    largest = max(min(row["speedup_high"], 3 * row["speedup"]) for part in parts for row in part["methods"])
    legend = _legend({name: paint[name] for name in methods})
    bars = [
        _figure(part["category"], charts.speedups(part["methods"], paint, largest, _alt("speed-up", part)))
        for part in parts
    ]
    depths = [
        _figure(
            part["category"], charts.acceptance(part["methods"], paint, _alt("acceptance by depth", part))
        )
        for part in parts
    ]
    times = _figure(
        "Milliseconds for each new token, all prompts",
        charts.time_parts(parts[0]["methods"], "where the time of a token goes, by method"),
    )
    drafts = [row["method"] for row in parts[0]["methods"] if row.get("acceptance_by_depth")]
    return "\n".join(
        [
            f"<h2>Batch {section['batch']}, {kind}</h2>",
            _verdicts(parts, base),
            f"<h3>Speed-up over {escape(base)}, by category</h3>",
            f"<p>{_BARS}</p>",
            legend,
            f'<div class="grid">{"".join(bars)}</div>',
            _table(parts[0], section, settings),
            *(_depths(_legend({name: paint[name] for name in drafts}), depths) if drafts else []),
            "<h3>Where the time goes</h3>",
            f"<p>{_TIMES}</p>",
            _legend(dict(charts.PARTS.values())),
            f'<div class="grid">{times}{_reasons(parts[0])}</div>',
        ]
    )


def _depths(legend: str, figures: Sequence[str]) -> list[str]:
    return [
        "<h3>Acceptance by depth</h3>",
        f"<p>{_SHARES}</p>",
        legend,
        f'<div class="grid">{"".join(figures)}</div>',
    ]


def _alt(what: str, part: Row) -> str:
    return f"{what} of each method, category {part['category']}"


def _verdicts(parts: Sequence[Row], base: str) -> str:
    items = []
    for row in parts[0]["methods"]:
        if row["method"] == base:
            continue
        name = row["method"]
        slow = [
            f"{part['category']} ({other['speedup']:.2f}x)"
            for part in parts[1:]
            for other in part["methods"]
            if other["method"] == name and other["speedup_high"] < 1
        ]
        more = f" Slower in {', '.join(slow)}." if slow and row["speedup_high"] >= 1 else ""
        tone = ' class="slower"' if row["speedup_high"] < 1 else ""
        said = escape(f"{name}: {verdict(row, base)}.{more}")
        items.append(f"<li{tone}>{said}</li>")
    return f'<ul class="plain">{"".join(items)}</ul>' if items else ""


def _table(part: Row, section: Row, settings: Row) -> str:
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    rows = "".join(_table_row(row, section, settings) for row in part["methods"])
    which = "All categories" if part["category"] == ALL else part["category"]
    return (
        f'<h3>{escape(which)}</h3><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f'<tbody>{rows}</tbody></table></div><p class="muted">{_TERMS}</p>'
    )


def _table_row(row: Row, section: Row, settings: Row) -> str:
    def number(name: str, form: str, after: str = "") -> str:
        return "-" if row.get(name) is None else f"{row[name]:{form}}{after}"

    cells = [
        charts.shortened(row["method"], 40),
        number("tokens_per_second", ".1f"),
        f"{row['speedup']:.2f}x ({row['speedup_low']:.2f}-{row['speedup_high']:.2f})",
        number("predicted_speedup", ".2f", "x"),
        number("acceptance_rate", ".0%"),
        number("mean_acceptance_length", ".2f"),
        number("mean_drafted", ".2f"),
        number("forwards", ".0f"),
        number("new_tokens", ".6g"),
        ids_shown(row, section, settings),
    ]
    tone = ' class="slower"' if row["speedup_high"] < 1 else ""
    return f"<tr{tone}>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _reasons(part: Row) -> str:
    """Say for each method what the formula predicts, and why the measurement differs."""
    items = [
        f"<li><b>{escape(charts.shortened(row['method'], 60))}</b>: {escape(said)}</li>"
        for row in part["methods"]
        if (said := prediction_text(row))
    ]
    if not items:
        return ""
    return (
        '<figure class="wide"><figcaption>The formula beside the measurement</figcaption>'
        f'<ul class="plain">{"".join(items)}</ul></figure>'
    )


def _costs(costs: Sequence[Row]) -> str:
    drawn = [cost for cost in costs if len(cost["widths"]) > 1]
    if not drawn:
        return ""
    figures = [
        _figure(
            f"Batch {cost['batch']}, behind {cost['context']} tokens",
            charts.block_cost(cost, f"cost of a block by its width, batch {cost['batch']}"),
        )
        for cost in drawn
    ]
    return (
        "<h2>What checking costs</h2><p>The time of a target forward over m tokens, t<sub>v</sub>(m), in "
        "forwards over one token. Dashed: a check that were free. Dotted: one that cost as much as its "
        f'tokens one by one.</p><div class="grid">{"".join(figures)}</div>'
    )


def _facts(report: Mapping[str, Any]) -> str:
    rows = {
        **report["settings"],
        "commands": [" ".join(start["argv"]) for start in report["starts"]],
        "started": [start["time"] for start in report["starts"]],
        "left out": report["skipped"] or "nothing",
    }
    cells = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(_value(value))}</td></tr>" for name, value in rows.items()
    )
    return f'<h2>How it was measured</h2><div class="scroll"><table class="facts">{cells}</table></div>'


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_value(one)}" for name, one in value.items())
    if isinstance(value, list):
        return "; ".join(map(_value, value))
    return "none" if value is None else str(value)


def _figure(caption: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>"


def _legend(entries: Mapping[str, str]) -> str:
    items = "".join(
        f'<li><span style="background:{fill}"></span>{escape(charts.shortened(name, 60))}</li>'
        for name, fill in entries.items()
    )
    return f'<ul class="legend">{items}</ul>'
