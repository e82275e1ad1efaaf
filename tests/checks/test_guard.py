"""A drafter that fails or breaks its contract: the run goes on without it, or with `strict` it raises.

In all of these the output is that of plain decoding, one warning names the drafter and what it did, and the
next call tries it again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import (
    VOCAB,
    ScriptedDrafter,
    accepting,
    base,
    following,
    greedy,
    ids,
    oracle,
    sampled,
    tiny_llama,
    tree_draft,
)

from specdec_core import (
    HOLE,
    Budget,
    Capabilities,
    Context,
    DecoderBusy,
    Draft,
    DraftContractViolation,
    DrafterError,
    DraftLaw,
    InvalidParameter,
    Outcome,
    PluginError,
    RowDrafter,
    RowDrafterConfig,
    Rows,
    SamplingParams,
    SpecDecoder,
    TargetInfo,
    UsageError,
)
from specdec_core.checks.draft_values import RULES, check_values

PROMPT = ids(7, 31)
K = 4
BAD_ROUND = 2  # the third proposal, so that the drafter has worked before


SAMPLED_PARAMS = SamplingParams(max_new_tokens=14, temperature=0.9, seed=4)


def known() -> Any:
    """What is said after PROMPT, greedily or with the seed of SAMPLED_PARAMS."""
    texts = base(tiny_llama(), PROMPT, 60), sampled(tiny_llama(), PROMPT, SAMPLED_PARAMS)
    return following(*([*PROMPT, *text] for text in texts))


class Faulty(ScriptedDrafter):
    """Right most of the time; from one proposal on, what it returns is spoiled."""

    name = "faulty"

    def __init__(self, spoil: Callable[[Draft, Budget], Any], *, at: int = BAD_ROUND, **options: Any) -> None:
        super().__init__(accepting(known(), [3], K), **{"depth": K, **options})
        self.spoil, self.at = spoil, at

    def propose(self, context: Context, budget: Budget) -> Any:
        draft = super().propose(context, budget)
        return draft if self.proposals <= self.at else self.spoil(draft, budget)


def with_token(token: int) -> Callable[[Draft, Budget], Draft]:
    def spoil(draft: Draft, budget: Budget) -> Draft:
        tokens = draft.tokens.clone()
        tokens[:, 1] = token
        return replace(draft, tokens=tokens)

    return spoil


def with_parents(*parents: int) -> Callable[[Draft, Budget], Draft]:
    return lambda draft, budget: replace(draft, parents=torch.tensor([parents]))


def with_law(law: int, probs: Any = None) -> Callable[[Draft, Budget], Draft]:
    def spoil(draft: Draft, budget: Budget) -> Draft:
        q = None if probs is None else probs(torch.full((1, draft.nodes, VOCAB), 1 / VOCAB))
        return replace(draft, laws=torch.full_like(draft.laws, law), probs=q)

    return spoil


def wide(draft: Draft, budget: Budget) -> Draft:
    return tree_draft([[(token, -1) for token in range(9)]])


def deep(draft: Draft, budget: Budget) -> Draft:
    return Draft.chains([[*draft.tokens[0].tolist(), 1, 2, 3]])


def endless(draft: Draft, budget: Budget) -> Draft:
    return Draft.chains([list(range(90)) * 30])


def lied_depth(draft: Draft, budget: Budget) -> Draft:
    return replace(draft, depth=2)


def spread_out(draft: Draft, budget: Budget) -> Draft:
    """As many columns as one likes, all holes but those at the end."""
    return Draft(
        torch.cat([torch.zeros((1, 300), dtype=torch.int64), draft.tokens], dim=1),
        torch.cat(
            [torch.full((1, 300), HOLE), (draft.parents + 300).where(draft.parents >= 0, draft.parents)],
            dim=1,
        ),
        draft.laws,
        draft.depth,
        draft.width,
    )


def bad_q(fill: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def spoiled(q: torch.Tensor) -> torch.Tensor:
        q = q.clone()
        q[:, 1, 3] = fill
        return q

    return spoiled


TREE = {"trees": True, "nodes": 8}
SAMPLED = {"laws": (DraftLaw.ONE_HOT, DraftLaw.SAMPLED)}

# what it returns -> (the spoiling, words of the rule, options)
BREACHES: dict[str, tuple[Callable[[Draft, Budget], Any], str, dict[str, Any]]] = {
    "None": (lambda draft, budget: None, "must return a Draft, not NoneType", {}),
    "a list": (lambda draft, budget: [1, 2], "must return a Draft, not list", {}),
    "ids in a list": (
        lambda draft, budget: replace(draft, tokens=[[1, 2, 3, 4]]),
        "`tokens` must be int64 [1, n], not list",
        {},
    ),
    "another row too many": (
        lambda draft, budget: Draft.chains([[1], [2]]),
        "`tokens` must be int64 [1, n], not int64 [2, 1]",
        {},
    ),
    "an empty draft of no rows": (
        lambda draft, budget: Draft.empty(0),
        "`tokens` must be int64 [1, n], not int64 [0, 0]",
        {},
    ),
    "flat tokens": (
        lambda draft, budget: replace(draft, tokens=draft.tokens[0], parents=draft.parents[0]),
        "`tokens` must be int64 [1, n], not int64 [4]",
        {},
    ),
    "int32 tokens": (
        lambda draft, budget: replace(draft, tokens=draft.tokens.int()),
        "`tokens` must be int64 [1, n], not int32 [1, 4]",
        {},
    ),
    "float parents": (
        lambda draft, budget: replace(draft, parents=draft.parents.float()),
        "`parents` must be int64 [1, 4], not float32 [1, 4]",
        {},
    ),
    "parents of another shape": (with_parents(-1, 0), "`parents` must be int64 [1, 4], not int64 [1, 2]", {}),
    "laws of another dtype": (
        lambda draft, budget: replace(draft, laws=draft.laws.long()),
        "`laws` must be uint8 [1], not int64 [1]",
        {},
    ),
    "laws of a scalar": (
        lambda draft, budget: replace(draft, laws=draft.laws[0]),
        "`laws` must be uint8 [1], not uint8 []",
        {},
    ),
    "q over another vocabulary": (
        with_law(DraftLaw.SAMPLED, lambda q: q[..., :-1]),
        f"`probs` must be float32 [1, 4, {VOCAB}], not float32 [1, 4, {VOCAB - 1}]",
        SAMPLED,
    ),
    "q in float64": (
        with_law(DraftLaw.SAMPLED, lambda q: q.double()),
        f"`probs` must be float32 [1, 4, {VOCAB}], not float64 [1, 4, {VOCAB}]",
        SAMPLED,
    ),
    "scores of another shape": (
        lambda draft, budget: replace(draft, scores=torch.zeros(1, 3)),
        "`scores` must be float32 [1, 4], not float32 [1, 3]",
        {},
    ),
    "another device": (
        lambda draft, budget: replace(draft, tokens=draft.tokens.to("meta")),
        "`tokens` must be on cpu, not on meta",
        {},
    ),
    "no depth": (lambda draft, budget: replace(draft, depth=0), "depth and width of at least 1", {}),
    "a depth that is no count": (
        lambda draft, budget: replace(draft, depth=2.5),
        "depth and width must be int, not 2.5 and 1",
        {},
    ),
    "no width": (lambda draft, budget: replace(draft, width=0), "depth and width of at least 1", {}),
    "a token behind the vocabulary": (with_token(VOCAB), "a token id outside the vocabulary", {}),
    "a huge token": (with_token(2**62), "a token id outside the vocabulary", {}),
    "a negative token": (with_token(-1), "a token id outside the vocabulary", {}),
    "a parent that comes later": (with_parents(-1, 2, 1, 2), "a parent that is no earlier node", {}),
    "its own parent": (with_parents(-1, 0, 2, 2), "a parent that is no earlier node", {}),
    "a parent behind the end": (with_parents(-1, 0, 99, 2), "a parent that is no earlier node", {}),
    "a parent that is nothing": (with_parents(-1, 0, -3, 2), "a parent that is no earlier node", {}),
    "deeper than the budget": (deep, "a node deeper than the budget", TREE),
    "far more than the budget": (endless, "more nodes than the budget", {}),
    "more columns than there is room for": (spread_out, "more nodes than the budget", {}),
    "deeper than it says": (lied_depth, "a node deeper than the budget or the draft's `depth`", {}),
    "more nodes than the budget": (wide, "more nodes than the budget", TREE),
    "a tree where it makes none": (wide, "makes_trees=False", {"nodes": 9}),
    "a hidden tree where it makes none": (
        with_parents(-1, -1, 0, 0),
        "more children of one node than the draft's `width`",
        {},
    ),
    "more children than its width": (
        lambda draft, budget: replace(tree_draft([[(1, -1), (2, -1), (3, -1)]]), width=2),
        "more children of one node than the draft's `width`",
        TREE,
    ),
    "an undeclared law": (with_law(DraftLaw.COUPLED), "a law that its capabilities do not list", {}),
    "an unknown law": (with_law(77), "a law that its capabilities do not list", {}),
    "a sampled law without q": (with_law(DraftLaw.SAMPLED), "q is missing", SAMPLED),
    "a drafter that only samples and gives no q": (
        with_law(DraftLaw.SAMPLED),
        "its law is sampled, but it gave no q",
        {"laws": (DraftLaw.SAMPLED,), "at": 0},
    ),
    "NaN in q": (with_law(DraftLaw.SAMPLED, bad_q(float("nan"))), "not a finite non-negative", SAMPLED),
    "infinity in q": (with_law(DraftLaw.SAMPLED, bad_q(float("inf"))), "not a finite non-negative", SAMPLED),
    "a negative q": (with_law(DraftLaw.SAMPLED, bad_q(-0.001)), "not a finite non-negative", SAMPLED),
    "a q that does not sum to one": (with_law(DraftLaw.SAMPLED, bad_q(0.5)), "distribution", SAMPLED),
}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name == "specdec"]


@pytest.mark.parametrize("params", [greedy(14), SAMPLED_PARAMS], ids=["greedy", "match"])
@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_of_the_contract_ends_drafting_and_not_the_run(
    breach: str, params: SamplingParams, caplog: pytest.LogCaptureFixture
) -> None:
    """B102: greedy and `match`, both exact through it; the next call tries the drafter again."""
    model = tiny_llama()
    spoil, rule, options = BREACHES[breach]
    drafter = Faulty(spoil, **options)
    decoder = SpecDecoder(model, drafter=drafter, verifier="auto" if params.greedy else "match")
    for _ in range(2 if params.greedy else 1):
        caplog.clear()
        result = decoder.generate(PROMPT, params)
        expected = base(model, PROMPT, 14) if params.greedy else sampled(model, PROMPT, params)
        assert result.token_ids == expected
        [warning] = warnings_of(caplog)
        assert "'faulty'" in warning
        assert rule in warning
        assert drafter.proposals > drafter.at  # it did draft before, and no more afterwards
        assert not drafter.now
        drafter.proposals = 0


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_of_the_contract_raises_when_strict(breach: str) -> None:
    """B102: by name and rule; the decoder can be used afterwards."""
    model = tiny_llama()
    spoil, rule, options = BREACHES[breach]
    drafter = Faulty(spoil, **options)
    decoder = SpecDecoder(model, drafter=drafter, strict=True)
    with pytest.raises(DraftContractViolation) as caught:
        decoder.generate(PROMPT, greedy(14))
    assert "'faulty'" in str(caught.value)
    assert rule in caught.value.rule
    assert caught.value.drafter == "faulty"
    assert "\n" not in str(caught.value)
    assert not drafter.now
    drafter.at, drafter.script = 10**6, lambda ask: []
    assert decoder.generate(PROMPT, greedy(14)).token_ids == base(model, PROMPT, 14)


CUTS: dict[str, tuple[list[int], Budget, list[int], str]] = {
    # parents, budget, the nodes that are kept, the rule
    "all is well": ([-1, 0, 0, 2, -2], Budget([3], 9), [0, 1, 2, 3], ""),
    "too deep": ([-1, 0, 1, 0, 3], Budget([2], 9), [0, 1, 3], "deeper"),
    "no budget": ([-1, 0, 1, 0, 3], Budget([0], 9), [], "deeper"),
    "too many": ([-1, 0, -2, 0, 3], Budget([4], 3), [0, 1, 3], "more nodes"),
    "below a later node": ([-1, 2, -1, 1, 2], Budget([4], 9), [0, 2, 4], "earlier"),
    "below a hole": ([-2, 0, -1, 1, 2], Budget([4], 9), [2, 4], ""),
    "the third child and what hangs on it": ([-1, -1, -1, 2, 0], Budget([4], 9), [0, 1, 4], "children"),
}


@pytest.mark.parametrize("cut", CUTS)
def test_what_breaks_a_rule_is_cut_before_it_is_fed(cut: str) -> None:
    """B102: with all that hangs on it; earlier nodes stay."""
    parents, budget, kept, rule = CUTS[cut]
    n = len(parents)
    draft = Draft.of(torch.arange(n)[None], torch.tensor([parents]), DraftLaw.ONE_HOT, depth=4, width=2)
    can = Capabilities(frozenset({DraftLaw.ONE_HOT}), max_depth=4, max_nodes=9, makes_trees=True)
    checked = check_values(draft, budget, can, VOCAB)
    assert checked.tree is not None
    assert checked.flags is not None
    assert checked.counts is not None
    assert checked.tree.real.tolist() == [[node in kept for node in range(n)]]
    assert checked.draft.parents.tolist() == [[p if i in kept else HOLE for i, p in enumerate(parents)]]
    assert checked.counts.tolist() == [len(kept)]
    broken = [text for bit, text in enumerate(RULES) if int(checked.flags) >> bit & 1]
    assert all(rule in text for text in broken)
    assert bool(broken) == bool(rule)


@pytest.mark.parametrize("counts", [(0, -1), (-1, 4), (5, 4), (100, 100), (2.0, 4), (4,), (True, 4)])
@pytest.mark.parametrize("strict", [False, True])
def test_counts_that_cannot_be_are_the_drafters_fault(
    counts: tuple[Any, ...], strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Invariant 6: nothing is fed by them, and the run goes on."""

    class Liar(ScriptedDrafter):
        def propose(self, context: Context, budget: Budget) -> Draft:
            draft = super().propose(context, budget)
            return replace(draft, counts=counts) if draft.nodes == 4 and draft.rows == 2 else draft

    prompts = [ids(12), ids(9, 1)]
    decoder = SpecDecoder(
        tiny_llama(), drafter=Liar(lambda ask: [9] * ask.depth, depth=4), draft_tokens=4, strict=strict
    )
    if strict:
        with pytest.raises(DraftContractViolation, match="`counts`"):
            decoder.generate(prompts, greedy(8))
    else:
        said = [result.token_ids for result in decoder.generate(prompts, greedy(8))]
        assert said == [base(tiny_llama(), prompt, 8) for prompt in prompts]
        assert "`counts`" in caplog.text


def test_what_stands_behind_counts_is_no_node() -> None:
    tokens, parents = torch.arange(4).repeat(2, 1), torch.tensor([[-1, 0, -1, 2], [-1, -1, 1, 1]])
    draft = Draft.of(tokens, parents, DraftLaw.ONE_HOT, depth=4, width=2, counts=(4, 2))
    can = Capabilities(frozenset({DraftLaw.ONE_HOT}), max_depth=4, max_nodes=9, makes_trees=True)
    checked = check_values(draft, Budget([4, 4], 9), can, VOCAB)
    assert checked.draft.parents.tolist() == [[-1, 0, -1, 2], [-1, -1, HOLE, HOLE]]
    assert checked.counts is not None
    assert checked.counts.tolist() == [4, 2]


@pytest.mark.parametrize("breach", ["an undeclared law", "a sampled law without q", "NaN in q"])
def test_a_row_that_cannot_be_verified_loses_its_draft(breach: str) -> None:
    """B102: that row alone."""
    spoil, rule, _ = BREACHES[breach]
    draft = Draft.chains([[1, 2, 3]] * 3)
    spoiled = spoil(draft.for_rows([1]), Budget([3], 3))
    laws = torch.cat([draft.laws[:1], spoiled.laws, draft.laws[:1]])
    probs = None if spoiled.probs is None else spoiled.probs.expand(3, -1, -1)
    can = Capabilities(frozenset({DraftLaw.ONE_HOT, DraftLaw.SAMPLED}), max_depth=3)
    checked = check_values(replace(draft, laws=laws, probs=probs), Budget([3, 3, 3], 3), can, VOCAB)
    assert checked.flags is not None
    assert checked.counts is not None
    assert checked.counts.tolist() == [3, 0, 3]
    assert [flag > 0 for flag in checked.flags.tolist()] == [False, True, False]
    assert (checked.draft.parents[1] == HOLE).all()
    [text] = [text for bit, text in enumerate(RULES) if int(checked.flags[1]) >> bit & 1]
    assert rule in text


@pytest.mark.parametrize("breach", ["a sampled law without q", "NaN in q", "a negative q"])
def test_a_draft_without_a_usable_q_does_not_reach_a_verifier_that_reads_it(
    breach: str, caplog: pytest.LogCaptureFixture
) -> None:
    """B102: and the warning says what that may have done to the law."""
    spoil, _, options = BREACHES[breach]
    drafter = Faulty(spoil, at=0, **options)
    drafter.script = lambda ask: [1, 2, 3, 4][: ask.depth]
    decoder = SpecDecoder(tiny_llama(), drafter=drafter, verifier="rejection")
    result = decoder.generate(PROMPT, SAMPLED_PARAMS)
    assert len(result.token_ids) == 14
    [warning] = warnings_of(caplog)
    assert "off the target's law" in warning


def test_bounds_that_are_far_too_large_cost_nothing() -> None:
    """B102: depth and width are bounds; loops go no further than there are nodes."""
    model = tiny_llama()
    drafter = Faulty(lambda draft, budget: replace(draft, depth=10**12, width=10**12), at=0, **TREE)
    result = SpecDecoder(model, drafter=drafter, strict=True).generate(PROMPT, greedy(14))
    assert result.token_ids == base(model, PROMPT, 14)
    assert result.stats.rounds < 6


def test_holes_are_no_breach() -> None:
    """B102: a draft may be wider than its nodes, which may stand anywhere."""
    model = tiny_llama()

    def holed(draft: Draft, budget: Budget) -> Draft:
        holes = torch.full((1, 2), HOLE)
        tokens = torch.cat([holes.clamp(min=0), draft.tokens, holes.clamp(min=0)], dim=1)
        up = (draft.parents + 2).where(draft.parents >= 0, draft.parents)
        return replace(draft, tokens=tokens, parents=torch.cat([holes, up, holes], dim=1))

    drafter = Faulty(holed, at=0, depth=K, nodes=8, trees=True)
    result = SpecDecoder(model, drafter=drafter, strict=True).generate(PROMPT, greedy(30))
    assert result.token_ids == base(model, PROMPT, 30)
    assert result.stats.accepted_tokens > 15


def test_what_cannot_be_fed_is_cut_in_draft_order(caplog: pytest.LogCaptureFixture) -> None:
    """B102: the nodes before the breach are verified as they were drawn."""
    model = tiny_llama()
    said = base(model, PROMPT, 30)
    drafter = Faulty(lambda draft, budget: Draft.chains([said[8:20]]), at=2)
    result = SpecDecoder(model, drafter=drafter).generate(PROMPT, greedy(30))
    assert result.token_ids == said
    # two rounds of 3 + 1 tokens, then K of the twelve, then no more drafts
    assert result.stats.acceptance_histogram == [17, 0, 0, 2, 1]
    assert len(warnings_of(caplog)) == 1


class Breaking(ScriptedDrafter):
    """Raises in one of its calls, from the n-th on."""

    name = "breaking"

    def __init__(self, call: str, error: BaseException, at: int = 0, k: int = 3) -> None:
        self.call, self.error, self.at = call, error, at
        self.counts: dict[str, int] = {}
        super().__init__(accepting(oracle(tiny_llama(), PROMPT, [1], [2, 3]), [2], k), depth=k)

    def _maybe(self, call: str) -> None:
        self.counts[call] = self.counts.get(call, 0) + 1
        if call == self.call and self.counts[call] > self.at:
            raise self.error

    def bind(self, target: TargetInfo) -> None:
        super().bind(target)
        self._maybe("bind")

    def admit(self, rows: Rows) -> None:
        super().admit(rows)
        self._maybe("admit")

    def propose(self, context: Context, budget: Budget) -> Draft:
        draft = super().propose(context, budget)
        self._maybe("propose")
        return draft

    def observe(self, outcome: Outcome) -> None:
        super().observe(outcome)
        self._maybe("observe")

    def release(self, rows: Any) -> None:
        super().release(rows)
        self._maybe("release")


CALLS = [(call, at) for call in ("admit", "propose", "observe", "release") for at in (0, 1, 2)]
ERRORS = [
    ValueError("the reason\nof it"),
    AssertionError(),
    DrafterError("nobody is named"),
    UsageError("no"),
]


@pytest.mark.parametrize(
    ("call", "at", "error"),
    [*((call, at, ERRORS[0]) for call, at in CALLS), *(("propose", 1, error) for error in ERRORS[1:])],
)
def test_a_drafter_that_raises_is_dropped_with_one_warning(
    call: str, at: int, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """B101: in any call, early or late, with rows that are still to be admitted."""
    model = tiny_llama()
    drafter = Breaking(call, error, at)
    decoder = SpecDecoder(model, drafter=drafter, max_batch=1)
    prompts = [PROMPT, [1], [2, 3]]
    for _ in range(2):
        caplog.clear()
        drafter.counts = {}
        results = decoder.generate(prompts, greedy(12))
        assert [one.token_ids for one in results] == [base(model, prompt, 12) for prompt in prompts]
        [warning] = warnings_of(caplog)
        assert "'breaking'" in warning
        assert f"{call} raised {type(error).__name__}" in warning
        assert str(error).splitlines()[:1] == [] or str(error).splitlines()[0] in warning
        assert "\n" not in warning
        assert drafter.counts[call] >= at + 1
        assert not drafter.now


@pytest.mark.parametrize(("call", "at"), CALLS)
def test_a_drafter_that_raises_raises_when_strict(call: str, at: int) -> None:
    """B101: named, chained to what was raised, and the decoder can be used again."""
    model = tiny_llama()
    error = ValueError("the reason")
    drafter = Breaking(call, error, at)
    decoder = SpecDecoder(model, drafter=drafter, max_batch=1, strict=True)
    prompts = [PROMPT, [1], [2, 3]]
    for _ in range(2):
        drafter.counts, drafter.call = {}, call
        with pytest.raises(DrafterError, match=f"'breaking': {call} raised ValueError: the reason") as caught:
            decoder.generate(prompts, greedy(12))
        assert caught.value.__cause__ is error
        assert caught.value.drafter == "breaking"
        assert not drafter.now
        drafter.call = "nothing"
        results = decoder.generate(prompts, greedy(12))
        assert [one.token_ids for one in results] == [base(model, prompt, 12) for prompt in prompts]


def test_a_drafter_whose_error_cannot_be_shown_is_dropped_like_any(caplog: pytest.LogCaptureFixture) -> None:
    """B101: the fence does not fall over what it caught."""

    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    model = tiny_llama()
    decoder = SpecDecoder(model, drafter=Breaking("propose", Mute(), 1))
    assert decoder.generate(PROMPT, greedy(12)).token_ids == base(model, PROMPT, 12)
    [warning] = warnings_of(caplog)
    assert "propose raised Mute: (its text cannot be shown)" in warning


def test_a_dropped_drafter_hears_nothing_more() -> None:
    """B101: but the release of its rows; others are not even admitted."""
    drafter = Breaking("propose", ValueError("no"), at=1)
    decoder = SpecDecoder(tiny_llama(), drafter=drafter, max_batch=2)
    decoder.generate([PROMPT, [1], [2, 3]], greedy(12))
    last = max(i for i, (call, _) in enumerate(drafter.calls) if call == "propose")
    [(call, rows)] = drafter.calls[last + 1 :]
    assert call == "release"
    assert len(rows) == 2


def test_a_failed_release_does_not_hide_the_first_error() -> None:
    """B101: with `strict`, the error that ended the run is the one that is raised."""

    class Twice(Breaking):
        def release(self, rows: Any) -> None:
            super().release(rows)
            raise RuntimeError("second")

    decoder = SpecDecoder(tiny_llama(), drafter=Twice("propose", ValueError("first"), 1), strict=True)
    with pytest.raises(DrafterError, match="first"):
        decoder.generate(PROMPT, greedy(12))


@pytest.mark.parametrize("error", [UsageError("not this model"), InvalidParameter("layer=9 is wrong")])
def test_a_drafter_may_refuse_a_target_with_a_reason(error: UsageError) -> None:
    """B101: its own error comes through as it is."""
    with pytest.raises(type(error)) as caught:
        SpecDecoder(tiny_llama(), drafter=Breaking("bind", error))
    assert caught.value is error


@pytest.mark.parametrize("error", [KeyError("weights"), RuntimeError("two\nlines"), NotImplementedError()])
def test_a_drafter_that_breaks_while_it_is_bound_is_named(error: Exception) -> None:
    """B101: as one that breaks while it is built."""
    with pytest.raises(PluginError, match="drafter 'breaking'") as caught:
        SpecDecoder(tiny_llama(), drafter=Breaking("bind", error))
    assert caught.value.__cause__ is error
    assert type(error).__name__ in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), SystemExit(3), MemoryError(), torch.OutOfMemoryError("CUDA out of memory")],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("call", ["admit", "propose", "observe"])
def test_an_interrupt_or_a_lack_of_memory_is_no_fault_of_the_drafter(
    call: str, error: BaseException, strict: bool
) -> None:
    """B101: it ends the run, and the decoder can be used again."""
    model = tiny_llama()
    drafter = Breaking(call, error, 1)
    decoder = SpecDecoder(model, drafter=drafter, max_batch=1, strict=strict)
    with pytest.raises(type(error)):
        decoder.generate([PROMPT, [1]], greedy(12))
    assert not drafter.now
    drafter.call = "nothing"
    assert decoder.generate(PROMPT, greedy(12)).token_ids == base(model, PROMPT, 12)


class Parrot(RowDrafter):
    """The drafter of the documentation."""

    name = "parrot"

    def propose_row(self, tokens: Any, budget: int) -> list[int]:
        return [tokens[-1]] * budget


class Greedy(RowDrafter):
    """Returns more than it was asked for."""

    name = "greedy_parrot"

    def propose_row(self, tokens: Any, budget: int) -> list[int]:
        return [tokens[-1]] * (budget + 50)


class Texts(RowDrafter):
    """Returns no ids."""

    name = "texts"

    def propose_row(self, tokens: Any, budget: int) -> Any:
        return ["a", "b"]


class Nothing(RowDrafter):
    """Forgets to return."""

    name = "nothing"

    def propose_row(self, tokens: Any, budget: int) -> Any:
        return None


class Scribbler(RowDrafter):
    """Changes the tokens it is shown."""

    name = "scribbler"

    def propose_row(self, tokens: Any, budget: int) -> list[int]:
        tokens += [1, 2, 3]
        return list(tokens[-budget:])


class Painter(RowDrafter):
    """Changes the tokens it is shown, in place."""

    name = "painter"

    def propose_row(self, tokens: Any, budget: int) -> list[int]:
        tokens[0] = 5
        return list(tokens[-budget:])


def test_a_row_drafter_takes_a_few_lines() -> None:
    """B101: the one of the documentation works."""
    model = tiny_llama()
    decoder = SpecDecoder(model, drafter=Parrot(RowDrafterConfig(num_tokens=4)), strict=True)
    result = decoder.generate([[5], PROMPT], greedy(12))
    assert [one.token_ids for one in result] == [base(model, [5], 12), base(model, PROMPT, 12)]
    assert result[0].stats.drafted_tokens > 0


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (Greedy, "more nodes than the budget"),
        (Texts, "propose raised"),
        (Nothing, "propose raised"),
        (Painter, "propose raised TypeError"),
    ],
)
def test_a_row_drafter_that_is_wrong_is_dropped(
    kind: type[RowDrafter], rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    """B102: what it returns is no chain, or it changes what is committed."""
    model = tiny_llama()
    decoder = SpecDecoder(model, drafter=kind(RowDrafterConfig(num_tokens=4)))
    result = decoder.generate(PROMPT, greedy(20))
    assert result.prompt_token_ids == PROMPT
    assert result.token_ids == base(model, PROMPT, 20)
    [warning] = warnings_of(caplog)
    assert f"'{kind.name}'" in warning
    assert rule in warning


def test_the_committed_tokens_are_a_copy_to_whoever_adds_to_them() -> None:
    """B102: `tokens += ...` in a drafter does not reach the output."""
    model = tiny_llama()
    decoder = SpecDecoder(model, drafter=Scribbler(RowDrafterConfig(num_tokens=4)), strict=True)
    result = decoder.generate(PROMPT, greedy(20))
    assert (result.prompt_token_ids, result.token_ids) == (PROMPT, base(model, PROMPT, 20))
    assert result.stats.drafted_tokens > 0


# --- exceptions and abandoned runs ----------------------------------------------------------------


@pytest.fixture
def failing_forward(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, BaseException], None]]:
    """Let the model's n-th forward from now on raise; `monkeypatch.undo` ends it."""

    def arm(at: int, error: BaseException) -> None:
        model = tiny_llama()
        forward, calls = model.forward, [0]

        def forward_or_raise(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == at:
                raise error
            return forward(*args, **kwargs)

        monkeypatch.setattr(model, "forward", forward_or_raise)

    yield arm
    monkeypatch.undo()


def perfect(prompts: list[list[int]], k: int = 3, **options: Any) -> SpecDecoder:
    drafter = ScriptedDrafter(accepting(oracle(tiny_llama(), *prompts), [k, 0, 1], k), depth=k)
    return SpecDecoder(tiny_llama(), drafter=drafter, strict=True, prefill_chunk=8, **options)


@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("at", [1, 2, 3, 4, 6])
def test_an_exception_in_a_forward_leaves_the_decoder_usable(
    at: int, error: BaseException, failing_forward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B101, invariant 5: in a prefill chunk, the first round, a later one."""
    model, prompts = tiny_llama(), [ids(20, 32), [4], ids(9, 32)]
    decoder = perfect(prompts, max_batch=2)
    failing_forward(at, error)
    with pytest.raises(type(error)) as caught:
        decoder.generate(prompts, greedy(12))
    assert caught.value is error
    monkeypatch.undo()
    results = decoder.generate(prompts, greedy(12))
    assert [one.token_ids for one in results] == [base(model, prompt, 12) for prompt in prompts]


def raise_after(run: Iterator[Any], rounds: int) -> None:
    for i, _ in enumerate(run):
        if i == rounds:
            raise ZeroDivisionError


@pytest.mark.parametrize("taken", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["close", "forget", "raise"])
@pytest.mark.parametrize("kind", ["stream", "rounds"])
def test_an_abandoned_run_leaves_the_decoder_usable(kind: str, how: str, taken: int) -> None:
    """B101, invariant 5."""
    model = tiny_llama()
    decoder = perfect([PROMPT])
    drafter: Any = decoder.drafter
    run: Any = getattr(decoder, kind)(PROMPT, greedy(12))
    if how == "raise":
        with pytest.raises(ZeroDivisionError):
            raise_after(run, taken)
    else:
        for _ in range(taken):
            next(run)
    if how == "forget":
        del run
    else:
        run.close()
    assert not drafter.now
    assert decoder.generate(PROMPT, greedy(12)).token_ids == base(model, PROMPT, 12)
    assert [token for chunk in decoder.stream(PROMPT, greedy(12)) for token in chunk.token_ids] == base(
        model, PROMPT, 12
    )


@pytest.mark.parametrize("kind", ["stream", "rounds"])
def test_a_decoder_in_the_middle_of_a_run_refuses_another(kind: str) -> None:
    """B101: on re-entry and from another thread; the open run is not disturbed."""
    model = tiny_llama()
    decoder = perfect([PROMPT])
    run: Any = getattr(decoder, kind)(PROMPT, greedy(20))
    next(run)
    with pytest.raises(DecoderBusy, match="another call"):
        decoder.generate(PROMPT, greedy(3))
    with pytest.raises(DecoderBusy):
        next(iter(decoder.stream(PROMPT, greedy(3))))
    with pytest.raises(DecoderBusy):
        next(iter(decoder.rounds(PROMPT, greedy(3))))
    raised: list[BaseException] = []

    def call() -> None:
        try:
            decoder.generate(PROMPT, greedy(3))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert [type(error) for error in raised] == [DecoderBusy]
    *_, last = run
    said = last.result.token_ids if kind == "stream" else last.batch.rows[0].output
    assert said == base(model, PROMPT, 20)
    assert decoder.generate(PROMPT, greedy(20)).token_ids == said


def test_a_decoder_may_move_from_thread_to_thread() -> None:
    """B101: one at a time."""
    model = tiny_llama()
    decoder = perfect([PROMPT])
    said: list[list[int]] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: said.append(decoder.generate(PROMPT, greedy(9)).token_ids))
        thread.start()
        thread.join()
    assert said == [base(model, PROMPT, 9)] * 2


def test_a_run_that_was_not_started_does_not_keep_the_decoder() -> None:
    """B101: nothing happens before the first chunk is asked for, but the arguments are checked."""
    decoder = perfect([PROMPT])
    waiting = decoder.stream(PROMPT, greedy(5))
    assert decoder.generate(PROMPT, greedy(5)).token_ids == base(tiny_llama(), PROMPT, 5)
    assert sum(len(chunk.token_ids) for chunk in waiting) == 5
    for call in (decoder.stream, decoder.rounds):
        with pytest.raises(InvalidParameter):
            call([], greedy(5))


def test_a_failed_run_does_not_spoil_the_rows_of_the_next(
    failing_forward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B101: a drafter's index and the target's cache begin anew."""
    model = tiny_llama()
    decoder = SpecDecoder(model, strict=True)
    failing_forward(3, ValueError("no"))
    prompts = [[1, 2, 3, 1, 2, 3], [9, 8, 9, 8]]
    with pytest.raises(ValueError, match="no"):
        decoder.generate(prompts, greedy(12))
    monkeypatch.undo()
    for prompt in reversed(prompts):
        assert decoder.generate(prompt, greedy(12)).token_ids == base(model, prompt, 12)


def test_a_draft_for_a_row_without_budget_is_a_breach(caplog: pytest.LogCaptureFixture) -> None:
    """B102: a row that may commit one more token only has no room for a draft; its neighbour has."""
    model = tiny_llama()
    drafter = ScriptedDrafter(lambda ask: [1, 2], depth=2)
    results = SpecDecoder(model, drafter=drafter).generate([[1], [2]], [greedy(1), greedy(9)])
    assert [one.token_ids for one in results] == [base(model, [1], 1), base(model, [2], 9)]
    [warning] = warnings_of(caplog)
    assert "a node deeper than the budget" in warning
