"""Training: data, labels, checkpoints, and the two commands as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specdec_core import SpecDecoder, UsageError
from specdec_core.testing.models import VOCAB, tiny_model
from specdec_medusa.checkpoint import load_heads
from specdec_medusa.data import Sample, load_samples, read_lines, samples
from specdec_medusa.evaluation import accuracies, candidates
from specdec_medusa.heads import Heads
from specdec_medusa.states import IGNORED, States, collect
from specdec_medusa.training import Recipe, Trainer

RECIPE = Recipe(heads=2, layers=1, own_projection=True, batch=16, rate=1e-2, seed=3, steps=8)
SAMPLES = [Sample([5, 9, 2, 5, 9, 2, 5, 9, 2], 2), Sample([1, 2, 3, 4, 5, 6], 1)]


@pytest.fixture(scope="module")
def decoder() -> SpecDecoder:
    return SpecDecoder(tiny_model("qwen3"), drafter="none")


@pytest.fixture
def states(decoder: SpecDecoder) -> States:
    return collect(decoder, SAMPLES, 2)


def trainer(states: States, recipe: Recipe = RECIPE) -> Trainer:
    head = tiny_model("qwen3").lm_head
    heads = Heads.fresh(recipe.heads, 1, 32, head.weight if recipe.own_projection else None)
    return Trainer(heads, recipe, head, states)


def test_positions_and_what_is_to_be_guessed_from_them(decoder: SpecDecoder, states: States) -> None:
    """Head 0 guesses two tokens on: the pending token lies between."""
    assert states.lengths == (6, 4)
    first = [[5, 9], [9, 2], [2, 5], [5, 9], [9, 2], [2, IGNORED]]
    assert states.labels.tolist() == [*first, [3, 4], [4, 5], [5, 6], [6, IGNORED]]
    with torch.no_grad():
        whole = tiny_model("qwen3").get_decoder()(input_ids=torch.tensor([SAMPLES[0].ids]), use_cache=False)[
            0
        ]
    assert torch.allclose(states.hidden[:6], whole[0, 1:7], atol=1e-5)


@pytest.mark.parametrize("own", [True, False])
def test_training_teaches(own: bool, states: States, tmp_path: Path) -> None:
    recipe = Recipe(heads=2, layers=1, own_projection=own, batch=32, rate=1e-2, seed=0, steps=240)
    made = trainer(states, recipe)
    frozen = tiny_model("qwen3").lm_head.weight.clone()

    def right() -> list[list[float]]:
        ids, _ = candidates(made.heads, states, tiny_model("qwen3").lm_head, 1, VOCAB)
        return accuracies(ids, states.labels)

    before = right()
    made.run(tmp_path / "checkpoint.pt")
    assert max(map(max, before)) < 0.5
    least = 1.0 if own else 0.85  # the target's own head cannot say everything of one layer's states
    assert min(map(min, right())) >= least
    assert tiny_model("qwen3").lm_head.weight.equal(frozen)
    assert tiny_model("qwen3").lm_head.weight.grad is None


def test_a_resumed_run_ends_as_one_that_was_never_stopped(states: States, tmp_path: Path) -> None:
    whole = trainer(states)
    whole.run(tmp_path / "whole.pt")

    def stop(now: Trainer) -> None:
        if now.step == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(states).run(tmp_path / "half.pt", stop)
    resumed = trainer(states)
    resumed.load(tmp_path / "half.pt")
    assert resumed.step == 3
    resumed.run(tmp_path / "half.pt")
    assert resumed.step == whole.step == 8
    for name, tensor in whole.heads.state_dict().items():
        assert tensor.equal(resumed.heads.state_dict()[name]), name
    again = trainer(states, Recipe(**{**RECIPE.__dict__, "seed": 4}))
    again.run(tmp_path / "other.pt")
    assert not again.heads.weight.equal(whole.heads.weight)


def test_a_checkpoint_of_another_recipe_is_refused(states: States, tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    trainer(states).save(file)
    with pytest.raises(UsageError, match=r"was made with rate=0\.01, not 0\.5"):
        trainer(states, Recipe(**{**RECIPE.__dict__, "rate": 0.5})).load(file)
    file.write_bytes(b"broken")
    with pytest.raises(UsageError, match=r"checkpoint\.pt cannot be read"):
        trainer(states).load(file)


# --- data -----------------------------------------------------------------------------------------


class Chat:
    chat_template = "yes"


def test_the_kinds_of_lines(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    lines = [{"prompt": "hello", "answer": "x"}, {"messages": said}, {"text": "as it is"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    found = sorted(read_lines(file, Chat(), 0), key=lambda s: (s.text or "", str(s.prompt)))
    assert [s.prompt for s in found] == [said[:1], [{"role": "user", "content": "hello"}], None]
    assert [s.text for s in found] == [None, None, "as it is"]
    assert {str(s.prompt) for s in read_lines(file, None, 0)} == {"hello", str(said[:1]), "None"}
    plain = tmp_path / "prompts.txt"
    plain.write_text("one\n\ntwo\n")
    assert {s.prompt for s in read_lines(plain, None, 0)} == {"one", "two"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty"),
        ("{", r"data\.jsonl:1 is no JSON"),
        ('{"prompt": ""}', "has no `prompt`"),
        ("[]", "has no"),
    ],
)
def test_data_that_says_nothing(content: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(content)
    with pytest.raises(UsageError, match=reason):
        read_lines(file, None, 0)
    with pytest.raises(UsageError, match="is no file"):
        read_lines(tmp_path / "nowhere", None, 0)


def test_without_data_the_target_talks_to_itself(decoder: SpecDecoder) -> None:
    options = {"tokens": 100, "new_tokens": 20, "temperature": 0.0}
    made = samples(decoder, [], seed=1, **options)  # type: ignore[arg-type]
    assert sum(len(s.ids) - s.start for s in made) >= 100
    assert {s.start for s in made} == {1}
    assert samples(decoder, [], seed=1, **options) == made  # type: ignore[arg-type]
    assert samples(decoder, [], seed=2, **options) != made  # type: ignore[arg-type]


# --- the commands ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target in a folder, with a tokenizer of one word a token."""
    folder = tmp_path_factory.mktemp("target")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    tiny_model("qwen3").save_pretrained(folder)
    return folder


def command(*arguments: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "specdec_medusa.cli", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


def test_train_resume_and_measure(target: Path, tmp_path: Path) -> None:
    out, data = tmp_path / "heads", tmp_path / "prompts.txt"
    data.write_text("\n".join(f"w{i} w{i + 1} w{i + 2}" for i in range(40)))
    options = ("-t", target, "-o", out, "--heads", 3, "--batch", 64, "--seed", 1, "--device", "cpu")
    first = command(
        *(
            "train",
            *options,
            "--data",
            data,
            "--tokens",
            400,
            "--new-tokens",
            16,
            "--steps",
            30,
            "--held-out",
            0.2,
        )
    )
    assert first.returncode == 0, first.stderr
    config = json.loads((out / "config.json").read_text())
    assert config["medusa_num_heads"] == 3
    held = config["held_out"]
    assert held["sequences"] == len(load_samples(out / "held_out.jsonl")) > 2
    assert len(held["joint_prefix_accuracy"]) == 3
    assert held["tokens_per_target_call"] == pytest.approx(
        1 + sum(held["joint_prefix_accuracy_at_round_starts"])
    )
    assert load_heads(str(out), VOCAB)[0].count == 3

    again = command("train", *options, "--steps", 30)
    assert again.returncode == 2
    assert "holds a checkpoint; go on with --resume" in again.stderr
    more = command("train", *options, "--steps", 40, "--resume")
    assert more.returncode == 0, more.stderr
    assert json.loads((out / "config.json").read_text())["training"]["steps"] == 40

    measured = command("measure", "-t", target, "--heads", out, "--nodes", 8, "--json", "--device", "cpu")
    assert measured.returncode == 0, measured.stderr
    found = json.loads(measured.stdout)
    assert [row["tree"] for row in found["trees"]] == ["chain", "measured", "adaptive"]
    for row in found["trees"]:
        assert row["same_text"] == found["rows"]
        assert row["where_a_draft_stood"] == pytest.approx(row["predicted"], rel=0.15)


def test_a_shared_projection_makes_a_file_of_blocks_only(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "heads"
    made = command(
        *("train", "-t", target, "-o", out, "--projection", "shared", "--heads", 2, "--tokens", 100),
        *("--new-tokens", 12, "--steps", 3, "--device", "cpu"),
    )
    assert made.returncode == 0, made.stderr
    heads, config = load_heads(str(out), VOCAB)
    assert heads.vocab_size is None
    assert config["projection"] == "shared"
    assert (out / "medusa_lm_head.safetensors").stat().st_size < 4 * 2 * (32 * 32 + 32) + 2000


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("train", "-t", "/nowhere", "-o", "x"), "target '/nowhere' does not exist"),
        (("train", "-t", "/nowhere", "-o", "x", "--projection", "none"), "use auto, own or shared"),
        (("train", "-t", "/nowhere", "-o", "x", "--resume"), "there is no checkpoint.pt in x"),
        (("measure", "-t", "/nowhere", "--heads", "x"), "held_out.jsonl cannot be read"),
    ],
)
def test_wrong_use_is_one_line(arguments: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    done = command(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert reason in done.stderr
    assert len(done.stderr.splitlines()) == 1
