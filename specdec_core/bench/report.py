"""What a bench found, as one object: for `--json`, the table and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec_core.bench.cost import CostCurve
from specdec_core.bench.forecast import predict
from specdec_core.bench.methods import PLAIN
from specdec_core.bench.record import Record
from specdec_core.bench.statistics import LEVEL, RESAMPLES
from specdec_core.bench.summary import ALL, Figures, summarize


def make_report(record: Record, baseline: str, skipped: dict[str, str]) -> dict[str, Any]:
    """Sum up all that was measured.

    skipped: methods that could not take a batch size, as `name at batch N`, and why.

    Returns:
        settings; starts (argv, environment and time of each); baseline; results: a list of sections, one for
        each batch size and temperature, with figures by category and method; costs: t_v(m); waits: of the
        host for a CUDA device, round by round, with their places; skipped.
    """
    settings = {k: v for k, v in next(record.of("settings")).items() if k != "kind"}
    curves = {line["batch"]: CostCurve.of(line) for line in record.of("cost")}
    units = list(record.units().values())
    sections: dict[tuple[int, float], list[dict[str, Any]]] = {}
    for unit in units:
        sections.setdefault((unit["batch"], unit["temperature"]), []).append(unit)
    return {
        "settings": settings,
        "starts": [{k: v for k, v in line.items() if k != "kind"} for line in record.of("start")],
        "baseline": baseline,
        "level": LEVEL,
        "resamples": RESAMPLES,
        "results": [
            _section(own, batch, temperature, baseline, curves.get(batch))
            for (batch, temperature), own in sections.items()
        ],
        "costs": [curve.to_dict() for curve in curves.values()],
        "waits": [{k: v for k, v in line.items() if k != "kind"} for line in record.of("waits")],
        "skipped": skipped,
    }


def _section(
    units: Sequence[dict[str, Any]], batch: int, temperature: float, baseline: str, curve: CostCurve | None
) -> dict[str, Any]:
    methods = list(units[0]["runs"])
    against = baseline if baseline in methods else PLAIN
    categories = list(dict.fromkeys(unit["category"] for unit in units))
    parts = [(name, [unit for unit in units if unit["category"] == name]) for name in categories]
    if len(parts) > 1:
        parts.insert(0, (ALL, list(units)))
    return {
        "batch": batch,
        "temperature": temperature,
        "baseline": against,
        "categories": [
            {"category": name, "methods": _rows(own, methods, against, curve)} for name, own in parts
        ],
    }


def _rows(
    units: Sequence[dict[str, Any]], methods: Sequence[str], baseline: str, curve: CostCurve | None
) -> list[dict[str, Any]]:
    figures = {method: summarize(units, method, baseline) for method in methods}
    plain = figures[PLAIN]
    return [{**figures[method].to_dict(), **_predicted(figures[method], plain, curve)} for method in methods]


def _predicted(method: Figures, plain: Figures, curve: CostCurve | None) -> dict[str, Any]:
    """Put the formula's figures beside the measured ones; nothing for plain decoding itself."""
    if curve is None or method.method == PLAIN:
        return {}
    measured = method.speedup.value / plain.speedup.value  # over plain decoding, whatever the baseline
    prediction = predict(method, plain, curve, measured)
    return {} if prediction is None else {"over_plain": measured, **prediction.to_dict()}


def verdict(row: Mapping[str, Any], baseline: str) -> str:
    """Say in words whether a method is faster than the baseline, as far as the interval tells."""
    ratio, low, high = row["speedup"], row["speedup_low"], row["speedup_high"]
    if row["method"] == baseline:
        return "the baseline"
    if low > 1:
        return f"{ratio:.2f}x as fast as {baseline}"
    if high < 1:
        return f"slower than {baseline}: {ratio:.2f}x its speed"
    return f"no difference that shows ({ratio:.2f}x, between {low:.2f}x and {high:.2f}x)"


def slower_in(method: str, parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the categories in which a method is surely slower than the baseline; `parts` begins with all."""
    return [
        f"{part['category']} ({row['speedup']:.2f}x)"
        for part in parts[1:]
        for row in part["methods"]
        if row["method"] == method and row["speedup_high"] < 1
    ]


def ids_shown(row: Mapping[str, Any], section: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Say how many prompts gave the baseline's ids; a dash where nobody promised it."""
    sampled = bool(section["temperature"])
    names = (row["method"], section["baseline"])
    if sampled and (settings["seed"] is None or any(map(_draws_its_own, names))):
        return "-"
    return f"{row['same_ids']}/{row['prompts']}"


def _draws_its_own(method: str) -> bool:
    """Whether it is not specdec that draws, by a seed that makes one text of it."""
    return method.startswith(("hf", "process:"))


def prediction_text(row: Mapping[str, Any]) -> str:
    """Give the prediction in a sentence; empty where there is none."""
    if "predicted_speedup" not in row:
        return ""
    cost = row["cost_per_token"]
    drafted = "" if cost is None else f", c = {cost:.3f}"
    said = (
        f"predicted {row['predicted_speedup']:.2f}x over plain decoding, measured {row['over_plain']:.2f}x "
        f"({row['tokens_per_round']:.2f} tokens a round{drafted})"
    )
    return f"{said}: {'; '.join(row['reasons'])}" if row["reasons"] else said
