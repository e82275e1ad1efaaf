"""What a drafter returns breaks its contract: what is cut, what is told, and that the text stays right.

In all of these the output is that of plain decoding, one warning names the drafter and the rule, and with
`strict` it raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from caught import warnings_of
from support import (
    VOCAB,
    ScriptedDrafter,
    accepting,
    base,
    following,
    greedy,
    ids,
    sampled,
    tiny_llama,
    tree_draft,
)

from specdec_core import (
    HOLE,
    Budget,
    Capabilities,
    Context,
    Draft,
    DraftContractViolation,
    DraftLaw,
    SamplingParams,
    SpecDecoder,
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


@pytest.mark.parametrize("params", [greedy(14), SAMPLED_PARAMS], ids=["greedy", "match"])
@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_of_the_contract_ends_drafting_and_not_the_run(
    breach: str, params: SamplingParams, caplog: pytest.LogCaptureFixture
) -> None:
    """B102: greedy and `match`, both exact through it; the next call tries the drafter again."""
    model = tiny_llama()
    spoil, rule, options = BREACHES[breach]
    drafter = Faulty(spoil, **options)
    decoder = SpecDecoder(
        model, drafter=drafter, verifier="auto" if params.greedy else "match", draft_tokens=None
    )
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
    decoder = SpecDecoder(model, drafter=drafter, strict=True, draft_tokens=None)
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
    decoder = SpecDecoder(tiny_llama(), drafter=drafter, verifier="rejection", draft_tokens=None)
    result = decoder.generate(PROMPT, SAMPLED_PARAMS)
    assert len(result.token_ids) == 14
    [warning] = warnings_of(caplog)
    assert "off the target's law" in warning


def test_bounds_that_are_far_too_large_cost_nothing() -> None:
    """B102: depth and width are bounds; loops go no further than there are nodes."""
    model = tiny_llama()
    drafter = Faulty(lambda draft, budget: replace(draft, depth=10**12, width=10**12), at=0, **TREE)
    result = SpecDecoder(model, drafter=drafter, strict=True, draft_tokens=None).generate(PROMPT, greedy(14))
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
    result = SpecDecoder(model, drafter=drafter, strict=True, draft_tokens=None).generate(PROMPT, greedy(30))
    assert result.token_ids == base(model, PROMPT, 30)
    assert result.stats.accepted_tokens > 15


def test_what_cannot_be_fed_is_cut_in_draft_order(caplog: pytest.LogCaptureFixture) -> None:
    """B102: the nodes before the breach are verified as they were drawn."""
    model = tiny_llama()
    said = base(model, PROMPT, 30)
    drafter = Faulty(lambda draft, budget: Draft.chains([said[8:20]]), at=2)
    result = SpecDecoder(model, drafter=drafter, draft_tokens=None).generate(PROMPT, greedy(30))
    assert result.token_ids == said
    # two rounds of 3 + 1 tokens, then K of the twelve, then no more drafts
    assert result.stats.acceptance_histogram == [17, 0, 0, 2, 1]
    assert len(warnings_of(caplog)) == 1


def test_a_draft_for_a_row_without_budget_is_a_breach(caplog: pytest.LogCaptureFixture) -> None:
    """B102: a row that may commit one more token only has no room for a draft; its neighbour has."""
    model = tiny_llama()
    drafter = ScriptedDrafter(lambda ask: [1, 2], depth=2)
    results = SpecDecoder(model, drafter=drafter, draft_tokens=None).generate(
        [[1], [2]], [greedy(1), greedy(9)]
    )
    assert [one.token_ids for one in results] == [base(model, [1], 1), base(model, [2], 9)]
    [warning] = warnings_of(caplog)
    assert "a node deeper than the budget" in warning
