"""The figures of `peers.py`, from its lines: speeds, ratios of paired runs, and whether ids are right."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from specdec_core.bench.statistics import bootstrap
from specdec_core.cli.tables import print_table

REFERENCE = "hf"
ALL = "all"

Line = dict[str, Any]
Runs = dict[str, list[Line]]  # of one contender: prompt -> its runs, repeats in order


def figures(lines: Sequence[Line], clock: str) -> list[Line]:
    """Give a line for each contender and category, and for all prompts.

    A contender that failed has none. `ratio`, `low`, `high`: how many times as fast the first one is.

    clock: "wall" or "cpu".
    """
    failed = {line["contender"] for line in lines if line["kind"] == "failed"}
    started = dict.fromkeys(line["contender"] for line in lines if line["kind"] == "started")
    runs = {name: _runs_of(lines, name) for name in started if name not in failed}
    if not runs:
        return []
    lead, seconds = next(iter(runs.values())), "seconds" if clock == "wall" else "cpu_seconds"
    categories = [*dict.fromkeys(of[0]["category"] for of in lead.values()), ALL]
    return [
        {
            "contender": name,
            "category": category,
            "tokens_per_second": _speed(_within(own, category), seconds),
            **_ratio(_within(lead, category), own, seconds),
            **_same(_within(own, category), runs.get(REFERENCE)),
        }
        for name, own in runs.items()
        for category in categories
    ]


def _runs_of(lines: Sequence[Line], contender: str) -> Runs:
    runs: Runs = {}
    for line in lines:
        if line["kind"] == "run" and line["contender"] == contender:
            runs.setdefault(line["prompt"], []).append(line)
    return runs


def _within(runs: Runs, category: str) -> Runs:
    return {name: of for name, of in runs.items() if category in (ALL, of[0]["category"])}


def _speed(runs: Runs, seconds: str) -> float:
    """Give all tokens over all seconds: the median over repeats."""
    repeats = zip(*runs.values(), strict=True)
    return float(
        median(sum(len(run["ids"]) for run in of) / sum(run[seconds] for run in of) for of in repeats)
    )


def _ratio(lead: Runs, other: Runs, seconds: str) -> dict[str, float]:
    """Compare the runs of one prompt in one repeat; prompts are drawn again within their category."""
    ratios: dict[str, list[list[float]]] = {}
    for name, of in lead.items():
        pairs = zip(of, other[name], strict=True)
        own = [len(a["ids"]) / a[seconds] * b[seconds] / len(b["ids"]) for a, b in pairs]
        ratios.setdefault(of[0]["category"], []).append(own)
    found = bootstrap(list(ratios.values()))
    return {"ratio": found.value, "low": found.low, "high": found.high}


def _same(runs: Runs, reference: Runs | None) -> dict[str, int | None]:
    """Count the prompts that gave the ids of the reference in every repeat."""
    if reference is None:
        return {"prompts": len(runs), "same_ids": None}
    same = [all(run["ids"] == reference[name][0]["ids"] for run in of) for name, of in runs.items()]
    return {"prompts": len(same), "same_ids": sum(same)}


def print_figures(found: Sequence[Line]) -> None:
    """Print the tables of what `figures` gives."""
    rows: dict[str, list[Line]] = {}
    for line in found:
        rows.setdefault(line["contender"], []).append(line)
    if not rows:
        return
    lead = next(iter(rows))
    columns = [line["category"] for line in rows[lead]]
    print(f"tokens a second, and prompts that gave the ids of {REFERENCE}\n")
    speeds = [
        [name, *(f"{line['tokens_per_second']:.1f}" for line in of), _ids(of[-1])]
        for name, of in rows.items()
    ]
    print_table(["", *columns, "same ids"], speeds, right=[*columns, "same ids"])
    if len(rows) > 1:
        print(f"\n{lead} is so many times as fast as\n")
        others = [[name, *map(_interval, of)] for name, of in rows.items() if name != lead]
        print_table(["", *columns], others, right=columns)


def _ids(line: Line) -> str:
    return "-" if line["same_ids"] is None else f"{line['same_ids']}/{line['prompts']}"


def _interval(line: Line) -> str:
    return f"{line['ratio']:.2f} ({line['low']:.2f}-{line['high']:.2f})"
