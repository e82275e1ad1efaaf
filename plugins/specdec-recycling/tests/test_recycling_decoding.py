"""The whole: what is said is what plain decoding says, in one transfer a round, whatever the table holds."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import specdec_core
import specdec_recycling
from specdec_core import Capture, SamplingParams, SpecDecoder, UsageError
from specdec_core.testing.models import copier, ids, tiny_model
from specdec_core.testing.reference import base, sampled
from specdec_core.testing.waiting import waits
from specdec_recycling import Recycling, RecyclingConfig

RAGGED = (1, 3, 9, 20)
OPTIONS: list[dict[str, Any]] = [
    {"nodes": 20},
    {"nodes": 20, "shared": False},
    {"shape": "1x1x1"},
    {"shape": "4x2x1"},
]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def decoder(
    model: Any, verifier: str = "auto", options: dict[str, Any] | None = None, **others: Any
) -> SpecDecoder:
    drafter = Recycling(RecyclingConfig(**(options or {})))
    return SpecDecoder(
        model, drafter=drafter, verifier=verifier, **{"strict": True, "draft_tokens": 6, **others}
    )


def verifiers(options: dict[str, Any]) -> list[str]:
    return [
        "match",
        "tree_mask",
        "greedy",
        *(["rejection", "block"] if options.get("shape") == "1x1x1" else []),
    ]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_greedy_output_is_that_of_plain_decoding(options: dict[str, Any]) -> None:
    """B01, B42, B54: alone and in a ragged batch, twice on one decoder."""
    model = tiny_model("llama")
    prompts = [ids(length) for length in RAGGED]
    wanted = [base(model, prompt, 24) for prompt in prompts]
    for verifier in verifiers(options):
        tried = decoder(model, verifier, options, max_batch=3)
        for _ in range(2):
            results = tried.generate(prompts, SamplingParams(max_new_tokens=24))
            assert [result.token_ids for result in results] == wanted
        assert tried.generate(prompts[0], SamplingParams(max_new_tokens=24)).token_ids == wanted[0]


@pytest.mark.parametrize(
    ("architecture", "capture"), [("gpt2", None), ("gemma2", None), ("llama", Capture.FIXED)]
)
def test_other_architectures_and_fixed_shapes(architecture: str, capture: Any) -> None:
    model, prompts = tiny_model(architecture), [ids(7), ids(12)]
    tried = decoder(model, options={"nodes": 12}, capture=capture)
    for _ in range(2):
        results = tried.generate(prompts, SamplingParams(max_new_tokens=20))
        assert [result.token_ids for result in results] == [base(model, prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("options", OPTIONS[:2], ids=str)
def test_with_match_a_seed_gives_one_text_whatever_was_learned(options: dict[str, Any]) -> None:
    """B57, B72."""
    model = tiny_model("llama")
    prompts = [ids(length, 5) for length in RAGGED]
    params = [SamplingParams(max_new_tokens=12, temperature=0.7, seed=seed) for seed in (3, 3, 1, 2)]
    wanted = [sampled(model, prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    state = torch.get_rng_state()
    tried = decoder(model, "match", options)
    for _ in range(2):
        assert [result.token_ids for result in tried.generate(prompts, params)] == wanted
    assert torch.equal(torch.get_rng_state(), state)


def test_without_shared_a_row_is_drafted_as_if_it_were_alone() -> None:
    """No trace of earlier generations, nor of neighbours: as many rounds, whoever was there."""
    model = tiny_model("llama")
    prompts, params = [ids(length) for length in RAGGED], SamplingParams(max_new_tokens=20)
    options = {"shared": False, "nodes": 20}
    alone = [decoder(model, options=options).generate(prompt, params).stats.rounds for prompt in prompts]
    tried = decoder(model, options=options, max_batch=2)
    for _ in range(2):
        assert [result.stats.rounds for result in tried.generate(prompts, params)] == alone


def test_candidates_are_recycled() -> None:
    """A target that always says the same after a token: once seen, whole paths are accepted."""
    model = copier({1: 2, 2: 3, 3: 4, 4: 1})
    stats = decoder(model).generate([9, 8, 1], SamplingParams(max_new_tokens=100)).stats
    assert stats.rounds <= 6 + 100 // 7
    assert stats.acceptance_histogram[6] >= 12


def test_a_warm_table_saves_rounds() -> None:
    model, prompt = tiny_model("llama"), ids(9)
    tried = decoder(model)
    first, second = (tried.generate(prompt, SamplingParams(max_new_tokens=40)).stats.rounds for _ in range(2))
    assert second < first


def test_prompts_are_tried_where_nothing_is_known() -> None:
    model = copier({1: 2, 2: 3, 3: 4, 4: 1})
    rounds = {}
    for prompt in (True, False):
        tried = decoder(model, options={"prompt": prompt})
        rounds[prompt] = tried.generate([1, 2, 3, 4, 1], SamplingParams(max_new_tokens=8)).stats.rounds
    assert rounds[True] == 2
    assert rounds[False] > 2


def test_in_a_combination_it_learns_from_the_drafts_of_others() -> None:
    model = copier({1: 2, 2: 3, 3: 4, 4: 1})
    tried = SpecDecoder(model, drafter="prompt_lookup,recycling:prompt=false", strict=True)
    result = tried.generate([1, 2, 3, 4] * 3, SamplingParams(max_new_tokens=40))
    assert result.token_ids == base(model, [1, 2, 3, 4] * 3, 40)
    table: Any = tried.drafter
    assert table.members[1].table.candidates[0, 1:5, 0].tolist() == [2, 3, 4, 1]


@pytest.mark.parametrize("k", [0, 1, 3])
def test_the_draft_length_bounds_the_tree(k: int) -> None:
    """B78, B89."""
    model = tiny_model("llama")
    tried = decoder(model, draft_tokens=k)
    seen = 0
    for _ in range(2):
        for done in tried.rounds(ids(9), SamplingParams(max_new_tokens=12)):
            assert len(done.outcome.tokens[0]) <= k + 1
            seen = max(seen, done.draft.nodes)
    assert (seen > k) == (k > 0)


@pytest.mark.parametrize("shared", [True, False])
def test_a_round_waits_for_the_device_once(shared: bool) -> None:
    """The outcome's transfer is the core's; the drafter makes none."""
    drafter = Recycling(RecyclingConfig(shared=shared, nodes=20))
    tried = SpecDecoder(tiny_model("llama"), drafter=drafter, draft_tokens=6, strict=True)
    with waits(drafter) as names:
        result = tried.generate([ids(5), ids(8)], SamplingParams(max_new_tokens=12))
    assert result[0].stats.drafted_tokens > 0
    assert names == []


def test_memory_does_not_grow() -> None:
    """B90."""
    tried = decoder(tiny_model("llama"))
    drafter: Any = tried.drafter
    size = drafter.table.nbytes
    assert size == (97 + 2) * (8 * 4 + 8)
    counts = []
    for i in range(12):
        tried.generate([*ids(9), i], SamplingParams(max_new_tokens=3))
        gc.collect()
        counts.append(sum(type(thing) is torch.Tensor for thing in gc.get_objects()))
    assert max(counts[8:]) <= max(counts[:8])
    assert drafter.table.nbytes == size
    for nodes in range(1, 81):
        drafter._shape(nodes, 6)
    assert len(drafter._shapes) <= 64


# --- on disk --------------------------------------------------------------------------------------


def test_a_saved_table_is_a_warm_start(tmp_path: Path) -> None:
    path, model, prompt = tmp_path / "table", tiny_model("llama"), ids(9)
    params = SamplingParams(max_new_tokens=40)
    tried = decoder(model, options={"path": path})
    cold = tried.generate(prompt, params)
    drafter: Any = tried.drafter
    held = drafter.table.candidates.clone()
    warm = tried.generate(prompt, params)
    drafter.table.candidates.copy_(held)
    del tried, drafter
    gc.collect()  # it is saved when the drafter goes
    again = decoder(model, options={"path": path})
    loaded: Any = again.drafter
    assert torch.equal(loaded.table.candidates[0, :97], held[0, :97])
    assert loaded.capabilities.next_row == 2
    result = again.generate(prompt, params)
    assert result.token_ids == cold.token_ids
    assert result.stats.rounds == warm.stats.rounds < cold.stats.rounds
    assert [file.name for file in tmp_path.iterdir()] == ["table"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("text", "cannot be read"),
        ("cut", "cannot be read"),
        ("weights", "holds no recycling table"),
        ("vocabulary", "another tokenizer"),
        ("candidates", "written with candidates=3, not 8"),
        ("ids", "outside the vocabulary"),
        ("folder", "does not exist"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, kind: str, words: str) -> None:
    path, model = tmp_path / "table", tiny_model("llama")
    tried = decoder(model, options={"path": path, "candidates": 3 if kind == "candidates" else 8})
    drafter: Any = tried.drafter
    if kind == "ids":
        drafter.table.candidates += 1
    drafter.save()
    if kind == "text":
        path.write_text("hello\n")
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    elif kind == "weights":
        save_file({"weight": torch.zeros(3)}, path)
    elif kind == "folder":
        path = tmp_path / "none" / "table"
    with pytest.raises(UsageError, match=words) as caught:
        decoder(tiny_model("llama", vocab=90) if kind == "vocabulary" else model, options={"path": path})
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_public_names_of_specdec_core_are_used() -> None:
    files = list(Path(specdec_recycling.__file__).parent.glob("*.py"))
    assert len(files) == 5
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.startswith("specdec_core.")], (
                    file
                )
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specdec_core"):
                assert node.module == "specdec_core", file
                assert {alias.name for alias in node.names} <= set(specdec_core.__all__), file
