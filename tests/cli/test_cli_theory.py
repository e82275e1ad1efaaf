"""`specdec theory`."""

from __future__ import annotations

import pytest
from cli_support import error_of, objects, said


def test_the_forecast_of_the_paper() -> None:
    text = said("theory", "--acceptance", "0.8", "--draft-tokens", "4", "--cost", "0.05")
    assert text.startswith("k=4: 3.36 tokens a round, 2.80x the speed of plain decoding")
    text = said("theory", "--acceptance", ".5", "--draft-tokens", "4", "--cost", "0.05")
    assert text.startswith("k=4: 1.94 tokens a round, 1.61x")


def test_the_table_marks_the_best_of_nine_draft_lengths() -> None:
    lines = said("theory", "--acceptance", "0.8", "--cost", "0.2").splitlines()
    assert [line.split()[0] for line in lines[3:]] == [str(k) for k in range(9)]
    assert [line.split()[0] for line in lines[3:] if line.endswith("best")] == ["4"]
    assert lines[0].startswith("k=4: ")  # without --draft-tokens


def test_a_best_at_the_end_of_the_table_says_so() -> None:
    text = said("theory", "--acceptance", "0.9", "--cost", "0.01")
    assert (
        "The longest draft here is the best: longer ones may be better. A larger --draft-tokens shows more."
        in text
    )
    assert [line.split()[0] for line in text.splitlines() if line.endswith("best here")] == ["8"]
    assert "Give the shares of more depths." in said("theory", "--by-depth", "0.9,0.8", "--cost", "0.1")
    assert "longer ones" not in said("theory", "--acceptance", "0.8", "--cost", "0.2")


def test_a_longer_draft_lengthens_the_table() -> None:
    assert len(objects("theory", "--acceptance", "0.8", "--draft-tokens", "12")["table"]) == 13


def test_acceptance_by_depth() -> None:
    found = objects("theory", "--by-depth", "0.9,0.7,0.5", "--cost", "0.1")
    assert found["by_depth"] == [0.9, 0.7, 0.5]
    assert [row["expected_tokens"] for row in found["table"]] == pytest.approx([1, 1.9, 2.6, 3.1])
    assert found["table"][2]["speedup"] == pytest.approx(2.6 / 1.2)
    assert objects("theory", "--by-depth", "0.9,0.7", "--draft-tokens", "1")["draft_tokens"] == 1


def test_json_has_the_forecast_and_what_it_was_made_from() -> None:
    found = objects("theory", "--acceptance", "0.8", "--draft-tokens", "4", "--cost", "0.05")
    table = found.pop("table")
    assert found == {
        "draft_tokens": 4,
        "expected_tokens": pytest.approx(3.3616),
        "speedup": pytest.approx(2.8013, abs=1e-4),
        "acceptance": 0.8,
        "by_depth": None,
        "cost": 0.05,
        "best_draft_tokens": 8,
        "longer_may_be_better": True,
    }
    assert table[4] == {name: found[name] for name in ("draft_tokens", "expected_tokens", "speedup")}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("", "give one of --acceptance A and --by-depth"),
        ("--acceptance 0.5 --by-depth 0.5", "give one of --acceptance A and --by-depth"),
        ("--acceptance 1.5", "acceptance=1.5 is not allowed"),
        ("--acceptance nan", "acceptance=nan is not allowed"),
        ("--acceptance much", "'--acceptance': much is no number"),
        ("--acceptance 0.5 --cost -1", "cost=-1 is not allowed"),
        ("--acceptance 0.5 --draft-tokens -1", "--draft-tokens -1: it must be at least 0"),
        ("--acceptance 0.5 --draft-tokens 1.9", "'--draft-tokens': 1.9 is no whole number"),
        ("--by-depth 0.5,x", "--by-depth 0.5,x: it must be numbers"),
        ("--by-depth 0.5,0.6", "0.6 at depth 2 is more than 0.5"),
        ("--by-depth 0.5 --draft-tokens 2", "--by-depth has shares for 1 depths"),
    ],
)
def test_what_is_wrong_is_one_line(args: str, words: str) -> None:
    assert words in error_of("theory", *args.split())
