"""`specdec run`: every option of generation, drafting and loading has an effect."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cli_support
import pytest
from cli_support import AFTER_A, cli, error_of, make_model, process, run, run_object, run_text

model = cli_support.model


# --- options of the generation --------------------------------------------------------------------


def test_max_new_tokens(model: str) -> None:
    assert run_text(model, "-n", "4") == "bcde"
    assert run_text(model, "--max-new-tokens", "0") == ""
    assert run_text(model) == AFTER_A
    assert run_object(model, "--ignore-eos")["stats"]["new_tokens"] == 128


def test_ignore_eos(model: str) -> None:
    assert run_object(model)["finish_reason"] == "eos"
    assert run_text(model, "--ignore-eos", "-n", "30") == AFTER_A + "abcd"  # the EOS itself has no text


def test_temperature_and_seed(model: str) -> None:
    sampled = [run_text(model, "--temperature", "1", "--seed", str(seed), "-n", "12") for seed in range(4)]
    assert len(set(sampled)) > 1
    assert sampled[1] == run_text(model, "--temperature", "1", "--seed", "1", "-n", "12")
    assert sampled[1] == run_text(model, "--temperature", "1", "--seed", "1", "-n", "12", "--drafter", "none")
    assert AFTER_A.startswith(run_text(model, "--temperature", "0", "--seed", "1", "-n", "12"))
    assert run_object(model, "-n", "1")["seed"] != run_object(model, "-n", "1")["seed"]


@pytest.mark.parametrize("option", [["--top-k", "1"], ["--top-p", "0.4"], ["--min-p", "0.9"]])
def test_options_that_leave_the_likeliest_token_alone(model: str, option: list[str]) -> None:
    sampling = ["--temperature", "1", "--seed", "3", "-n", "8"]
    assert run_text(model, *sampling) != "bcdefghi"
    assert run_text(model, *sampling, *option) == "bcdefghi"


def test_repetition_penalty(model: str) -> None:
    assert run_text(model, "-n", "4", prompt="0") == "1010"
    assert run_text(model, "-n", "2", "--repetition-penalty", "3", prompt="01") == "2a"


def test_stop(model: str) -> None:
    value = run_object(model, "--stop", "xyz", "--stop", "efg")
    assert (value["text"], value["finish_reason"]) == ("bcd", "stop")


# --- drafting -------------------------------------------------------------------------------------


def test_draft_tokens_is_the_depth(model: str) -> None:
    prompt = "abcdefghijklmnop.a"
    drafted = {
        k: run_object(model, "--draft-tokens", k, prompt=prompt)["stats"]
        for k in ("0", "2", "5", "auto", "50")
    }
    assert drafted["0"]["drafted_tokens"] == 0
    deepest = [len(drafted[k]["acceptance_histogram"]) - 1 for k in ("2", "5", "50", "auto")]
    assert deepest[:3] == [2, 5, 15]
    assert 2 < deepest[3] <= 15
    assert len({run_text(model, "--draft-tokens", k, prompt=prompt) for k in drafted}) == 1


def test_drafter_and_its_options(model: str) -> None:
    assert run_object(model, "--drafter", "none")["drafter"] == {"name": "none", "config": {}}
    drafter = run_object(model, "--drafter", "prompt_lookup:max_ngram=7")["drafter"]
    assert drafter["config"]["max_ngram"] == 7


def test_a_combination_of_drafters(model: str) -> None:
    done = run(
        *(
            model,
            "--drafter",
            f"prompt_lookup:min_ngram=3,small_model:model={model}",
            "-n",
            "9",
            "--trace",
            "--draft-tokens",
            "10",
        ),
        prompt="abcdefabc",
    )
    assert done.stdout == "defghijkl\n"
    _, first, second, statistics = done.stderr.splitlines()
    assert first.startswith("    1   3/8  prompt_lookup: +'d' +'e' +'f' -'a' ")
    assert second == "    2   4/4  small_model: +'h' +'i' +'j' +'k' *'l'"
    assert statistics.startswith(
        f"specdec: prompt_lookup(min_ngram=3), small_model(model={model}) / greedy /"
    )


def test_the_target_as_its_own_draft_model(model: str) -> None:
    value = run_object(model, "--drafter", f"small_model:model={model}", "-n", "4", prompt="abc")
    assert value["text"] == "defg"
    assert value["stats"]["acceptance_rate"] == 1


def test_verifier(model: str) -> None:
    assert run_object(model, "--verifier", "match")["verifier"]["name"] == "match"
    assert run_object(model, "--verifier", "auto")["verifier"]["name"] == "greedy"


def test_no_plugin(model: str) -> None:
    line = error_of("run", "--target", model, "-p", "a", "--no-plugin", "builtin-drafters")
    assert "no drafter 'prompt_lookup'" in line
    assert "left out: 'builtin-drafters'" in line
    assert "'nix', which is no plugin here" in error_of(
        *("run", "--target", model, "-p", "a", "--no-plugin", "builtin-drafters", "--no-plugin", "nix")
    )


def broken(*_: Any) -> list[int]:
    raise RuntimeError("it\nbroke")


def test_a_drafter_that_fails_is_one_warning_and_with_debug_the_end(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec_drafters import PromptLookup

    monkeypatch.setattr(PromptLookup, "propose_for", broken)
    done = run(model)
    assert done.stdout == AFTER_A + "\n"
    warning, _ = done.stderr.splitlines()
    assert warning.startswith(
        "specdec: warning: drafter 'prompt_lookup': propose raised RuntimeError: it broke;"
    )
    done = cli("run", "--target", model, "-p", "a", "--debug")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "Traceback" in done.stderr
    assert "RuntimeError: it\nbroke" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("specdec: error: drafter 'prompt_lookup': propose raised")


# --- loading --------------------------------------------------------------------------------------


def test_dtype_and_device(model: str) -> None:
    value = run_object(model, "--dtype", "bfloat16", "--device", "cpu", "-n", "1")
    assert (value["dtype"], value["device"]) == ("bfloat16", "cpu")


def test_remote_code_runs_only_when_it_is_trusted(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "modules")])
    folder = make_model(tmp_path / "remote")
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "my_llama",
        "auto_map": {"AutoConfig": "mine.MyConfig", "AutoModelForCausalLM": "mine.MyLlama"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class MyConfig(LlamaConfig): model_type = 'my_llama'\n"
        "class MyLlama(LlamaForCausalLM): config_class = MyConfig\n"
    )
    assert "--trust-remote-code" in error_of("run", "--target", str(folder), "-p", "a")
    assert run_text(str(folder), "--trust-remote-code", "-n", "3") == "bcd"


def test_offline_keeps_off_the_network() -> None:
    line = error_of("run", "--target", "no-such-owner/no-such-model", "--offline", "-p", "a")
    assert line.startswith("target 'no-such-owner/no-such-model' cannot be loaded: ")


@pytest.mark.slow
def test_revision_chooses_among_those_in_the_cache(model: str, tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--some--alphabet"
    make_model(repository / "snapshots" / ("1" * 40))
    make_model(repository / "snapshots" / ("2" * 40), step=2)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1" * 40)
    (repository / "refs" / "even").write_text("2" * 40)
    args = ["run", "--target", "some/alphabet", "--offline", "-p", "a", "-n", "3"]
    home = {"HF_HOME": str(tmp_path)}
    assert process(*args, **home).stdout == "bcd\n"
    assert process(*args, "--revision", "even", **home).stdout == "ceg\n"
    missing = process(*args, "--revision", "odd", **home)
    assert (missing.returncode, missing.stdout, missing.stderr.count("\n")) == (2, "", 1)
