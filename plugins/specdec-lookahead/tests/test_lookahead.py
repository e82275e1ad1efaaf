"""Lookahead decoding: the window's mask, the pool, and that nothing changes what the target says."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import specdec_core
import specdec_lookahead
from specdec_core import HOLE, ROOT, Capture, Outcome, Registry, SamplingParams, SpecDecoder
from specdec_core.testing.models import VOCAB, copier, tiny_model
from specdec_core.testing.reference import base
from specdec_core.testing.waiting import waits
from specdec_lookahead import Lookahead
from specdec_lookahead.layout import Layout
from specdec_lookahead.pool import Pool

PROMPTS = [[3], [5, 9, 2, 5, 9], [7, 1, 7, 1, 7, 1, 7], list(range(20, 41))]
N = 24


def lookahead(**options: Any) -> Lookahead:
    return Lookahead(Lookahead.Config(**options))


def decoder(drafter: Any, architecture: str = "qwen3", **options: Any) -> SpecDecoder:
    return SpecDecoder(
        tiny_model(architecture), drafter=drafter, strict=True, **{"draft_tokens": None, **options}
    )


def said(decoder: SpecDecoder, prompts: list[list[int]], n: int = N, **options: Any) -> list[list[int]]:
    return [r.token_ids for r in decoder.generate(prompts, SamplingParams(max_new_tokens=n, **options))]


class Watched(Lookahead):
    """Records every draft and outcome."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.seen: list[tuple[Any, Outcome]] = []

    def propose(self, context: Any, budget: Any) -> Any:
        self.draft = super().propose(context, budget)
        self.before = [list(context.row_tokens(i)) for i in range(len(context.rows))]
        return self.draft

    def observe(self, outcome: Outcome) -> None:
        self.seen.append((self.draft, self.before, outcome))
        super().observe(outcome)


# --- the tree -------------------------------------------------------------------------------------


def test_the_window_is_a_chain_with_a_column_on_each_of_its_tokens() -> None:
    size = Layout(window=3, n=3, guesses=2)
    assert size.first == 4
    assert size.window_parents.tolist() == [ROOT, 4, 5, 4, 5, 6]
    assert size.depths.tolist() == [1, 2, 1, 2, 1, 2, 3, 2, 3, 4]
    assert (size.nodes, size.depth) == (10, 4)


def test_guesses_that_begin_alike_share_nodes() -> None:
    size = Layout(window=1, n=4, guesses=4)
    found = torch.tensor([[[1, 2, 3], [1, 2, 4], [5, 2, 3], [-1, -1, -1]]])
    parents = size.guess_parents(found)[0].tolist()
    assert parents == [ROOT, 0, 1, HOLE, HOLE, 1, ROOT, 6, 7, HOLE, HOLE, HOLE]


def test_the_target_sees_each_column_as_a_sequence_of_its_own() -> None:
    """What it says behind a window token is what it says after text, first tokens and column."""
    drafter = Watched(Lookahead.Config(window=4, ngram=4, guesses=3))
    made, size = decoder(drafter), drafter._layout
    list(made.rounds(PROMPTS[1], SamplingParams(max_new_tokens=12)))
    for draft, (before,), outcome in drafter.seen[1:4]:
        assert outcome.top_logits is not None
        for column in range(size.window):
            window = draft.tokens[0, size.first :].view(size.levels, size.window)
            path = [*window[0, : column + 1].tolist(), *window[1:, column].tolist()]
            last = size.first + (size.levels - 1) * size.window + column
            if draft.parents[0, last] != HOLE:
                expected = base(tiny_model("qwen3"), [*before, *path], 1)[0]
                assert int(outcome.top_logits[0][0, 1 + last, 0]) == expected


# --- the pool -------------------------------------------------------------------------------------


def test_the_pool_finds_what_followed_the_latest_first_and_nothing_twice() -> None:
    pool = Pool(2, 6, 3, torch.device("cpu"))
    pool.begin(1, [1, 2, 3])
    grams = torch.tensor([[[1, 4, 5], [1, 2, 3], [9, 9, 9]]])
    pool.add([1], grams, torch.tensor([[True, True, True]]))
    assert pool.find([1], torch.tensor([1]), 3).tolist() == [[[2, 3], [4, 5], [-1, -1]]]
    assert pool.find([0], torch.tensor([1]), 1).tolist() == [[[-1, -1]]]
    pool.add([1], grams, torch.tensor([[False, False, True]]))
    assert pool.find([1], torch.tensor([9]), 2).tolist() == [[[9, 9], [-1, -1]]]


def test_the_pool_is_a_ring() -> None:
    pool = Pool(1, 4, 2, torch.device("cpu"))
    pool.begin(0, [])
    for token in range(6):
        pool.add([0], torch.tensor([[[1, token]]]), torch.tensor([[True]]))
    assert pool.find([0], torch.tensor([1]), 4).flatten().tolist() == [5, 4, 3, 2]
    pool.begin(0, [])
    assert pool.find([0], torch.tensor([1]), 1).tolist() == [[[-1]]]


# --- what is said ---------------------------------------------------------------------------------


@pytest.mark.parametrize("verifier", ["greedy", "match", "tree_mask"])
@pytest.mark.parametrize("sizes", [(5, 4, 5), (1, 2, 1), (3, 6, 2)])
def test_a_ragged_batch_says_what_the_target_says(verifier: str, sizes: tuple[int, int, int]) -> None:
    drafter = lookahead(window=sizes[0], ngram=sizes[1], guesses=sizes[2])
    made = decoder(drafter, verifier=verifier, max_batch=3)
    expected = [base(tiny_model("qwen3"), prompt, N) for prompt in PROMPTS]
    assert said(made, PROMPTS) == expected
    assert said(made, PROMPTS[:1]) == expected[:1]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_other_architectures_and_fixed_shapes(architecture: str) -> None:
    expected = [base(tiny_model(architecture), prompt, N) for prompt in PROMPTS]
    assert said(decoder(lookahead(), architecture, capture=Capture.FIXED), PROMPTS) == expected


def test_with_a_seed_the_text_is_that_of_plain_sampling() -> None:
    options = {"temperature": 0.9, "top_k": 20, "seed": 5}
    assert said(decoder(lookahead()), PROMPTS, **options) == said(decoder("none"), PROMPTS, **options)


@pytest.mark.parametrize("draft_tokens", [1, 3])
def test_a_small_budget_cuts_the_tree(draft_tokens: int) -> None:
    expected = [base(tiny_model("qwen3"), prompt, N) for prompt in PROMPTS]
    assert said(decoder(lookahead(), draft_tokens=draft_tokens), PROMPTS) == expected


class Cut(Watched):
    """Is given a smaller node budget."""

    def propose(self, context: Any, budget: Any) -> Any:
        return super().propose(context, replace(budget, nodes=min(budget.nodes, 6)))


def test_a_node_budget_cuts_the_window_before_the_guesses() -> None:
    drafter = Cut(Lookahead.Config(window=5, ngram=4, guesses=2))
    assert said(decoder(drafter), [PROMPTS[2]]) == [base(tiny_model("qwen3"), PROMPTS[2], N)]
    first = drafter.seen[0][0].parents[0]
    assert first.tolist()[:3] == [ROOT, 0, 1]  # an n-gram of the prompt
    for draft, *_ in drafter.seen[:-5]:
        assert int((draft.parents != HOLE).sum()) == 6
        # holes come first where nothing is guessed: what stands behind `counts` would be lost
        assert int((draft.parents[0] != HOLE).nonzero().max()) < draft.counts[0]


def test_it_is_one_of_a_combination() -> None:
    """Where another member drafted, its nodes are not taken for the window's."""
    expected = [base(tiny_model("qwen3"), prompt, N) for prompt in PROMPTS]
    made = decoder("prompt_lookup:num_tokens=6,lookahead", registry=_registry())
    assert said(made, PROMPTS) == expected


def _registry() -> Any:
    registry = Registry.discover()
    if "lookahead" not in {entry.name for entry in registry.drafters()}:
        pytest.skip("specdec-lookahead is not installed")
    return registry


def test_a_generation_leaves_nothing_to_the_next() -> None:
    drafter = Watched(Lookahead.Config())
    made = decoder(drafter, reuse_prefixes=False)
    for _ in range(2):
        said(made, PROMPTS)
    half = len(drafter.seen) // 2
    for (first, *_), (second, *_) in zip(drafter.seen[:half], drafter.seen[half:], strict=True):
        assert first.tokens.equal(second.tokens)
        assert first.parents.equal(second.parents)


def test_no_call_waits_for_the_device() -> None:
    drafter = lookahead()
    made = decoder(drafter)
    with waits(drafter) as names:
        said(made, PROMPTS)
    assert not names


def test_it_accepts_what_the_window_made() -> None:
    """On a model that goes round, n-grams of the window come true, without any from the prompt."""
    config = {"window": 6, "ngram": 4, "guesses": 4, "from_prompt": False}
    model = copier({token: (token + 1) % 5 for token in range(5)})
    made = SpecDecoder(model, drafter=lookahead(**config), strict=True, draft_tokens=None)
    result = made.generate([2], SamplingParams(max_new_tokens=60))
    assert result.token_ids == base(model, [2], 60)
    assert result.stats.tokens_per_target_call > 2.5


# --- the package ----------------------------------------------------------------------------------


def test_it_uses_the_public_names_of_the_core_only() -> None:
    for file in Path(specdec_lookahead.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "specdec_core":
                assert node.module == "specdec_core", file
                assert {alias.name for alias in node.names} <= set(specdec_core.__all__), file
            if isinstance(node, ast.Import):
                assert not [a.name for a in node.names if a.name.startswith("specdec_core")], file


def test_the_vocabulary_is_the_targets() -> None:
    drafter = Watched(Lookahead.Config())
    said(decoder(drafter), PROMPTS)
    for draft, *_ in drafter.seen:
        assert int(draft.tokens.min()) >= 0
        assert int(draft.tokens.max()) < VOCAB
