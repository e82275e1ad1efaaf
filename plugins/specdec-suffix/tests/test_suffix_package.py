"""The distribution uses public names only, and the figure that its README gives holds."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import specdec_core
import specdec_suffix
from specdec_core import Registry, SamplingParams, SpecDecoder
from specdec_core.testing.models import copier, tiny_model

ROOT = Path(__file__).resolve().parents[1]


def test_only_public_names_of_specdec_core_are_used() -> None:
    files = [*Path(specdec_suffix.__file__).parent.glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    assert len(files) > 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.startswith("specdec_core.")], (
                    file
                )
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specdec_core"):
                assert node.module == "specdec_core", file
                assert {alias.name for alias in node.names} <= set(specdec_core.__all__), file


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The script, as a module."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module("repeated_tasks")
    for name in ("repeated_tasks", "tasks"):
        sys.modules.pop(name, None)


def test_repeated_tasks_take_fewer_target_calls_than_with_prompt_lookup(
    benchmark: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    found = benchmark.main(["--count", "12", "--drafter", "prompt_lookup", "--drafter", "suffix"])
    assert found["suffix"] >= 1.15 * found["prompt_lookup"]
    assert "tokens per target call" in capsys.readouterr().out


def test_a_replay_counts_the_rounds_that_a_decoder_takes(benchmark: Any) -> None:
    model, prompts = copier({1: 2, 2: 3, 3: 4, 4: 1}), [[9, 8, 1], [1, 2, 3, 4, 1], [2]]
    for options in ("", ":tree=true", ":shared=false,alpha=1"):
        decoder = SpecDecoder(model, drafter=f"suffix{options}", draft_tokens=16, strict=True)
        results = [decoder.generate(prompt, SamplingParams(max_new_tokens=40)) for prompt in prompts]
        said = [(prompt, result.token_ids) for prompt, result in zip(prompts, results, strict=True)]
        count = benchmark.replay(benchmark.built(f"suffix{options}", Registry.discover()), said)
        assert count.rounds == sum(result.stats.rounds for result in results)
        assert count.drafted == sum(result.stats.drafted_tokens for result in results)
        assert count.tokens == 120


def test_a_target_answers_and_what_it_said_is_replayed(
    benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bytes_only).save_pretrained(tmp_path / "model")
    tiny_model("llama", vocab=len(alphabet), context=512).save_pretrained(tmp_path / "model")
    both = ["--drafter", "prompt_lookup", "--drafter", "suffix"]
    record = str(tmp_path / "said.json")
    target = ["--target", str(tmp_path / "model"), "--device", "cpu", "--tokens", "12", "--record", record]
    benchmark.main([*both, *target, "--count", "2", "--workloads", "agent,prose"])
    replayed = benchmark.main([*both, "--replay", record])
    assert set(replayed) == {"prompt_lookup", "suffix"}
    assert capsys.readouterr().out.count("tokens per target call") == 2
