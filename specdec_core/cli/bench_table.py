"""What `specdec bench` prints: a table for each batch size and temperature, and what it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec_core.cli.tables import print_table, print_text

Row = Mapping[str, Any]

_COLUMNS = (
    "method",
    "tokens/s",
    "speed-up",
    "95% interval",
    "predicted",
    "accepted",
    "length",
    "drafted",
    "forwards",
    "tokens",
    "draft",
    "target",
    "other",
    "same ids",
)


def print_report(report: Mapping[str, Any]) -> None:
    """Print the report of `make_report`."""
    settings = report["settings"]
    print_text(
        f"{settings['target']}, {settings['dtype']} on {settings['device']} ({settings['device_name']}, "
        f"{settings['threads']} threads); {settings['questions']['count']} questions of "
        f"{settings['questions']['source']}, {settings['prompts']} prompts, at most "
        f"{settings['max_new_tokens']} tokens, {settings['repeats']} repeats"
    )
    for section in report["results"]:
        _print_section(section, settings)
    for name, reason in report["skipped"].items():
        print(f"\nleft out: {name}: {reason}")
    _print_costs(report["costs"])
    _print_waits(report["waits"])


def _print_section(section: Row, settings: Row) -> None:
    kind = "greedy" if not section["temperature"] else f"temperature {section['temperature']:g}"
    parts, baseline = section["categories"], section["baseline"]
    print(f"\nbatch {section['batch']}, {kind}; speed-up over {baseline}\n")
    rows = [_cells(row, section, settings) for row in parts[0]["methods"]]
    print_table(_COLUMNS, rows, right=_COLUMNS[1:])
    if len(parts) > 1:
        print()
        _print_categories(parts)
    print()
    for row in parts[0]["methods"]:
        for said in _sentences(row, parts, section, settings):
            print_text(f"{row['method']}: {said}")


def _cells(row: Row, section: Row, settings: Row) -> list[str]:
    from specdec_core.bench.report import ids_shown

    def number(name: str, form: str, after: str = "") -> str:
        return "-" if row.get(name) is None else f"{row[name]:{form}}{after}"

    def share(name: str) -> str:
        return "-" if row[name] is None else f"{row[name] / row['seconds']:.0%}"

    return [
        row["method"],
        number("tokens_per_second", ".1f"),
        number("speedup", ".2f", "x"),
        f"{row['speedup_low']:.2f}-{row['speedup_high']:.2f}",
        number("predicted_speedup", ".2f", "x"),
        number("acceptance_rate", ".0%"),
        number("mean_acceptance_length", ".2f"),
        number("mean_drafted", ".2f"),
        number("forwards", ".0f"),
        number("new_tokens", ".6g"),
        share("draft_seconds"),
        share("target_seconds"),
        share("other_seconds"),
        ids_shown(row, section, settings),
    ]


def _print_categories(parts: Sequence[Row]) -> None:
    """Print speed-ups with their intervals: a line for each category, a column for each method."""
    names = [row["method"] for row in parts[0]["methods"]]
    rows = [
        [
            part["category"],
            *(
                f"{row['speedup']:.2f}x ({row['speedup_low']:.2f}-{row['speedup_high']:.2f})"
                for row in part["methods"]
            ),
        ]
        for part in parts[1:]
    ]
    print_table(("category", *names), rows, right=names)


def _sentences(row: Row, parts: Sequence[Row], section: Row, settings: Row) -> list[str]:
    """Say plainly what a method gave, where it lost, and whether it said the same."""
    from specdec_core.bench.report import ids_shown, prediction_text, slower_in, verdict

    baseline, name = section["baseline"], row["method"]
    found = [] if name == baseline else [verdict(row, baseline)]
    slower = slower_in(name, parts)
    if slower and name != baseline:
        found.append(f"slower than {baseline} in {', '.join(slower)}")
    if said := prediction_text(row):
        found.append(said)
    if ids_shown(row, section, settings) != "-" and row["same_ids"] < row["prompts"]:
        found.append(
            f"{row['prompts'] - row['same_ids']} of {row['prompts']} prompts gave other ids than {baseline}; "
            f"`specdec compare {baseline} {name}` tells a near-tie from a bug"
        )
    return found


def _print_costs(costs: Sequence[Row]) -> None:
    for cost in costs:
        if len(cost["widths"]) > 1:
            said = ", ".join(f"{m}: {ratio:.2f}x" for m, _, ratio in cost["widths"])
            where = f"batch {cost['batch']}, behind {cost['context']} tokens"
            print(f"\ncost of a block of m tokens, {where}: {said}")


def _print_waits(waits: Sequence[Row]) -> None:
    """Say how often a round waits for a GPU: once is what it takes to read what was accepted."""
    for found in waits:
        counts = found["counts"]
        if counts:
            where = f": {', '.join(found['places'])}" if max(counts) > 1 else ""
            mean = sum(counts) / len(counts)
            print_text(f"\n{found['method']}: a round waits {mean:.3g} times for the device{where}")
