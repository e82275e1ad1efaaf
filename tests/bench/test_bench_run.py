"""`specdec bench` from end to end, on the alphabet model."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import cli_support
import pytest
from cli_support import cli, error_of, make_model, objects, said
from transformers import LlamaForCausalLM

from specdec_core import Registry, RowDrafter, SpecdecError, hookimpl
from specdec_core.bench import runner
from specdec_core.bench.methods import Method, Run
from specdec_core.bench.ours import Ours

model = cli_support.model
Arguments = Callable[..., list[str]]

QUESTIONS = [
    {"question_id": 1, "category": "letters", "turns": ["abc", "xyz"]},
    {"question_id": 2, "category": "letters", "turns": ["cd"]},
    {"question_id": 3, "category": "copying", "turns": ["abcdefghijklmnopqrstuvwxyz"]},
]


class Foreteller(RowDrafter):
    """Drafts the alphabet, which is what the model says."""

    name = "foreteller"

    def propose_row(self, tokens: Sequence[int], budget: int) -> list[int]:
        return [(tokens[-1] + i + 1) % 250 for i in range(budget)]


class Broken(RowDrafter):
    """Fails in mid-run."""

    name = "broken"

    def propose_row(self, tokens: Sequence[int], budget: int) -> list[int]:
        raise RuntimeError("no idea")


class Learner(RowDrafter):
    """Counts how many decoders it was built for."""

    name = "learner"
    built = 0

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        type(self).built += 1
        self.capabilities = type(self.capabilities)(self.capabilities.laws, max_depth=2, learns=True)

    def propose_row(self, tokens: Sequence[int], budget: int) -> list[int]:
        return []


class Plugin:
    """What these tests add to the registry."""

    @hookimpl
    def specdec_register_drafters(self, register: Callable[[type], None]) -> None:
        for drafter in (Foreteller, Broken, Learner):
            register(drafter)


@pytest.fixture(autouse=True)
def _plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    def discover(blocked: Any = ()) -> Registry:
        registry = Registry.discover(blocked=blocked)
        registry.register(Plugin(), name="test-drafters")
        return registry

    monkeypatch.setattr("specdec_core.cli.bench.discover", discover)
    monkeypatch.setattr("specdec_core.bench.cost._CYCLES", 1)


@pytest.fixture
def arguments(model: str, tmp_path: Path) -> Arguments:
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, QUESTIONS)))

    def make(*more: str, methods: Sequence[str] = ("foreteller@4",), tokens: int = 12) -> list[str]:
        chosen = [word for name in methods for word in ("--method", name)]
        fixed = ["--target", model, "--device", "cpu", "--questions", str(file), "-n", str(tokens)]
        return ["bench", *fixed, "--ignore-eos", *chosen, *more]

    return make


def rows_of(report: dict[str, Any], category: str = "all", section: int = 0) -> dict[str, dict[str, Any]]:
    """Figures by method."""
    parts = {part["category"]: part["methods"] for part in report["results"][section]["categories"]}
    return {row["method"]: row for row in parts[category]}


# --- what it reports ------------------------------------------------------------------------------


def test_a_whole_bench(arguments: Arguments, model: str) -> None:
    methods = ["foreteller@4", "prompt_lookup@3", "hf", "hf:prompt_lookup:num_tokens=3"]
    report = objects(*arguments(methods=[*methods, f"hf:assistant:model={model},num_tokens=3"]))
    rows = rows_of(report)
    assert list(rows) == ["none", *methods, f"hf:assistant:model={model},num_tokens=3"]
    for row in rows.values():
        assert (row["prompts"], row["same_ids"], row["new_tokens"]) == (4, 4, 48)
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert row["tokens_per_second"] == pytest.approx(row["new_tokens"] / row["seconds"])
    assert (rows["none"]["speedup"], rows["none"]["forwards"], rows["none"]["drafted"]) == (1, 48, 0)
    assert rows["hf"]["forwards"] == 48
    assert rows["hf:prompt_lookup:num_tokens=3"]["forwards"] < 48
    assert rows[f"hf:assistant:model={model},num_tokens=3"]["forwards"] < 24
    assert "predicted_speedup" in rows["foreteller@4"]
    decoding = [name for name, row in rows.items() if row["decode_speedup"] is not None]
    assert decoding == ["none", "foreteller@4", "prompt_lookup@3", "hf"]  # others may draft in a first round
    assert rows["none"]["decode_speedup"] == 1
    assert all(rows[name]["decode_tokens_per_second"] > 0 for name in decoding)
    assert "predicted_speedup" not in rows["hf"]
    settings = report["settings"]
    assert settings["prompts"] == "chat"
    assert {"torch", "transformers", "specdec", "commit", "threads", "device_name"} <= set(settings)
    assert report["starts"][0]["argv"]
    [curve] = report["costs"]
    assert [width for width, _, _ in curve["widths"]] == [1, 2, 3, 5]


def test_blocks_of_the_widths_that_are_asked_for(arguments: Arguments) -> None:
    report = objects(*arguments("--limit", "1", "--block-widths", "4,1,2", methods=["foreteller@1"]))
    assert [width for width, _, _ in report["costs"][0]["widths"]] == [1, 2, 4]
    assert report["settings"]["block_widths"] == [1, 2, 4]
    assert report["waits"] == []  # there is no GPU to wait for


def test_the_first_round_is_the_prompts_own(
    arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafts, too: it gives five tokens here, and is in no figure of what stands behind the prompt."""
    monkeypatch.setattr(Ours, "steps_alone", False)
    file = tmp_path / "out.jsonl"
    objects(*arguments("--output", str(file), "--categories", "copying", methods=["foreteller@4", "hf"]))
    units = [line for line in map(json.loads, file.read_text().splitlines()) if line["kind"] == "unit"]
    for one in units:
        runs = one["runs"]
        assert (runs["none"]["first_tokens"], runs["hf"]["first_tokens"]) == (1, 1)
        drafting = runs["foreteller@4"]
        assert drafting["first_tokens"] == len(drafting["first_histogram"])
        assert sum(drafting["first_histogram"]) == 1
        assert sum(drafting["widths"].values()) == drafting["rounds"] - 1
        for run in runs.values():
            assert 0 < run["prefill_seconds"] < run["seconds"]


def test_what_transformers_prepares_is_the_prompts(
    arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that its rate behind the prompt is that of its forwards, and not the slower for a slow start."""
    generate = LlamaForCausalLM.generate

    def late(self: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return generate(self, **options)

    monkeypatch.setattr(LlamaForCausalLM, "generate", late)
    file = tmp_path / "out.jsonl"
    objects(*arguments("--output", str(file), "--categories", "copying", methods=["hf"], tokens=4))
    runs = [line["runs"]["hf"] for line in map(json.loads, file.read_text().splitlines()) if "runs" in line]
    assert all(0.2 < run["prefill_seconds"] < run["seconds"] for run in runs)


def test_where_drafts_are_right_few_forwards_are_left(arguments: Arguments) -> None:
    copying = rows_of(objects(*arguments()), "copying")["foreteller@4"]
    assert copying["forwards"] < 0.6 * copying["new_tokens"]
    assert copying["acceptance_by_depth"][0] >= 0.5


def test_the_draft_length_shows_in_what_is_drafted(arguments: Arguments) -> None:
    rows = rows_of(objects(*arguments("--limit", "1", methods=["foreteller@1", "foreteller@4"])))
    assert rows["foreteller@1"]["mean_drafted"] <= 1
    assert 1 < rows["foreteller@4"]["mean_drafted"] <= 4
    assert rows["foreteller@4"]["mean_acceptance_length"] > rows["foreteller@1"]["mean_acceptance_length"]


def test_batches_and_temperatures(arguments: Arguments) -> None:
    more = ("--batch-size", "1,3", "--temperature", "0,0.8", "--seed", "3", "--limit", "2")
    methods = ["foreteller@2", "hf", "hf:prompt_lookup"]
    report = objects(*arguments(*more, methods=methods, tokens=6))
    sections = [(section["batch"], section["temperature"]) for section in report["results"]]
    assert sections == [(1, 0), (1, 0.8), (3, 0), (3, 0.8)]
    for section in range(4):
        rows = rows_of(report, section=section)
        # With a seed `match` is chosen: the same text whatever drafts.
        assert rows["foreteller@2"]["same_ids"] == rows["foreteller@2"]["prompts"]
        assert ("hf:prompt_lookup" in rows) is (section < 2)
    assert list(report["skipped"]) == ["hf:prompt_lookup at batch 3"]
    # One copy of a prompt in a batch does not say what another says.
    assert rows_of(report, section=3)["none"]["prompts"] == 6


def test_the_table_says_what_was_slower_and_ends_well(
    arguments: Arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Ours.run

    def late(self: Ours, prompts: Any, params: Any) -> Run:
        found = run(self, prompts, params)
        found.seconds *= 1 if self.name == "none" else 100
        return found

    monkeypatch.setattr(Ours, "run", late)
    monkeypatch.setattr(Ours, "steps_alone", False)
    text = said(*arguments())
    assert "foreteller@4: slower than none: 0.0" in text
    assert re.search(r"slower than none in letters \(0.\d\dx\), copying", text)
    assert "other time" in text
    assert "chat prompts" in text


def test_another_baseline(arguments: Arguments) -> None:
    report = objects(*arguments("--baseline", "hf", "--limit", "1", "--raw", methods=["hf"]))
    rows = rows_of(report)
    assert (rows["hf"]["speedup"], rows["none"]["speedup"] == 1) == (1, False)
    assert report["settings"]["prompts"] == "raw"


def test_ids_that_differ_are_told(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Ours.run

    def garbled(self: Ours, prompts: Any, params: Any) -> Run:
        found = run(self, prompts, params)
        if self.name != "none":
            found.token_ids[0][-1] += 1
        return found

    monkeypatch.setattr(Ours, "run", garbled)
    monkeypatch.setattr(Ours, "steps_alone", False)
    text = said(*arguments())
    assert "4 of 4 prompts gave other ids than none; `specdec compare none foreteller@4`" in text


# --- resuming -------------------------------------------------------------------------------------


def test_a_second_start_goes_on_where_the_first_was_interrupted(
    arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.jsonl"
    counted = runner.checked
    runs: list[str] = []

    def stopping(method: Method, *rest: Any) -> Run:
        runs.append(method.name)
        if len(runs) == 13:
            raise KeyboardInterrupt
        return counted(method, *rest)

    monkeypatch.setattr(runner, "checked", stopping)
    done = cli(*arguments("--output", str(file)))
    assert done.exit_code == 130
    assert f"specdec: stopped; {file} keeps what was measured" in done.stderr
    before = file.read_text()
    kinds = [json.loads(line)["kind"] for line in before.splitlines()]
    # Two prompts of two methods warm up; four units of two runs follow, the fifth is not written.
    assert kinds == ["settings", "start", "answer", "cost", *["unit"] * 4]
    runs.clear()
    runs.extend([""] * 20)  # never again
    report = objects(*arguments("--output", str(file)))
    assert file.read_text().startswith(before)
    kinds = [json.loads(line)["kind"] for line in file.read_text().splitlines()]
    assert (kinds.count("unit"), kinds.count("start"), kinds.count("cost")) == (12, 2, 1)
    assert len(runs) - 20 == 4 + 8 * 2
    assert rows_of(report)["none"]["new_tokens"] == 48
    assert len(report["starts"]) == 2
    runs.clear()
    objects(*arguments("--output", str(file), "--baseline", "foreteller@4"))  # no setting of a measurement
    assert runs == []


def test_other_settings_are_refused_by_name(arguments: Arguments, tmp_path: Path) -> None:
    file = str(tmp_path / "out.jsonl")
    objects(*arguments("--output", file, "--limit", "1"))
    assert "measured with max_new_tokens 12, and now it is 13" in error_of(
        *arguments("--output", file, "--limit", "1", tokens=13)
    )
    assert "with questions" in error_of(*arguments("--output", file))
    assert "with methods" in error_of(*arguments("--output", file, "--limit", "1", methods=["foreteller@3"]))
    objects(*arguments("--output", file, "--overwrite"))


class Stepper:
    """A method whose rounds take what a list says."""

    steps_alone = True

    def __init__(self, name: str, rounds: list[float], log: list[str]) -> None:
        self.name, self.rounds, self.log, self.closed = name, rounds, log, False

    def run(self, prompts: Any, params: Any) -> Run:
        raise AssertionError("it was not asked for its rounds")

    def steps(self, prompts: Any, params: Any) -> Generator[float, None, Run]:
        used = 0.0
        try:
            for seconds in self.rounds:
                self.log.append(self.name)
                used += seconds
                yield used
        finally:
            self.closed = True
        return Run(used, [[1]], len(self.rounds))


def test_rounds_take_turns_by_the_time_they_used() -> None:
    log: list[str] = []
    group: Any = SimpleNamespace(name="g", prompts=[SimpleNamespace(name="p", ids=[1])])
    slow, fast = Stepper("slow", [3.0, 3.0], log), Stepper("fast", [1.0] * 4, log)
    runs = runner._runs([slow, fast], group, [])
    assert log == ["slow", "fast", "fast", "fast", "slow", "fast"]
    assert {name: run.seconds for name, run in runs.items()} == {"slow": 6.0, "fast": 4.0}


def test_a_failure_between_rounds_names_its_method_and_stops_the_others() -> None:
    group: Any = SimpleNamespace(name="g", prompts=[SimpleNamespace(name="p", ids=[1])])
    fine, broken = Stepper("fine", [1.0] * 9, []), Stepper("broken", ["never"], [])  # type: ignore[list-item]
    with pytest.raises(SpecdecError, match="broken failed on g: unsupported operand"):
        runner._runs([fine, broken], group, [])
    assert fine.closed


def test_by_default_rounds_take_turns_on_a_cpu(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    steps = Ours.steps

    def noted(self: Ours, prompts: Any, params: Any) -> Generator[float, None, Run]:
        rounds = steps(self, prompts, params)
        while True:
            order.append(self.name)
            try:
                yield next(rounds)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]

    monkeypatch.setattr(Ours, "steps", noted)
    rows = rows_of(objects(*arguments(methods=["foreteller@1", "foreteller@2"])))
    assert sum(a != b for a, b in pairwise(order)) > 3 * 3 * 4 * 2  # twelve units: many turns in each
    assert all(row["same_ids"] == row["prompts"] for row in rows.values())
    assert rows["none"]["forwards"] > rows["foreteller@2"]["forwards"]


def test_the_methods_take_turns(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    run = Ours.run

    def noted(self: Ours, prompts: Any, params: Any) -> Run:
        order.append(self.name)
        return run(self, prompts, params)

    monkeypatch.setattr(Ours, "run", noted)
    monkeypatch.setattr(Ours, "steps_alone", False)
    objects(*arguments(methods=["foreteller@1", "foreteller@2"]))
    measured = order[1 + 2 * 3 :]  # behind an answer and the warm-up
    assert measured[:9] == [
        *("none", "foreteller@1", "foreteller@2"),
        *("foreteller@1", "foreteller@2", "none"),
        *("foreteller@2", "none", "foreteller@1"),
    ]
    assert len(measured) == 3 * 3 * 4


def test_a_drafter_that_learns_starts_every_repeat_anew(arguments: Arguments) -> None:
    Learner.built = 0
    objects(*arguments("--limit", "1", methods=["learner"]))
    assert Learner.built == 1 + 1 + 3  # a check of the options, the warm-up's, and one a repeat


# --- failures -------------------------------------------------------------------------------------


def test_a_drafter_that_fails_ends_the_bench(arguments: Arguments) -> None:
    said = error_of(*arguments(methods=["broken"]), code=1)
    assert said.startswith("broken failed on 1#2: drafter 'broken': propose raised RuntimeError: no idea")


def test_a_lost_prompt_ends_the_bench(arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Ours.run

    def losing(self: Ours, prompts: Any, params: Any) -> Run:
        found = run(self, prompts, params)
        if self.name != "none":
            found.token_ids.pop()
        return found

    monkeypatch.setattr(Ours, "run", losing)
    assert error_of(*arguments(), code=1) == "foreteller@4 gave 0 texts for 1 prompts"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--repeats", "2"], "--repeats 2: a median needs at least 3"),
        (["--batch-size", "0"], "--batch-size 0: it must be whole numbers of at least 1"),
        (["--batch-size", "1,x"], "--batch-size x: it must be whole numbers of at least 1"),
        (["--temperature", "-1"], "--temperature -1: it must be numbers of at least 0"),
        (["--temperature", "hot"], "--temperature hot: it must be numbers of at least 0"),
        (
            ["--categories", "letter"],
            "--categories letter: not in these questions; there are letters, copying",
        ),
        (["--block-widths", "2,4"], "--block-widths: a block of 1 must be among them"),
        (["--block-widths", "1,x"], "--block-widths x: it must be whole numbers of at least 1"),
        (["--baseline", "hf"], "--baseline hf is no method here; use none, foreteller@4"),
        (["--method", "foretold"], "'foretold'"),
        (["--method", "prompt_lookup:x=1"], "has no option 'x'"),
        (["--method", "foreteller@matches"], "matches"),
        (["--method", "hf:magic"], "no such reference"),
        (["--html", "/nowhere/x.html"], "--html /nowhere/x.html: no file can be written there"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0"),
        (["--max-new-tokens", "100000"], "and the context leaves"),
        (["--optimize", "magic"], "magic"),
        (["--draft-tokens", "x"], "--draft-tokens x"),
    ],
)
def test_wrong_use(arguments: Arguments, more: list[str], words: str) -> None:
    assert words in error_of(*arguments(*more))


def test_chat_without_a_template(arguments: Arguments, tmp_path: Path) -> None:
    bare = str(make_model(tmp_path / "bare", template=None))
    assert "no chat template" in error_of(*arguments("--chat", "--target", bare))
    report = objects(*arguments("--target", bare, "--limit", "1"))
    assert report["settings"]["prompts"] == "raw"


# --- the page -------------------------------------------------------------------------------------


def test_the_page_of_a_bench(arguments: Arguments, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    report = objects(*arguments("--html", str(file), methods=["foreteller@4", "hf"]))
    text = file.read_text()
    root = ElementTree.fromstring(text)
    labels = [found.get("aria-label", "") for found in root.iter("{http://www.w3.org/2000/svg}svg")]
    assert [label for label in labels if label.startswith("speed-up")] == [
        f"speed-up of each method, category {name}, batch 1, greedy" for name in ("all", "letters", "copying")
    ]
    for words in ("acceptance by depth of each method", "where the time of a token goes", "cost of a block"):
        assert any(label.startswith(words) for label in labels)
    assert not re.search(r"\b(nan|inf)\b", text)
    visible = "".join(root.itertext())
    assert f"{report['settings']['transformers']}" in visible
    assert "foreteller@4" in visible
