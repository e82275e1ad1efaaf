"""The page of `specdec bench --html`, made of a report that a test writes."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import pytest
from cli_support import error_of

from specdec_core.bench.page import make_page

SVG = "{http://www.w3.org/2000/svg}"


def row(method: str, speedup: float, **changes: Any) -> dict[str, Any]:
    """Figures of a method: 100 tokens in a second over its speed-up."""
    values: dict[str, Any] = {
        "method": method,
        "prompts": 2,
        "new_tokens": 100,
        "seconds": 1 / speedup,
        "tokens_per_second": 100 * speedup,
        "speedup": speedup,
        "speedup_low": speedup * 0.9,
        "speedup_high": speedup * 1.05,
        "same_ids": 2,
        "forwards": 60,
        "acceptance_rate": 0.5,
        "mean_acceptance_length": 1.8,
        "mean_drafted": 3.9,
        "acceptance_by_depth": [0.5, 0.25],
        "prefill_seconds": 0.1 / speedup,
        "draft_seconds": 0.2 / speedup,
        "target_seconds": 0.6 / speedup,
        "other_seconds": 0.1 / speedup,
    }
    return values | changes


def report_of(*names: str, categories: tuple[str, ...] = ("all", "code", "maths")) -> dict[str, Any]:
    """A report of one section; the first method beside `none` is faster, each further one slower."""
    plain = row("none", 1.0, speedup_low=1.0, speedup_high=1.0, acceptance_by_depth=None)
    rows = [plain, *(row(name, 2.0 / 4**i) for i, name in enumerate(names))]
    rows[1] |= {
        "predicted_speedup": 2.1,
        "over_plain": 2.0,
        "tokens_per_round": 1.75,
        "cost_per_token": 0.05,
        "reasons": ["drafting costs 0.20 forwards a round"],
    }
    return {
        "settings": {
            "target": "models/a-model",
            "device_name": "a machine",
            "dtype": "float32",
            "threads": 2,
            "questions": {"source": "built-in", "count": 2, "digest": "abc"},
            "prompts": "chat",
            "max_new_tokens": 64,
            "repeats": 3,
            "seed": None,
        },
        "starts": [{"argv": ["specdec", "bench"], "time": "2026-01-01T00:00:00+0000"}],
        "results": [
            {
                "batch": batch,
                "temperature": temperature,
                "baseline": "none",
                "categories": [{"category": name, "methods": rows} for name in categories],
            }
            for batch, temperature in ((1, 0.0), (4, 0.8))
        ],
        "costs": [{"batch": 1, "context": 77, "widths": [[1, 0.01, 1.0], [2, 0.011, 1.1], [5, 0.02, 2.0]]}],
        "waits": [{"method": "quick", "counts": [1, 1, 2], "places": ["a.py:1 (4)"]}],
        "skipped": {"hf:prompt_lookup at batch 4": "one prompt at a time"},
    }


def parsed(report: dict[str, Any]) -> ElementTree.Element:
    return ElementTree.fromstring(make_page(report))


def words_of(root: ElementTree.Element) -> str:
    return " ".join("".join(root.itertext()).split())


def test_what_it_says() -> None:
    words = words_of(parsed(report_of("quick", "slow")))
    for said in (
        "specdec bench: a-model",
        "a machine, float32, 2 threads. 2 questions (chat prompts), at most 64 new tokens, 3 repeats.",
        "Batch 1, greedy",
        "Batch 4, sampled at temperature 0.8",
        "quick: 2.00x as fast as none.",
        "slow: slower than none: 0.50x its speed.",
        "2.00x (1.80-2.10)",
        "predicted 2.10x over plain decoding, measured 2.00x (1.75 tokens a round, c = 0.050): drafting",
        "Batch 1, behind 77 tokens",
        "hf:prompt_lookup at batch 4: one prompt at a time",
        "waits for the device, round by roundquick: 1 1 2",
        "2026-01-01T00:00:00+0000",
    ):
        assert said in words


def test_every_chart_has_a_title_and_its_marks_their_figures() -> None:
    root = parsed(report_of("quick", "slow"))
    charts = list(root.iter(f"{SVG}svg"))
    labels = [chart.get("aria-label") for chart in charts]
    assert len(labels) == len(set(labels)) == 2 * (3 + 3 + 1) + 1
    assert [chart.find(f"{SVG}title").text for chart in charts] == labels  # type: ignore[union-attr]
    tips = Counter(found.text for found in root.iter(f"{SVG}title"))
    assert tips["quick: 2.00x (1.80-2.10)"] == 2 * 3
    assert tips["quick, depth 2: 25%"] == 2 * 3
    assert tips["drafting: 1.00 ms (20%)"] == 2  # of `quick`, in each section
    assert tips["m = 5: 2.00x, 20.00 ms"] == 1


def test_it_needs_nothing_else_and_names_nothing_twice() -> None:
    text = make_page(report_of("quick", "slow"))
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'xlink:href="#([^"]*)"|url\(#([^)]*)\)', text)) <= {
        pair for name in ids for pair in ((name, ""), ("", name))
    }
    for outside in ("<script", "<link", "<img", "@import", "src="):
        assert outside not in text
    links = set(re.findall(r"https?://[^\"]+", text))
    assert links <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert text == make_page(report_of("quick", "slow"))  # no times, no chance


@pytest.mark.filterwarnings("error")
def test_data_cannot_break_it() -> None:
    """Neither as markup nor as mathematics, which matplotlib would set."""
    evil, dear = "<script>alert(1)</script>&\"'", "x:cost=$\\frac$"
    report = report_of(evil, dear, "模型", categories=("all", evil, "{{ 7 * 7 }}"))
    report["settings"]["target"] = evil
    report["starts"][0]["argv"] = ["specdec", evil]
    text = make_page(report)
    root = ElementTree.fromstring(text)
    assert "<script" not in text
    assert not list(root.iter("script"))
    words = words_of(root)
    for said in (evil, dear, "模型", "{{ 7 * 7 }}"):
        assert said in words
    assert any(chart.get("aria-label", "").count(evil) for chart in root.iter(f"{SVG}svg"))


def test_methods_of_which_little_is_known() -> None:
    """A program tells its texts alone; without drafts there is nothing to say about their acceptance."""
    report = report_of("process:x", categories=("all",))
    unknown = ("forwards", "acceptance_rate", "mean_acceptance_length", "mean_drafted", "acceptance_by_depth")
    parts = ("prefill_seconds", "draft_seconds", "target_seconds")
    for section in report["results"]:
        section["categories"][0]["methods"][1] |= dict.fromkeys((*unknown, *parts))
    report["costs"][0]["widths"] = [[1, 0.01, 1.0]]
    root = parsed(report)
    words = words_of(root)
    assert "Acceptance by depth" not in words
    assert "What checking costs" not in words
    rows = [[cell.text for cell in line.iter("td")] for line in root.iter("tr")]
    assert ["process:x", "200.0", "2.00x (1.80-2.10)", "2.10x", *["-"] * 4, "100", "2/2"] in rows


def test_settings_of_matplotlib_neither_show_nor_stay() -> None:
    report = report_of("quick")
    expected = make_page(report)
    with mpl.rc_context({"svg.fonttype": "path", "axes.facecolor": "red", "font.size": 30}):
        before = dict(mpl.rcParams)
        assert make_page(report) == expected
        assert dict(mpl.rcParams) == before


def test_without_the_extra_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from specdec_core.cli import bench

    monkeypatch.setattr(bench, "find_spec", {}.get)
    monkeypatch.setattr(bench, "discover", lambda *_: pytest.fail("it goes on"))
    said = error_of("bench", "--html", str(tmp_path / "x.html"))
    assert said == "--html needs matplotlib: pip install 'specdec-core[bench]'"


def test_the_report_that_is_printed_is_enough(tmp_path: Path) -> None:
    """What `--json` prints, read back, makes the same page."""
    report = report_of("quick", "slow")
    assert make_page(json.loads(json.dumps(report))) == make_page(report)
