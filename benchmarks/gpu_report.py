"""What `gpu_check.py` says: marks met or missed, tables, and the file of both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Line = dict[str, Any]

HF_FACTOR = 5.0  # plain decoding with graphs over transformers' eager generation
MOST_FOR_64 = 1.25  # t_v(64) / t_v(1) at batch 1 behind the fewer slots
CLOSE = 0.10  # measured speed-up against the formula's


@dataclass(frozen=True)
class Mark:
    """One thing to reach, and what was measured."""

    text: str
    met: bool | None  # None: not measured
    figures: str

    def __str__(self) -> str:
        state = "not measured" if self.met is None else "met" if self.met else "MISSED"
        return f"{state}: {self.text}: {self.figures}"


def fastest_plain(lines: Sequence[Line], model: str) -> tuple[float, str] | None:
    """Find the fastest plain decoding of a model: tokens a second, and which."""
    known = [(line["rate"], line["mode"]) for line in _of(lines, "plain", model)]
    known += [(line["plain_rate"], line["mode"]) for line in _of(lines, "speculation", model)]
    known += [(line["rate"], "transformers") for line in _of(lines, "hf", model)]
    return max(known, default=None)


def marks(lines: Sequence[Line]) -> list[Mark]:
    """Compare with the marks."""
    found = []
    for model in _models(lines):
        found += [_against_hf(lines, model), _of_transfers(lines, model), _of_64(lines, model)]
        found += [_of_c(lines, model), _of_formula(lines, model)]
    return found


def _against_hf(lines: Sequence[Line], model: str) -> Mark:
    text = f"{model}: plain decoding with graphs at least {HF_FACTOR:g}x eager transformers"
    ours = next((x["rate"] for x in _of(lines, "plain", model) if x["mode"] == "graphs"), None)
    theirs = next((x["rate"] for x in _of(lines, "hf", model)), None)
    if ours is None or theirs is None:
        return Mark(text, None, "-")
    figures = f"{ours:.1f} against {theirs:.1f} tokens/s, {ours / theirs:.2f}x"
    return Mark(text, ours >= HF_FACTOR * theirs, figures)


def _of_transfers(lines: Sequence[Line], model: str) -> Mark:
    text = f"{model}: one host transfer a round"
    known = {x["drafter"]: x for x in _of(lines, "transfers", model) if x["counts"]}
    if not known:
        return Mark(text, None, "-")
    figures = ", ".join(f"{name} {line['transfers_a_round']:.1f}" for name, line in known.items())
    extra = sorted({place for line in known.values() for place in line["places"] if max(line["counts"]) > 1})
    met = all(max(line["counts"]) <= 1 for line in known.values())
    return Mark(text, met, figures + ("" if met else f"; waits at {', '.join(extra)}"))


def _of_64(lines: Sequence[Line], model: str) -> Mark:
    text = f"{model}: blocks of 64 at most {MOST_FOR_64:g}x the time of one token (graphs, batch 1)"
    costs = [x for x in _of(lines, "cost", model) if x["batch"] == 1 and x["mode"] == "graphs"]
    first = min(costs, key=lambda x: x["slots"], default=None)
    if first is None or "64" not in first["ratio"]:
        return Mark(text, None, "-")
    ratio = first["ratio"]["64"]
    return Mark(text, ratio <= MOST_FOR_64, f"{ratio:.3f} behind {first['slots']} slots")


def _of_c(lines: Sequence[Line], model: str) -> Mark:
    text = f"{model}: the draft cost c of small_model with captured steps is measured"
    known: dict[str, list[float]] = {}
    for x in _of(lines, "speculation", model):
        if x["drafter"].startswith("small_model") and x["mode"] == "graphs" and x["c"] is not None:
            known.setdefault(x["drafter"], []).append(x["c"])
    figures = "; ".join(f"{name}: {', '.join(f'{c:.3f}' for c in cs)}" for name, cs in known.items())
    return Mark(text, True if known else None, figures or "-")


def _of_formula(lines: Sequence[Line], model: str) -> Mark:
    text = f"{model}: speculation within {CLOSE:.0%} of the formula (graphs)"
    ours = [x for x in _of(lines, "speculation", model) if x["mode"] == "graphs"]
    ratios = {f"{x['drafter']} k={x['k']}": x["measured_over_predicted"] for x in ours}
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
    rows = []
    for line in [*_of(lines, "hf"), *_of(lines, "plain")]:
        mode = "transformers generate" if line["step"] == "hf" else line["mode"]
        share = line.get("bandwidth_share")
        cells = [line["model"], mode, f"{line['rate']:.1f}", f"{line['step_ms']:.2f}"]
        rows.append([*cells, "" if share is None else f"{share:.0%}"])
    return _table("Plain decoding", ["model", "mode", "tokens/s", "ms a token", "bandwidth reached"], rows)


def _costs(lines: Sequence[Line]) -> list[str]:
    rows = []
    for line in _of(lines, "cost"):
        shown = [f"{m}: {ms:.2f} ({line['ratio'][m]:.2f})" for m, ms in line["ms"].items()]
        rows.append([line["model"], line["mode"], str(line["batch"]), str(line["slots"]), ", ".join(shown)])
    head = ["model", "mode", "batch", "slots", "m: ms (over one token)"]
    return _table("Cost of a block, t_v(m)", head, rows)


def _speculation(lines: Sequence[Line]) -> list[str]:
    rows = []
    for x in _of(lines, "speculation"):
        best = fastest_plain(lines, x["model"])
        assert best is not None
        scale = x["plain_rate"] / best[0]
        rows.append(
            [
                *(x["model"], x["mode"], x["drafter"], str(x["k"]), f"{x['rate']:.1f}"),
                f"{x['rate'] / best[0]:.2f} ({best[1]})",
                f"{x['predicted_own_mode'] * scale:.2f}",
                f"{x['measured_over_predicted']:.3f}",
                f"{x['tokens_per_round']:.2f}",
                f"{x['verify_cost']:.2f}",
                "" if x["c"] is None else f"{x['c']:.3f}",
                f"{x['target_ms']:.2f} + {x['draft_ms']:.2f} + {x['other_ms']:.2f}",
                "yes" if x["same_text"] else "no",
            ]
        )
    head = [
        "model",
        "mode",
        "drafter",
        "k",
        "tokens/s",
        "over the fastest plain",
        "formula",
        "measured/formula",
    ]
    head += ["tokens a round", "t_v(m)/t_v(1)", "c", "ms verify + draft + other", "same text"]
    return _table("Speculation", head, rows)


def _transfers(lines: Sequence[Line]) -> list[str]:
    rows = [
        [x["model"], x["drafter"], str(x["counts"]), ", ".join(x["places"])] for x in _of(lines, "transfers")
    ]
    return _table("Waits for the device, round by round", ["model", "drafter", "waits", "where"], rows)


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


def _of(lines: Iterable[Line], step: str, model: str | None = None) -> list[Line]:
    return [line for line in lines if line["step"] == step and model in (None, line["model"])]


def _models(lines: Iterable[Line]) -> list[str]:
    return list(dict.fromkeys(line["model"] for line in lines if "model" in line))


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
