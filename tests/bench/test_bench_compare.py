"""`specdec compare`: the same, a near-tie, or a bug; replays of plain decoding through blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cli_support
import pytest
import torch
from cli_support import byte_tokenizer, cli, error_of
from support import base, ids, markov_llama, next_logits

from specdec_core import (
    Draft,
    DraftLaw,
    Registry,
    RowRng,
    TargetDistributions,
    Verdict,
    VerifierConfig,
    hookimpl,
)
from specdec_core.bench.replay import Replayer
from specdec_core.testing.models import tiny_model

model = cli_support.model
Compare = Callable[..., Any]


class _Rigged:
    """Accepts nothing, and says what `choose` makes of the logits."""

    Config = VerifierConfig
    laws = frozenset(DraftLaw)
    handles_trees = samples = lossless = drafter_invariant = True
    preference = -1

    def __init__(self, config: VerifierConfig) -> None:
        self.config = config

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def verify(self, p: TargetDistributions, draft: Draft, rng: RowRng) -> Verdict:
        path = torch.full((draft.rows, 0), -1, dtype=torch.int64)
        return Verdict(path, self.choose(p.logits[:, 0]))


class LastBest(_Rigged):
    """Takes the last of the likeliest tokens: right, but for ties."""

    name = "last_best"

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.shape[-1] - 1 - logits.flip(-1).argmax(dim=-1)


class SecondBest(_Rigged):
    """Takes the second-best token."""

    name = "second_best"

    def choose(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.topk(2).indices[:, 1]


class Lossy(SecondBest):
    """Does the same, and admits it."""

    name = "admits_it"
    lossless = False


class Plugin:
    """What these tests add to the registry."""

    @hookimpl
    def specdec_register_verifiers(self, register: Callable[[type], None]) -> None:
        for verifier in (LastBest, SecondBest, Lossy):
            register(verifier)


@pytest.fixture
def compare(model: str, monkeypatch: pytest.MonkeyPatch) -> Compare:
    def discover(blocked: Any = ()) -> Registry:
        registry = Registry.discover(blocked=blocked)
        registry.register(Plugin(), name="test-verifiers")
        return registry

    monkeypatch.setattr("specdec_core.cli.compare.discover", discover)

    def run(*args: str, code: int, target: str = model) -> str:
        done = cli("compare", *args, "--target", target, "--device", "cpu", "-n", "8", "--ignore-eos")
        assert done.exit_code == code, done.output
        return done.stdout

    return run


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that after an a says b or c with exactly equal logits, and a after both."""
    folder = tmp_path_factory.mktemp("models") / "tied"
    tokenizer = byte_tokenizer()
    a, b, c = (tokenizer.convert_tokens_to_ids(letter) for letter in "abc")
    log_p = torch.full((len(tokenizer), len(tokenizer)), -30.0)
    log_p[a, b] = log_p[a, c] = log_p[b, a] = log_p[c, a] = 5.0
    markov_llama(log_p).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ways", [("none", "prompt_lookup@4"), ("hf", "none"), ("hf:prompt_lookup", "prompt_lookup@3@match")]
)
def test_the_same(compare: Compare, ways: tuple[str, str]) -> None:
    text = compare(*ways, "-p", "abcabcab", code=0)
    assert text.splitlines() == [
        "prompt: same, 8 tokens",
        f"{ways[0]} and {ways[1]} say the same: 1 prompts, every token id",
    ]


def test_a_near_tie(compare: Compare, tied: str) -> None:
    text = compare("none", "none@last_best", "-p", "a", code=3, target=tied)
    first, last = text.splitlines()
    assert first.startswith("prompt: near-tie: at generated token 0 none says ")
    assert "'b' and none@last_best says" in first
    assert "'c'; top-2 logits of plain decoding are 0 apart" in first
    assert last == (
        "none and none@last_best part at near-ties of float32 in 1 of 1 prompts: rounding, not a bug"
    )


def test_a_bug(compare: Compare) -> None:
    first, last = compare("none", "none@second_best", "-p", "a", code=4).splitlines()
    assert first.startswith("prompt: different: at generated token 0 none says ")
    # The alphabet model gives its first two tokens .5 and .3: their logits are log(5/3) apart.
    assert "are 0.511 apart" in first
    assert "theirs 0 and 0.511 below the top" in first
    assert last.endswith("does not explain it; this is a bug: please report it")


def test_a_lossy_verifier_is_named(compare: Compare) -> None:
    text = compare("none", "none@admits_it", "-p", "a", code=4)
    assert text.splitlines()[-1].endswith("none@admits_it ends in the lossy verifier admits_it")


def test_json(compare: Compare) -> None:
    found = json.loads(compare("none", "none@second_best", "-p", "a", "--json", code=4))
    assert (found["outcome"], found["ways"]) == ("different", ["none", "none@second_best"])
    [prompt] = found["prompts"]
    assert (prompt["index"], prompt["outcome"], prompt["texts"]) == (0, "different", ["b", "c"])
    assert prompt["tie"]["gap"] == pytest.approx(0.5108, abs=1e-3)
    assert prompt["tie"]["tolerance"] < 1e-3


def test_a_text_that_ends_early_is_no_tie(compare: Compare, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec_core.bench.ours import Ours

    run = Ours.run

    def short(self: Ours, prompts: Any, params: Any) -> Any:
        found = run(self, prompts, params)
        if self.name != "none":
            found.token_ids[0].pop()
        return found

    monkeypatch.setattr(Ours, "run", short)
    text = compare("none", "prompt_lookup@2", "-p", "a", code=4)
    assert "at generated token 7 none says" in text
    assert "and prompt_lookup@2 had ended" in text


def test_questions(compare: Compare, tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"question_id": 7, "category": "c", "turns": ["ab", "cd"]}')
    text = compare("none", "hf", "--questions", str(file), code=0)
    assert [line.partition(":")[0] for line in text.splitlines()[:2]] == ["7", "7#2"]


def test_wrong_use(model: str) -> None:
    def error(*args: str) -> str:
        return error_of("compare", *args, "--target", model)

    assert "missing argument" in error("none")
    assert "no such reference" in error("none", "hf:magic", "-p", "a")
    assert "'magic'" in error("none", "magic", "-p", "a")
    assert "keep one" in error("none", "hf", "-p", "a", "--limit", "1")
    assert "--max-new-tokens 0" in error("none", "hf", "-p", "a", "-n", "0")


# --- replays --------------------------------------------------------------------------------------


def test_replays_see_what_plain_decoding_sees() -> None:
    target = tiny_model("qwen3")
    prompt = ids(12)
    said = base(target, prompt, 9)
    replayer = Replayer(target)
    wanted = torch.stack([next_logits(target, [*prompt, *said[:i]]) for i in range(len(said))])
    for width, offset in ((1, 0), (4, 0), (4, 3), (20, 2)):
        found = replayer._logits(prompt, said, width, offset)
        assert found.shape == wanted.shape
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_rounding_moves_is_measured(dtype: torch.dtype) -> None:
    target = tiny_model("llama", layers=4, dtype=dtype)
    prompt = ids(30)
    said = base(target, prompt, 24)
    logits = next_logits(target, [*prompt, *said[:5]])
    first, second, far = logits.topk(60).indices[[0, 1, 59]].tolist()
    tie = Replayer(target).tie(prompt, said, 5, (first, far), {5})
    assert not tie.near
    assert tie.tokens == (first, second)
    assert tie.behind[0] <= tie.tolerance < tie.behind[1]
    low, high = (0, 1e-3) if dtype == torch.float32 else (1e-3, 2.0)
    assert low <= tie.noise < high
    assert tie.gap == pytest.approx(float(logits[first] - logits[second]), abs=tie.tolerance + 1e-4)


def test_a_prompt_longer_than_a_chunk_is_fed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_core.bench.replay.DEFAULT_CHUNK", 8)
    target = tiny_model("llama")
    prompt = ids(20)
    said = base(target, prompt, 4)
    wanted = torch.stack([next_logits(target, [*prompt, *said[:i]]) for i in range(4)])
    for offset in (0, 2):
        found = Replayer(target)._logits(prompt, said, 2, offset)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
