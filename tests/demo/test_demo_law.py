"""Sampling from the trained pair: the law of the text, and how often drafts are right, to exact figures."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
from pair import decoder, pair
from scipy.stats import binomtest, chisquare
from support import next_logits, warped
from torch import Tensor

from specdec_core import SamplingParams
from specdec_core.demo import DRAFT
from specdec_core.model.loading import load_model

ROWS = 256
PARAMS = SamplingParams(max_new_tokens=3, temperature=0.7, top_p=0.9, ignore_eos=True)
COLD = 0.4  # q is more certain than p: its likeliest tokens are refused now and then


@functools.cache
def prompt() -> list[int]:
    """Five tokens share what follows, and the likeliest has not half of it."""
    return list(pair()[1]("Once upon a time, there was a")["input_ids"])


def law_after(model: Any, text: tuple[int, ...] = ()) -> Tensor:
    """What a model says after the prompt and this text, by a plain pass: [V]."""
    return warped(next_logits(model, [*prompt(), *text])[None].double(), PARAMS).softmax(dim=-1)[0]


@functools.cache
def likely_texts() -> dict[tuple[int, ...], float]:
    """The texts of three tokens that are to be expected at least six times, with their chances."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(PARAMS.max_new_tokens):
        law = {
            (*text, token): chance * p
            for text, chance in law.items()
            for token, p in enumerate(law_after(pair()[0], text).tolist())
            if chance * p * ROWS >= 6
        }
    return law


@functools.cache
def first_accepted() -> dict[str, float]:
    """The exact chance that the first level of the first draft is accepted, by how it is drawn."""
    p, draft = law_after(pair()[0]), load_model(str(DRAFT), device="cpu")[0]
    q, cold = law_after(draft), (next_logits(draft, prompt()).double() / COLD).softmax(dim=-1)
    best = q.topk(2).indices
    return {
        "top": float(p[best[0]]),
        "drawn": float(p.minimum(q).sum()),
        "drawn cold": float(p.minimum(cold).sum()),
        "top two": float(p[best].sum()),
    }


def sample(drafter: str, verifier: str) -> tuple[Counter[tuple[int, ...]], int]:
    """Sample many texts; count each, and the rows whose first draft was accepted in part at least."""
    made, accepted = dict[int, Any](), 0
    params = [PARAMS.replace(seed=seed) for seed in range(ROWS)]
    for done in decoder(drafter, verifier=verifier, max_batch=64, draft_tokens=None).rounds(
        [prompt()] * ROWS, params
    ):
        for row, path in zip(done.batch.rows, done.outcome.paths, strict=True):
            accepted += row.id not in made and bool(path)
            made[row.id] = row
    return Counter(tuple(row.output) for row in made.values()), accepted


@pytest.mark.parametrize(
    ("drafter", "verifier", "drawn"),
    [
        ("small_model:num_tokens=2", "rejection", "top"),
        ("small_model:num_tokens=2,draft=sampled", "rejection", "drawn"),
        (f"small_model:num_tokens=2,draft=sampled,temperature={COLD}", "rejection", "drawn cold"),
        ("small_model:num_tokens=2", "block", "top"),
        ("tree_top2:depth=2", "tree_mask", "top two"),
        (f"tree_top2:depth=2,children=sampled,temperature={COLD}", "tree_mask", ""),
    ],
)
def test_texts_and_acceptance_are_those_of_p_and_q(drafter: str, verifier: str, drawn: str) -> None:
    seen, accepted = sample(drafter, verifier)
    counts, expected = [seen[text] for text in likely_texts()], [c * ROWS for c in likely_texts().values()]
    assert len(counts) > 8
    assert chisquare([*counts, ROWS - sum(counts)], [*expected, ROWS - sum(expected)]).pvalue > 1e-3
    if drawn:
        assert binomtest(accepted, ROWS, first_accepted()[drawn]).pvalue > 1e-3
