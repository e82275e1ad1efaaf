"""Several drafters in order, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drafting import Recorded, cousin, early, nodes_of, plain, says, small, tree
from scipy.stats import chisquare
from support import ids, markov_llama

from specdec_core import (
    Budget,
    Context,
    Draft,
    Drafter,
    DrafterError,
    DraftLaw,
    IncompatiblePair,
    Outcome,
    Registry,
    RowDrafter,
    RowDrafterConfig,
    SamplingParams,
    SpecDecoder,
    Stats,
    UnknownPlugin,
)
from specdec_core.drafting.combination import Combination
from specdec_core.plugins.choice import build_drafter
from specdec_core.testing.models import tiny_model
from specdec_drafters import PromptLookup


def lookup(**options: Any) -> PromptLookup:
    return PromptLookup(PromptLookup.Config(**options))


class Picky(RowDrafter):
    """Drafts token 1 after prompts that begin with 0, and remembers what it observed."""

    name = "picky"

    def __init__(self, fails: bool = False) -> None:
        super().__init__(RowDrafterConfig(num_tokens=3))
        self.fails, self.asked = fails, list[tuple[int, int]]()  # (first token, budget)
        self.outcomes: list[Outcome] = []

    def propose_row(self, tokens: Sequence[int], budget: int) -> list[int]:
        self.asked.append((tokens[0], budget))
        if self.fails:
            raise KeyError("no such luck")
        return [1] * budget if tokens[0] == 0 else []

    def observe(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def built(text: str) -> Drafter:
    return build_drafter(text, Registry.discover())


def test_its_text() -> None:
    one = built("prompt_lookup:max_ngram=4,num_tokens=7,small_model:model=a,draft=sampled,early_exit:layer=2")
    assert isinstance(one, Combination)
    assert one.name == "prompt_lookup,small_model,early_exit"
    assert one.config.model_dump()["members"]["prompt_lookup"]["num_tokens"] == 7
    assert one.capabilities.laws == {DraftLaw.ONE_HOT, DraftLaw.SAMPLED}
    assert (one.capabilities.max_depth, one.capabilities.nodes, one.capabilities.makes_trees) == (7, 7, False)
    assert built("prompt_lookup").name == "prompt_lookup"
    assert built("early_exit:layer=1,early_exit:layer=2").name == "early_exit,early_exit#2"
    with pytest.raises(UnknownPlugin, match="small_modle"):
        built("prompt_lookup,small_modle:model=a")


def test_capabilities_are_all_the_members() -> None:
    both = Combination([lookup(num_tokens=9), tree(layer=1)])
    assert (both.capabilities.max_depth, both.capabilities.nodes, both.capabilities.makes_trees) == (
        9,
        14,
        True,
    )
    with pytest.raises(IncompatiblePair, match="chains"):
        SpecDecoder(tiny_model("llama"), drafter=both, verifier="rejection", draft_tokens=None)


MEMBERS: dict[str, Any] = {
    "lookup, small": lambda target: [lookup(num_tokens=3), small(cousin(target))],
    "lookup, tree": lambda target: [lookup(num_tokens=3), tree(cousin(target))],
    "lookup, sampled, early": lambda target: [
        lookup(min_ngram=2),
        small(cousin(target), draft="sampled", temperature=1.0, min_confidence=0.3),
        early(1),
    ],
    "picky, sampled tree": lambda target: [
        Picky(),
        tree(cousin(target), children="sampled", temperature=1.0),
    ],
    "lookup, coupled": lambda target: [lookup(), small(cousin(target), draft="coupled")],
}


@pytest.mark.parametrize("verifier", ["greedy", "match"])
@pytest.mark.parametrize("members", MEMBERS.values(), ids=list(MEMBERS))
def test_lossless(members: Any, verifier: str) -> None:
    target = tiny_model("llama", layers=3)
    prompts = [[0, 5], [3, 4, 5, 6] * 4, ids(9), [0], ids(20)]
    drafter = Combination(members(target))
    decoder = SpecDecoder(
        target, drafter=drafter, verifier=verifier, max_batch=3, strict=True, draft_tokens=None
    )
    assert says(decoder, prompts, 24) == [plain(target, tuple(prompt), 24) for prompt in prompts]


def test_the_first_that_proposes_wins_row_by_row() -> None:
    target = tiny_model("llama")
    picky, other = Picky(), Recorded(tree(cousin(target)))
    decoder = SpecDecoder(
        target, drafter=Combination([picky, other]), verifier="match", strict=True, draft_tokens=None
    )
    prompts = [[0, 1], [2, 3], [0, 4], [5, 6]]
    rounds = decoder.rounds(prompts, SamplingParams(max_new_tokens=12))
    first = next(rounds)
    assert first.draft.sources == ("picky", "tree_top2", "picky", "tree_top2")
    assert nodes_of(first.draft, 0) == [(1, -1), (1, 0), (1, 1)]
    assert len(nodes_of(first.draft, 1)) == 14
    assert [text for text, _ in other.drafts] == [(2, 3), (5, 6)]
    for done in rounds:
        for row, source in zip(done.batch.rows, done.draft.sources or (), strict=False):
            assert source in {"", "picky" if row.prompt[0] == 0 else "tree_top2"}
    for outcome in picky.outcomes:
        paths = dict(zip(outcome.rows, outcome.paths, strict=True))
        assert not paths.get(1)
        assert not paths.get(3)


def test_members_stay_in_step_with_rows_of_others() -> None:
    """The small model drafts some rounds of a row; in those it is as good as alone."""
    target, prompt = tiny_model("llama"), [7, 8, 9] * 3
    ahead = [*prompt, *plain(target, tuple(prompt), 60)]

    class Hints(RowDrafter):
        """Right tokens, now and then."""

        name = "hints"

        def propose_row(self, tokens: Sequence[int], budget: int) -> list[int]:
            at = len(tokens)
            return ahead[at : at + min(budget, 3)] if at % 3 == 0 else []

    drafter = Combination([Hints(RowDrafterConfig(num_tokens=10)), small(target, num_tokens=4)])
    decoder = SpecDecoder(target, drafter=drafter, strict=True, draft_tokens=None)
    result = decoder.generate(prompt, SamplingParams(max_new_tokens=60))
    assert result.token_ids == ahead[len(prompt) :]
    assert result.stats.acceptance_rate == 1.0
    assert set(result.stats.by_drafter) == {"hints", "small_model"}


def test_a_members_own_limits_hold() -> None:
    picky = Picky()
    decoder = SpecDecoder(
        tiny_model("llama"),
        drafter=Combination([picky, lookup(num_tokens=10)]),
        strict=True,
        draft_tokens=None,
    )
    decoder.generate([[0, 1], [2, 2, 2]], SamplingParams(max_new_tokens=20))
    assert max(budget for _, budget in picky.asked) == 3


def test_statistics_of_each_member() -> None:
    target = tiny_model("llama")
    drafter = Combination([Picky(), small(target, num_tokens=4)])
    decoder = SpecDecoder(target, drafter=drafter, strict=True, draft_tokens=None)
    results = decoder.generate([[0, 1], [2, 3]], SamplingParams(max_new_tokens=20))
    stats = Stats.pooled(result.stats for result in results)
    by = stats.by_drafter
    assert by["small_model"].accepted_tokens == by["small_model"].drafted_tokens == 16
    assert by["picky"].drafted_tokens + 16 == stats.drafted_tokens
    assert by["picky"].accepted_tokens + 16 == stats.accepted_tokens
    assert by["picky"].rounds + by["small_model"].rounds <= stats.rounds
    assert stats.to_dict()["by_drafter"]["small_model"]["drafted_tokens"] == 16
    alone = SpecDecoder(target, drafter=small(target), strict=True, draft_tokens=None).generate([2, 3])
    assert "by_drafter" not in alone.stats.to_dict()


def test_members_of_one_name_draw_apart() -> None:
    """Else the second's draws would be the first's."""
    target = tiny_model("llama")
    draws = []

    class Watching(Recorded):
        def propose(self, context: Context, budget: Budget) -> Draft:
            even = torch.ones((len(context.rows), 1000))
            draws.append(context.rng.categorical(even, 0, 0).tolist())
            return Draft.empty(len(context.rows))

    members = [Watching(small(target)), Watching(small(target))]
    decoder = SpecDecoder(target, drafter=Combination(members), strict=True, draft_tokens=None)
    rounds = decoder.rounds([ids(3)], SamplingParams(max_new_tokens=9))
    next(rounds)
    rounds.close()
    assert draws[0] != draws[1]


def test_a_member_that_fails_is_named(caplog: pytest.LogCaptureFixture) -> None:
    target, prompt = tiny_model("llama"), (2, 3)
    strict = SpecDecoder(
        target, drafter=Combination([lookup(), Picky(fails=True)]), strict=True, draft_tokens=None
    )
    with pytest.raises(DrafterError, match="drafter 'picky': propose raised KeyError"):
        strict.generate(list(prompt), SamplingParams(max_new_tokens=20))
    lenient = SpecDecoder(target, drafter=Combination([lookup(), Picky(fails=True)]), draft_tokens=None)
    assert says(lenient, [prompt], 20) == [plain(target, prompt, 20)]
    assert [record.message for record in caplog.records if "picky" in record.message]


@pytest.mark.parametrize("rows", [1000, pytest.param(8000, marks=pytest.mark.slow)])
def test_the_law_of_mixed_batches(rows: int) -> None:
    """Chains and sampled trees in one batch: which of them drafts is decided before any draw."""
    log_p = torch.randn(5, 5, generator=torch.Generator().manual_seed(1)).mul(1.5)
    log_q = log_p + torch.randn(5, 5, generator=torch.Generator().manual_seed(2))
    q = markov_llama(log_q)
    drafter = Combination(
        [
            lookup(min_ngram=1),
            small(q, draft="sampled", min_confidence=0.7),
            tree(q, depth=2, children="sampled"),
        ]
    )
    decoder = SpecDecoder(
        markov_llama(log_p),
        drafter=drafter,
        verifier="tree_mask",
        max_batch=500,
        strict=True,
        draft_tokens=None,
    )
    params = [SamplingParams(max_new_tokens=3, temperature=1.0, seed=seed) for seed in range(rows)]
    results = decoder.generate([[3, 1], [3, 2]] * (rows // 2), params)  # after 1 q is sure, after 2 it is not
    p = log_p.softmax(-1)
    first = (p[1] + p[2]) / 2
    law = {
        (a, b, c): float(first[a] * p[a, b] * p[b, c]) for a in range(5) for b in range(5) for c in range(5)
    }
    seen = Counter(tuple(result.token_ids) for result in results)
    large = [triple for triple in law if law[triple] * rows >= 5]
    counts = [*(seen[t] for t in large), rows - sum(seen[t] for t in large)]
    expected = [*(rows * law[t] for t in large), rows * (1 - sum(law[t] for t in large))]
    assert chisquare(counts, expected).pvalue > 1e-3
    assert set(Stats.pooled(r.stats for r in results).by_drafter) == {
        "prompt_lookup",
        "small_model",
        "tree_top2",
    }
