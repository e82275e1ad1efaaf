"""Greedy output of every drafter with a model is that of the target's own `generate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from drafting import RAGGED, cousin, early, plain, says, small, tree
from support import ids

from specdec_core import Capture, Drafter, SpecDecoder
from specdec_core.testing.models import tiny_model

N = 16
Make = Callable[[Any], Drafter]
MAKES: dict[str, Make] = {
    "small_model": lambda target: small(cousin(target)),
    "small_model sampled": lambda target: small(cousin(target), draft="sampled", temperature=1.0),
    "small_model coupled": lambda target: small(cousin(target), draft="coupled"),
    "small_model careful": lambda target: small(cousin(target), min_confidence=0.5),
    "early_exit": lambda target: early(2),
    "tree_top2": lambda target: tree(cousin(target)),
    "tree_top2 sampled": lambda target: tree(cousin(target), children="sampled", temperature=1.0),
    "tree_top2 early": lambda target: tree(layer=1),
}


@pytest.fixture(params=MAKES)
def make(request: pytest.FixtureRequest) -> Make:
    return MAKES[request.param]


@pytest.mark.parametrize("verifier", ["greedy", "match"])
def test_one_row_a_ragged_batch_and_rows_that_come_later(make: Make, verifier: str) -> None:
    target = tiny_model("llama", layers=3)
    prompts = [ids(length) for length in (*RAGGED, 5)]
    wanted = [plain(target, tuple(prompt), N) for prompt in prompts]
    for rows, max_batch in ((1, 1), (4, 4), (5, 2)):
        decoder = SpecDecoder(
            target,
            drafter=make(target),
            verifier=verifier,
            max_batch=max_batch,
            strict=True,
            draft_tokens=None,
        )
        assert says(decoder, prompts[:rows], N) == wanted[:rows]
    assert says(decoder, prompts, N) == wanted  # a second run on used caches


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2"])
def test_other_architectures(make: Make, architecture: str) -> None:
    target = tiny_model(architecture, layers=3)
    prompts = [ids(length) for length in RAGGED]
    decoder = SpecDecoder(target, drafter=make(target), strict=True, draft_tokens=None)
    assert says(decoder, prompts, N) == [plain(target, tuple(prompt), N) for prompt in prompts]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ["mistral", "gemma3_text"])
def test_past_a_sliding_window(make: Make, architecture: str, attention: str) -> None:
    target = tiny_model(architecture, layers=3, window=8, attention=attention)
    prompt = ids(6)
    decoder = SpecDecoder(target, drafter=make(target), strict=True, draft_tokens=None)
    assert says(decoder, [prompt], 40) == [plain(target, tuple(prompt), 40)]


@pytest.mark.parametrize("k", [1, 8])
def test_the_draft_length_changes_nothing(make: Make, k: int) -> None:
    target = tiny_model("llama", layers=3)
    prompts = [ids(length) for length in RAGGED]
    decoder = SpecDecoder(target, drafter=make(target), draft_tokens=k, strict=True)
    assert says(decoder, prompts, N) == [plain(target, tuple(prompt), N) for prompt in prompts]


def test_fixed_shapes(make: Make) -> None:
    """The shapes and addresses that captured graphs need, without a GPU."""
    target = tiny_model("llama", layers=3)
    prompts = [ids(length) for length in (*RAGGED, 5)]
    decoder = SpecDecoder(
        target, drafter=make(target), max_batch=3, strict=True, capture=Capture.FIXED, draft_tokens=None
    )
    assert says(decoder, prompts, N) == [plain(target, tuple(prompt), N) for prompt in prompts]
