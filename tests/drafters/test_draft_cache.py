"""A drafter's cache: after any run of rounds it drafts as one that reads the text for the first time."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import pytest
from drafting import RAGGED, Recorded, RejectAt, Sometimes, cousin, early, plain, says, small, tree
from support import ids

from specdec_core import Drafter, SamplingParams, SpecDecoder, Stats, VerifierConfig
from specdec_core.testing.models import tiny_model
from specdec_verifiers import Greedy

MAKES: dict[str, Callable[[Any], Drafter]] = {
    "small_model": lambda target: small(cousin(target), num_tokens=4),
    "early_exit": lambda target: early(2, num_tokens=4),
    "tree_top2": lambda target: tree(cousin(target)),
    "tree_top2 early": lambda target: tree(layer=2),
}


def fresh_draft(make: Callable[[Any], Drafter], target: Any, text: tuple[int, ...], left: int) -> list[Any]:
    """What a drafter proposes after this greedy text that has seen nothing of it round by round.

    The target says the last token itself, in a first round without a draft, so that early exits may draft.
    """
    recorded = Recorded(make(target))
    sometimes = Sometimes(recorded, every=len(text) - 1)
    decoder = SpecDecoder(target, drafter=sometimes, strict=True, draft_tokens=None)
    next(iter_ := decoder.rounds([list(text[:-1])], SamplingParams(max_new_tokens=left + 1)))
    next(iter_)
    iter_.close()
    assert recorded.drafts[-1][0] == text
    return recorded.drafts[-1][1]


@pytest.mark.parametrize("make", MAKES.values(), ids=list(MAKES))
@pytest.mark.parametrize("rejected", [(), (2, 5, 9)])
def test_later_drafts_are_those_of_a_fresh_drafter(
    make: Callable[[Any], Drafter], rejected: tuple[int, ...]
) -> None:
    target, prompt, n = tiny_model("llama", layers=3), ids(7), 30
    recorded = Recorded(make(target))
    verifier = RejectAt(Greedy(VerifierConfig()), rejected)
    decoder = SpecDecoder(target, drafter=recorded, verifier=verifier, strict=True, draft_tokens=None)
    assert says(decoder, [prompt], n) == [plain(target, tuple(prompt), n)]
    later = [(text, nodes) for text, nodes in recorded.drafts if len(text) > len(prompt) + 1]
    assert len(later) > 4
    for text, nodes in later:
        assert nodes == fresh_draft(make, target, text, len(prompt) + n - len(text))


@pytest.mark.parametrize("make", MAKES.values(), ids=list(MAKES))
def test_rows_that_are_not_asked_for_stay_in_step(make: Callable[[Any], Drafter]) -> None:
    target = tiny_model("llama", layers=3)
    prompts = [ids(length) for length in RAGGED]
    sometimes = Sometimes(make(target), every=3)
    decoder = SpecDecoder(target, drafter=sometimes, strict=True, draft_tokens=None)
    assert says(decoder, prompts, 24) == [plain(target, tuple(prompt), 24) for prompt in prompts]
    asked = [(text, nodes) for text, nodes in sometimes.drafts if nodes]
    assert any(not nodes for text, nodes in sometimes.drafts)
    longest = [
        max((item for item in asked if item[0][: len(p)] == tuple(p)), key=lambda x: len(x[0]))
        for p in prompts
    ]
    for (text, nodes), prompt in zip(longest, prompts, strict=True):
        assert nodes == fresh_draft(make, target, text, len(prompt) + 24 - len(text))


@pytest.mark.parametrize("make", MAKES.values(), ids=list(MAKES))
def test_caches_hold_a_prefix_of_the_committed_tokens(make: Callable[[Any], Drafter]) -> None:
    target = tiny_model("llama", layers=3)
    drafter = make(target)
    decoder = SpecDecoder(target, drafter=drafter, max_batch=2, strict=True, draft_tokens=None)
    model: Any = drafter.draft_model.cached  # type: ignore[attr-defined]
    for done in decoder.rounds([ids(length) for length in RAGGED], SamplingParams(max_new_tokens=20)):
        for row in done.batch.rows:
            if row.finished:
                continue
            assert decoder.target.runner.held(row.place) == len(row.tokens) - 1
            assert len(row.tokens) - 5 <= model.held(row.place) <= len(row.tokens) - 1
    assert not model._held or model._lender is not None


def test_a_model_that_finds_no_memory_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its cache would never again be empty, nor small."""
    target, prompt = tiny_model("llama", layers=3), ids(9)
    drafter = small(tiny_model("llama"), num_tokens=4)
    decoder = SpecDecoder(target, drafter=drafter)
    model: Any = drafter.draft_model.cached

    def full(*sizes: int) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(model.cache, "resize", full)
        assert says(decoder, [prompt], 12) == [plain(target, tuple(prompt), 12)]
    assert not model._held
    assert model.places.bytes_now == 0
    model.places.admit({}, None)
    assert model.cache.places == 0, "no row is there"
    result = decoder.generate(prompt, SamplingParams(max_new_tokens=12))
    assert result.token_ids == plain(target, tuple(prompt), 12)
    assert result.stats.drafted_tokens > 0


@pytest.mark.parametrize(("n", "chunk", "calls"), [(33, 512, 0), (32, 512, 0), (33, 4, 2)])
def test_the_target_as_its_own_draft(n: int, chunk: int, calls: int) -> None:
    target, prompt = tiny_model("llama"), ids(9)
    decoder = SpecDecoder(
        target, drafter=small(target, num_tokens=4), strict=True, prefill_chunk=chunk, draft_tokens=None
    )
    result = decoder.generate(prompt, SamplingParams(max_new_tokens=n))
    assert result.token_ids == plain(target, tuple(prompt), n)
    assert result.stats.acceptance_rate == 1.0
    assert result.stats.rounds == ceil(n / 5) == 7
    assert result.stats.prefill_calls == calls


def test_acceptance_recovers_after_rejections() -> None:
    target, prompt = tiny_model("llama"), ids(9)
    verifier = RejectAt(Greedy(VerifierConfig()), (2, 5, 9))
    decoder = SpecDecoder(
        target, drafter=small(target, num_tokens=4), verifier=verifier, strict=True, draft_tokens=None
    )
    says(decoder, [prompt], 60)
    accepted = [int(count) for count in verifier.accepted]
    assert [accepted[i - 1] for i in (2, 5, 9)] == [0, 0, 0]
    assert all(count == 4 for i, count in enumerate(accepted[:-1], 1) if i not in (2, 5, 9))


@pytest.mark.parametrize("kind", ["small_model", "tree_top2"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_the_draft_models_own_context_limit(architecture: str, kind: str) -> None:
    target = tiny_model(architecture, context=128)
    draft = tiny_model(architecture, context=32)  # gpt2: a position past the table would raise
    recorded = Recorded(small(draft) if kind == "small_model" else tree(draft))
    decoder = SpecDecoder(target, drafter=recorded, strict=True, draft_tokens=None)
    prompts = [ids(28), ids(3), ids(40)]
    assert says(decoder, prompts, 60) == [plain(target, tuple(prompt), 60) for prompt in prompts]
    limits = [len(text) + depth_of(nodes) for text, nodes in recorded.drafts if nodes]
    assert max(limits) == 32
    assert any(not nodes for text, nodes in recorded.drafts)


@pytest.mark.parametrize("verifier", ["greedy", "match"])
def test_one_long_row_past_the_limit_does_not_stop_the_others(verifier: str) -> None:
    target, draft = tiny_model("llama", context=128), tiny_model("llama", context=32)
    decoder = SpecDecoder(
        target, drafter=small(draft, num_tokens=4), verifier=verifier, strict=True, draft_tokens=None
    )
    long, short = decoder.generate([ids(30), ids(2)], SamplingParams(max_new_tokens=20))
    assert short.stats.drafted_tokens > long.stats.drafted_tokens
    assert short.stats.acceptance_rate == 1.0
    assert Stats.pooled([long.stats, short.stats]).new_tokens == 40


def depth_of(nodes: list[tuple[int, int]]) -> int:
    depths: list[int] = []
    for _, parent in nodes:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths)
