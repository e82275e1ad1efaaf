"""What `gpu_check.py` says of the bench's reports: marks met or missed, tables, and the file of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Line = dict[str, Any]

HF_FACTOR = 5.0  # plain decoding with graphs over transformers' eager generation
MOST_FOR_64 = 1.25  # t_v(64) / t_v(1) at batch 1 behind the fewer slots
CLOSE = 0.10  # measured speed-up against the formula's, both of what stands behind the prompt


@dataclass(frozen=True)
class Mark:
    """One thing to reach, and what was measured."""

    text: str
    met: bool | None  # None: not measured
    figures: str

    def __str__(self) -> str:
        state = "not measured" if self.met is None else "met" if self.met else "MISSED"
        return f"{state}: {self.text}: {self.figures}"


def marks(lines: Sequence[Line]) -> list[Mark]:
    """Compare with the marks."""
    found = []
    for model in _models(lines):
        found += [_against_hf(lines, model), _of_transfers(lines, model), _of_64(lines, model)]
        found += [_of_c(lines, model), _of_formula(lines, model)]
    return found


def _against_hf(lines: Sequence[Line], model: str) -> Mark:
    text = f"{model}: plain decoding with graphs at least {HF_FACTOR:g}x eager transformers"
    rows = [row for row in _rows(lines, model) if row["what"] == "plain"]
    ours = next((_rate(x) for x in rows if x["method"] == "none" and x["mode"] == "graphs"), None)
    theirs = next((_rate(x) for x in rows if x["method"] == "hf"), None)
    if ours is None or theirs is None:
        return Mark(text, None, "-")
    figures = f"{ours:.1f} against {theirs:.1f} tokens/s, {ours / theirs:.2f}x"
    return Mark(text, ours >= HF_FACTOR * theirs, figures)


def _of_transfers(lines: Sequence[Line], model: str) -> Mark:
    text = f"{model}: one host transfer a round"
    known = [x for x in _parts(lines, "waits", model) if x["counts"] and x["mode"] == "graphs"]
    if not known:
        return Mark(text, None, "-")
    figures = ", ".join(f"{x['method']} {sum(x['counts']) / len(x['counts']):.1f}" for x in known)
    extra = sorted({place for x in known for place in x["places"] if max(x["counts"]) > 1})
    met = all(max(x["counts"]) <= 1 for x in known)
    return Mark(text, met, figures + ("" if met else f"; waits at {', '.join(extra)}"))


def _of_64(lines: Sequence[Line], model: str) -> Mark:
    text = f"{model}: blocks of 64 at most {MOST_FOR_64:g}x the time of one token (graphs, batch 1)"
    costs = [x for x in _parts(lines, "costs", model) if x["batch"] == 1 and x["mode"] == "graphs"]
    found = {x["slots"]: ratio for x in costs for m, _, ratio in x["widths"] if m == 64}
    if not found:
        return Mark(text, None, "-")
    slots = min(found)
    return Mark(text, found[slots] <= MOST_FOR_64, f"{found[slots]:.3f} behind {slots} slots")


def _of_c(lines: Sequence[Line], model: str) -> Mark:
    text = f"{model}: the draft cost c of small_model with captured steps is measured"
    known: dict[str, list[float]] = {}
    for x in _speculating(lines, model):
        drafter = x["method"].partition("@")[0]
        if x["mode"] == "graphs" and not drafter.startswith("synthetic") and x["cost_per_token"] is not None:
            known.setdefault(drafter, []).append(x["cost_per_token"])
    figures = "; ".join(f"{name}: {', '.join(f'{c:.3f}' for c in cs)}" for name, cs in known.items())
    return Mark(text, True if known else None, figures or "-")


def _of_formula(lines: Sequence[Line], model: str) -> Mark:
    text = f"{model}: speculation within {CLOSE:.0%} of the formula (graphs)"
    ratios = {x["method"]: _over_formula(x) for x in _speculating(lines, model) if x["mode"] == "graphs"}
    if not ratios:
        return Mark(text, None, "-")
    far = {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > CLOSE}
    figures = f"{min(ratios.values()):.3f} to {max(ratios.values()):.3f}"
    outside = "; outside: " + ", ".join(f"{name} {ratio:.3f}" for name, ratio in far.items())
    return Mark(text, not far, figures + (outside if far else ""))


def markdown(lines: Sequence[Line]) -> str:
    """Put everything into tables."""
    parts = ["# GPU check", "", *_facts(lines), "", "## Marks", ""]
    parts += [f"- {mark}" for mark in marks(lines)]
    parts += [*_plain(lines), *_costs(lines), *_speculation(lines), *_transfers(lines), *_troubles(lines)]
    return "\n".join(parts) + "\n"


def _facts(lines: Sequence[Line]) -> list[str]:
    shown = ("environment", "bandwidth", "tests")
    skipped = ("step", "at")
    return [
        f"- {line['step']}: " + ", ".join(f"{k} {_short(v)}" for k, v in line.items() if k not in skipped)
        for line in lines
        if line["step"] in shown
    ]


def _plain(lines: Sequence[Line]) -> list[str]:
    """Say how fast plain decoding is, and at what share of the device's own copy it reads the weights."""
    copies = [line["copy_terabytes_a_second"] for line in lines if line["step"] == "bandwidth"]
    read = {line["model"]: line["bytes_read"] for line in lines if line["step"] == "model"}
    rows = []
    for x in _rows(lines):
        if x["what"] == "plain" and (rate := _rate(x)):
            reached = copies and x["method"] == "none" and read[x["model"]] * rate / copies[0] / 1e12
            mode = "transformers generate" if x["method"] == "hf" else x["mode"]
            forward = "" if x["method"] == "hf" else f"{_each_ms(x, x['target_seconds']):.2f}"
            share = f"{reached:.0%}" if reached else ""
            rows.append([x["model"], mode, f"{rate:.1f}", f"{1000 / rate:.2f}", forward, share])
    head = ["model", "mode", "tokens/s", "ms a token", "ms a forward", "bandwidth reached"]
    return _table("Plain decoding", head, rows)


def _costs(lines: Sequence[Line]) -> list[str]:
    rows = []
    for x in _parts(lines, "costs"):
        if x["widths"][-1][0] == 64:
            shown = [f"{m}: {1000 * seconds:.2f} ({ratio:.2f})" for m, seconds, ratio in x["widths"]]
            rows.append([x["model"], x["mode"], str(x["batch"]), str(x["slots"]), ", ".join(shown)])
    head = ["model", "mode", "batch", "slots", "m: ms (over one token)"]
    return _table("Cost of a block, t_v(m)", head, rows)


def _speculation(lines: Sequence[Line]) -> list[str]:
    rows = []
    for x in _speculating(lines):
        best, which = _fastest_plain(lines, x["model"])
        scale = _rate(x) / x["decode_speedup"] / best
        spent = x["seconds"] - x["prefill_seconds"] - x["target_seconds"] - x["draft_seconds"]
        parts = (x["target_seconds"], x["draft_seconds"], spent)
        rows.append(
            [
                *(x["model"], x["mode"], x["method"], f"{_rate(x):.1f}"),
                f"{_rate(x) / best:.2f} ({which})",
                f"{x['predicted_speedup'] * scale:.2f}",
                f"{_over_formula(x):.3f}",
                f"{x['tokens_per_round']:.2f}",
                f"{x['verify_cost']:.2f}",
                "" if x["cost_per_token"] is None else f"{x['cost_per_token']:.3f}",
                " + ".join(f"{_each_ms(x, part):.2f}" for part in parts),
                "yes" if x["same_ids"] == x["prompts"] else "no",
            ]
        )
    head = ["model", "mode", "drafter@k", "tokens/s", "over the fastest plain", "formula", "measured/formula"]
    head += ["tokens a round", "t_v(m)/t_v(1)", "c", "ms target + draft + other", "same text"]
    return _table("Speculation", head, rows)


def _transfers(lines: Sequence[Line]) -> list[str]:
    rows = [
        [x["model"], x["mode"], x["method"], str(x["counts"]), ", ".join(x["places"])]
        for x in _parts(lines, "waits")
    ]
    head = ["model", "mode", "method", "waits", "where"]
    return _table("Waits for the device, round by round", head, rows)


def _troubles(lines: Sequence[Line]) -> list[str]:
    rows = [
        [x["name"], "failed" if x["step"] == "failed" else "left out", x["reason"]]
        for x in lines
        if x["step"] in ("failed", "skipped")
    ]
    return _table("Not measured", ["step", "", "why"], rows)


def _table(title: str, head: list[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    lines = [f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows]]
    return ["", f"## {title}", "", *lines]


def _benches(lines: Iterable[Line], model: str | None = None) -> Iterator[tuple[dict[str, Any], Line]]:
    """Give what a bench was of (model, mode, what, slots), and its report."""
    for line in lines:
        if line["step"] == "bench" and model in (None, line["model"]):
            yield {name: line[name] for name in ("model", "mode", "what", "slots")}, line["report"]


def _parts(lines: Iterable[Line], part: str, model: str | None = None) -> list[Line]:
    """Give all costs, or all waits."""
    return [{**about, **one} for about, report in _benches(lines, model) for one in report[part]]


def _rows(lines: Iterable[Line], model: str | None = None) -> list[Line]:
    """Give the figures of each method; there is one prompt, and so one category."""
    return [
        {**about, "batch": section["batch"], **row}
        for about, report in _benches(lines, model)
        for section in report["results"]
        for row in section["categories"][0]["methods"]
    ]


def _speculating(lines: Iterable[Line], model: str | None = None) -> list[Line]:
    return [row for row in _rows(lines, model) if "predicted_speedup" in row]


def _rate(row: Line) -> float:
    """Tokens a second behind the prompt."""
    return float(row["decode_tokens_per_second"])


def _each_ms(row: Line, seconds: float) -> float:
    """Milliseconds of each forward behind the prompt."""
    return 1000 * seconds / sum(row["widths"].values())


def _over_formula(row: Line) -> float:
    return float(row["decode_speedup"] / row["predicted_speedup"])


def _fastest_plain(lines: Sequence[Line], model: str) -> tuple[float, str]:
    """Find the fastest plain decoding of a model: tokens a second, and which."""
    plain = [x for x in _rows(lines, model) if x["batch"] == 1 and x["what"] in ("plain", "speculation")]
    known = [(_rate(x), x["mode"]) for x in plain if x["method"] == "none"]
    return max(known + [(_rate(x), "transformers") for x in plain if x["method"] == "hf"])


def _models(lines: Iterable[Line]) -> list[str]:
    return list(dict.fromkeys(line["model"] for line in lines if "model" in line))


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
