"""The report as one HTML file that needs nothing else: what `page.html.jinja` is filled in with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from specdec_core.bench import charts
from specdec_core.bench.report import ids_shown, prediction_text, slower_in, verdict
from specdec_core.bench.summary import ALL

Row = Mapping[str, Any]

_COLUMNS = {  # of the table: the figure, its form, and what stands behind it
    "tokens/s": ("tokens_per_second", ".1f", ""),
    "speed-up": ("speedup", ".2f", "x"),
    "predicted": ("predicted_speedup", ".2f", "x"),
    "accepted": ("acceptance_rate", ".0%", ""),
    "length": ("mean_acceptance_length", ".2f", ""),
    "drafted": ("mean_drafted", ".2f", ""),
    "forwards": ("forwards", ".0f", ""),
    "tokens": ("new_tokens", ".6g", ""),
}


def make_page(report: Mapping[str, Any]) -> str:
    """Write the report of `make_report` as HTML; all that it says is escaped."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["shortened"] = charts.shortened
    text = resources.files("specdec_core.bench").joinpath("page.html.jinja").read_text(encoding="utf-8")
    settings = report["settings"]
    target = str(settings["target"]).rstrip("/").rpartition("/")[2] or str(settings["target"])
    return environment.from_string(text).render(
        title=f"specdec bench: {target}",
        settings=settings,
        columns=["method", *_COLUMNS, "same ids"],
        parts=list(charts.PARTS.values()),
        sections=[_section(section, settings) for section in report["results"]],
        costs=[_cost(cost) for cost in report["costs"] if len(cost["widths"]) > 1],
        facts=_facts(report),
    )


def _section(section: Row, settings: Row) -> dict[str, Any]:
    """Give what the page says about one batch size and temperature."""
    kind = "greedy" if not section["temperature"] else f"sampled at temperature {section['temperature']:g}"
    parts, where = section["categories"], f"batch {section['batch']}, {kind}"
    first = parts[0]
    paint = charts.colours([row["method"] for row in first["methods"]])
    largest = max(min(row["speedup_high"], 3 * row["speedup"]) for part in parts for row in part["methods"])
    drafts = [row["method"] for row in first["methods"] if row.get("acceptance_by_depth")]
    return {
        "batch": section["batch"],
        "kind": kind,
        "baseline": section["baseline"],
        "verdicts": _verdicts(parts, section["baseline"]),
        "legend": list(_legend(first["methods"], paint).items()),
        "speedups": [
            (part["category"], Markup(charts.speedups(part["methods"], paint, largest, title)))
            for part, title in _titled("speed-up of each method", parts, where)
        ],
        "table_title": "All categories" if first["category"] == ALL else first["category"],
        "table": [(row["speedup_high"] < 1, _cells(row, section, settings)) for row in first["methods"]],
        "acceptance_legend": [(name, paint[name]) for name in drafts],
        "acceptance": [
            (part["category"], Markup(charts.acceptance(part["methods"], paint, title)))
            for part, title in (_titled("acceptance by depth of each method", parts, where) if drafts else [])
        ],
        "times": Markup(
            charts.time_parts(first["methods"], f"where the time of a token goes, by method, {where}")
        ),
        "reasons": [(row["method"], said) for row in first["methods"] if (said := prediction_text(row))],
    }


def _legend(rows: Sequence[Row], paint: Mapping[str, str]) -> dict[str, str]:
    return {row["method"]: paint[row["method"]] for row in rows}


def _titled(what: str, parts: Sequence[Row], where: str) -> list[tuple[Row, str]]:
    """Give each chart a title of its own."""
    return [(part, f"{what}, category {part['category']}, {where}") for part in parts]


def _verdicts(parts: Sequence[Row], base: str) -> list[tuple[bool, str]]:
    """Say of each method whether it is faster, and where it is slower all the same."""
    found = []
    for row in parts[0]["methods"]:
        if row["method"] == base:
            continue
        late, slow = row["speedup_high"] < 1, slower_in(row["method"], parts)
        more = f" Slower in {', '.join(slow)}." if slow and not late else ""
        found.append((late, f"{row['method']}: {verdict(row, base)}.{more}"))
    return found


def _cells(row: Row, section: Row, settings: Row) -> list[str]:
    cells = {
        column: "-" if row.get(name) is None else f"{row[name]:{form}}{after}"
        for column, (name, form, after) in _COLUMNS.items()
    }
    cells["speed-up"] += f" ({row['speedup_low']:.2f}-{row['speedup_high']:.2f})"
    return [charts.shortened(row["method"], 40), *cells.values(), ids_shown(row, section, settings)]


def _cost(cost: Row) -> tuple[str, Markup]:
    where = f"batch {cost['batch']}, behind {cost['context']} tokens"
    return where.capitalize(), Markup(charts.block_cost(cost, f"cost of a block by its width, {where}"))


def _facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = {
        **report["settings"],
        "commands": [" ".join(start["argv"]) for start in report["starts"]],
        "started": [start["time"] for start in report["starts"]],
        "left out": report["skipped"] or "nothing",
    }
    if report["waits"]:  # of a GPU
        rows["waits for the device, round by round"] = {
            found["method"]: " ".join(map(str, found["counts"])) for found in report["waits"]
        }
    return [(name, _value(value)) for name, value in rows.items()]


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_value(one)}" for name, one in value.items())
    if isinstance(value, list):
        return "; ".join(map(_value, value))
    return "none" if value is None else str(value)
