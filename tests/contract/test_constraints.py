"""Constraints: every output is valid and equal to plain constrained decoding, whatever drafts (B69)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from support import ScriptedDrafter, ids, markov_llama, planted, tiny_llama
from torch import Tensor
from toys import (
    EOS,
    SEMICOLON,
    VOCAB,
    Rule,
    ahead_of,
    asked,
    brackets,
    decoder_for,
    digits,
    exactly,
    reference,
    same,
)

from specdec_core import (
    Constraint,
    ConstraintError,
    DraftLaw,
    FinishReason,
    InvalidParameter,
    Matcher,
    Registry,
    RowDrafter,
    RowDrafterConfig,
    SamplingParams,
)
from specdec_core.contract.constraints import Walk
from specdec_core.plugins.choice import build_verifiers
from specdec_core.sampling.history import History

PROMPTS = [[10], ids(7), [3, 4, 5, 6] * 4, ids(20, 2)]
TREE = [-1, -1, 0, 0, 1, 1, 2, 2]


def drafter_of(kind: str, texts: Sequence[Sequence[int]]) -> Any:
    """The drafters of B69: they know the texts, and violate the grammar where their names say."""
    ahead = ahead_of(texts)

    def violating(at: int) -> Any:
        def script(ask: Any) -> list[int]:
            right = [*ahead(ask.tokens, 6), *([SEMICOLON] * 6)][: ask.depth]
            return [5 if i == at else token for i, token in enumerate(right)]

        return ScriptedDrafter(script, depth=6)

    made: dict[str, Callable[[], Any]] = {
        "illegal at 0": lambda: violating(0),
        "illegal at 1": lambda: violating(1),
        "right": lambda: violating(-1),
        "tree": lambda: ScriptedDrafter(planted(TREE, [1, 5], ahead), depth=3, nodes=8, trees=True),
        "early_exit": lambda: "early_exit:layer=1",
        "coupled": lambda: "early_exit:layer=1,draft=coupled",
    }
    return made.get(kind, lambda: kind)()


KINDS = ["none", "prompt_lookup", "illegal at 0", "illegal at 1", "right", "tree", "early_exit", "coupled"]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.4, "top_p": 0.95}], ids=["greedy", "match"])
@pytest.mark.parametrize("kind", KINDS)
def test_output_is_valid_and_equals_decoding_without_speculation(kind: str, sampling: dict[str, Any]) -> None:
    """B69, alone and in a ragged batch in which some rows have no constraint."""
    constraints = [digits(), digits(2), None, brackets()]
    seeds = [{**sampling, "seed": 7 + i} for i in range(4)]
    params = [asked(c, **options) for c, options in zip(constraints, seeds, strict=True)]
    expected = [reference(p, q) for p, q in zip(PROMPTS, params, strict=True)]
    texts = [[*p, *said] for p, said in zip(PROMPTS, expected, strict=True)]
    decoder = decoder_for(tiny_llama(), drafter_of(kind, texts))
    results = decoder.generate(PROMPTS, params)
    assert [r.token_ids for r in results] == expected
    for prompt, row, constraint, result in zip(PROMPTS, params, constraints, results, strict=True):
        assert decoder.generate(prompt, row).token_ids == result.token_ids
        if constraint is not None and result.finish_reason == FinishReason.EOS:
            assert constraint.takes(result.token_ids[:-1])
    assert results[1].finish_reason == FinishReason.EOS
    assert len(results[1].token_ids) <= 4
    if kind == "right":
        assert sum(r.stats.accepted_tokens for r in results) > 20


@pytest.mark.parametrize("n", range(1, 6))
@pytest.mark.parametrize("eos", [EOS, None, 13])
def test_early_ends(eos: int | None, n: int) -> None:
    """A cap in mid-grammar; no EOS at all; an EOS that the grammar itself would use."""
    params = asked(digits(3), eos, n, temperature=2.0, seed=3)
    expected = reference(PROMPTS[1], params, eos)
    for kind in ("none", "right", "illegal at 1"):
        decoder = decoder_for(tiny_llama(), drafter_of(kind, [[*PROMPTS[1], *expected]]))
        result = decoder.generate(PROMPTS[1], params)
        assert result.token_ids == expected
        assert eos not in result.token_ids[:-1]
        ended = digits(3).takes(expected)
        if eos is None:
            assert result.finish_reason == (FinishReason.STOP if ended else FinishReason.LENGTH)
        else:
            assert result.finish_reason == (FinishReason.EOS if expected[-1] == eos else FinishReason.LENGTH)


def test_a_constraint_has_the_last_word() -> None:
    """Options that forbid all it allows give way; its end is the end, whatever `min_new_tokens` says."""
    rule = exactly(31, 32, 33)
    params = asked(
        rule, min_new_tokens=10, bad_words_ids=((32,),), no_repeat_ngram_size=1, temperature=1.0, seed=1
    )
    for drafter in ("none", "prompt_lookup", "early_exit:layer=1"):
        result = decoder_for(tiny_llama(), drafter).generate([31, 32, 5], params)
        assert (result.token_ids, result.finish_reason) == ([31, 32, 33, EOS], FinishReason.EOS)


def test_an_empty_text_may_be_all_there_is() -> None:
    result = decoder_for(tiny_llama(), "none").generate([5], asked(exactly(), eos=None))
    assert (result.token_ids, result.finish_reason, result.stats.rounds) == ([], FinishReason.STOP, 0)
    assert decoder_for(tiny_llama(), "none").generate([5], asked(exactly())).token_ids == [EOS]


def test_samples_share_a_constraint_and_nothing_else() -> None:
    params = asked(digits(), temperature=3.0, seed=5, n=12)
    results = decoder_for(tiny_llama(), "prompt_lookup").generate(PROMPTS[0], params.replace(n=6))
    texts = {tuple(r.token_ids[:-1]) for r in results if r.finish_reason == FinishReason.EOS}
    assert len(texts) > 2
    assert all(digits().takes(text) for text in texts)


def test_a_stream_gives_the_same() -> None:
    decoder = decoder_for(tiny_llama(), "prompt_lookup")
    chunks = decoder.stream(PROMPTS[2], asked(brackets()))
    assert [t for chunk in chunks for t in chunk.token_ids] == reference(PROMPTS[2], asked(brackets()))


# --- forced tokens, and drafts that are cut -------------------------------------------------------


@pytest.mark.parametrize(("depth", "rounds"), [(None, 1), (4, 3), (1, 7), (0, 14)])
@pytest.mark.parametrize("drafter", ["none", "early_exit:layer=1", "prompt_lookup"])
def test_forced_tokens_are_drafted_for_free(drafter: str, depth: int | None, rounds: int) -> None:
    """Thirteen tokens and the EOS: in rounds of depth + 1."""
    text = list(range(40, 53))
    decoder = decoder_for(tiny_llama(), drafter, draft_tokens=depth)
    result = decoder.generate(ids(9), asked(exactly(*text)))
    assert result.token_ids == [*text, EOS]
    if drafter == "none" or depth is None or depth == 0:
        assert result.stats.rounds == rounds
    assert result.stats.rounds <= rounds + (drafter != "none")
    assert result.stats.accepted_tokens == result.stats.drafted_tokens


def test_without_an_eos_a_forced_text_ends_the_row() -> None:
    result = decoder_for(tiny_llama(), "none").generate(ids(9), asked(exactly(*range(40, 50)), eos=None))
    assert (result.token_ids, result.stats.rounds) == (list(range(40, 50)), 1)
    assert result.finish_reason == FinishReason.STOP


class Parrot(RowDrafter):
    """Draft one chain, always."""

    name = "parrot"

    def __init__(self, chain: list[int]) -> None:
        super().__init__(RowDrafterConfig())
        self.chain = chain

    def propose_row(self, tokens: Sequence[int], budget: int) -> list[int]:
        return self.chain[:budget]


@pytest.mark.parametrize(
    ("chain", "kept"),
    [
        ([12, 5, 13, 14], 1),
        ([5, 12, 13], 0),
        ([12, SEMICOLON, 13], 2),
        ([12, SEMICOLON, EOS, 12], 3),
        ([12, EOS], 1),
        ([12, 13, -4, 14], 2),
        ([12, 13, 10**9], 2),
    ],
)
def test_host_chains_are_cut_where_the_grammar_forbids_them(chain: list[int], kept: int) -> None:
    rounds = decoder_for(tiny_llama(), Parrot(chain)).rounds(
        [ids(5), ids(6)], [asked(digits()), asked(digits())]
    )
    first = next(rounds)
    rounds.close()
    assert first.draft.counts in ((kept, kept), None)
    assert first.draft.nodes == kept


def test_neighbours_without_a_constraint_draft_as_if_alone() -> None:
    """Under `rejection` a text depends on its drafter's name and lengths: they stay what they were."""
    drafter = "early_exit:layer=1,draft=sampled"
    free = SamplingParams(max_new_tokens=20, temperature=1.0, seed=11)
    decoder = decoder_for(tiny_llama(), drafter, verifier="rejection", draft_tokens=None)
    alone = decoder.generate(PROMPTS[1], free)
    others = [asked(digits(), temperature=1.0, seed=1), asked(exactly(*range(61, 91)), temperature=1.0, n=40)]
    results = decoder.generate([PROMPTS[0], PROMPTS[3], PROMPTS[1]], [*others, free])
    assert results[1].token_ids == [*range(61, 91), EOS]
    assert results[1].stats.rounds == 2
    assert results[2].token_ids == alone.token_ids
    assert results[2].stats.drafted_tokens == alone.stats.drafted_tokens


def test_a_drafter_learns_that_its_draft_was_not_used() -> None:
    """Paths are those of its own draft: none where tokens were forced, its own elsewhere."""
    text = [*range(40, 50), SEMICOLON]
    rule = Rule(
        "forced, then free",
        lambda said: {text[len(said)]} if len(said) < 11 else {1, 2},
        lambda said: len(said) == 16,
    )
    drafter = ScriptedDrafter(lambda ask: [1, 2][: ask.depth], depth=2)
    result = decoder_for(tiny_llama(), drafter).generate(ids(4), asked(rule, n=16))
    first, *rest = drafter.outcomes
    assert (first.tokens[0][:11], first.paths) == (text, ([],))
    assert sum(len(outcome.paths[0]) for outcome in rest) == result.stats.accepted_tokens - 11


def test_a_combination_keeps_its_members_apart() -> None:
    decoder = decoder_for(tiny_llama(), "prompt_lookup,early_exit:layer=1")
    params = [asked(brackets()), asked(None), asked(exactly(*range(61, 91)), n=40)]
    results = decoder.generate(PROMPTS[:3], params)
    expected = [reference(p, q) for p, q in zip(PROMPTS, params, strict=False)]
    assert [r.token_ids for r in results] == expected
    assert results[2].stats.by_drafter["forced"].accepted_tokens > 10
    assert "forced" not in results[1].stats.by_drafter


# --- the law --------------------------------------------------------------------------------------

SMALL = 6
END = 5


def small_rule() -> Rule:
    """Of 0, 1 and 2 no token twice in a row, 3 ends; 4 is never said."""
    return Rule(
        "small",
        lambda text: (
            set[int]() if text[-1:] == [3] else {0, 1, 2, 3} - {*text[-1:]} - (set() if text else {3})
        ),
        lambda text: text[-1:] == [3],
    )


def log_p_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (1.2 * torch.randn(SMALL, SMALL, generator=generator)).log_softmax(dim=-1)


def exact_law(log_p: Tensor, first: int, n: int) -> dict[tuple[int, ...], float]:
    """The law of constrained sampling, by enumeration."""
    law: dict[tuple[int, ...], float] = {}

    def grow(text: tuple[int, ...], chance: float) -> None:
        if len(text) == n or text[-1:] == (END,):
            law[text] = law.get(text, 0.0) + chance
            return
        may = small_rule().follow(list(text)) | ({END} if small_rule().ends(list(text)) else set[int]())
        weights = {t: math.exp(float(log_p[text[-1] if text else first, t])) for t in may}
        for token, weight in weights.items():
            grow((*text, token), chance * weight / sum(weights.values()))

    grow((), 1.0)
    return law


@pytest.mark.parametrize(
    ("drafter", "options", "verifier"),
    [
        ("small_model", {"draft": "sampled"}, "rejection"),
        ("small_model", {"draft": "sampled", "temperature": 1.5}, "rejection"),
        ("tree_top2", {"children": "sampled", "depth": 2}, "tree_mask"),
        ("prompt_lookup", {}, "rejection"),
    ],
)
def test_the_law_is_that_of_constrained_sampling(
    drafter: str, options: dict[str, Any], verifier: str
) -> None:
    """Chi-square over whole texts; sampled drafts are masked before they are drawn."""
    log_p, rows, n = log_p_of(1), 1500, 4
    if drafter != "prompt_lookup":
        options = {**options, "model": markov_llama(log_p_of(2))}
    built = Registry.discover().build_drafter(drafter, options)
    decoder = decoder_for(markov_llama(log_p), built, verifier=verifier, max_batch=250, strict=True)
    params = SamplingParams(
        max_new_tokens=n, temperature=1.0, eos_token_id=END, constraint=small_rule(), n=rows, seed=99
    )
    results = decoder.generate([1, 0, 1, 0], params)
    law = exact_law(log_p, 0, n)
    counts = Counter(tuple(r.token_ids) for r in results)
    assert set(counts) <= set(law)
    likely = [text for text, chance in law.items() if chance * rows >= 5]
    observed = [counts[text] for text in likely]
    expected = [rows * law[text] for text in likely]
    observed.append(rows - sum(observed))
    expected.append(rows - sum(expected))
    assert stats.chisquare(observed, expected).pvalue > 1e-3
    assert sum(r.stats.accepted_tokens for r in results) > rows / 4


def test_sampled_drafts_are_legal_before_they_are_verified() -> None:
    """No node of a masked drafter breaks the grammar, so none has to be thrown away for its value."""
    for drafter, options in (("small_model", {"draft": "sampled"}), ("tree_top2", {"children": "sampled"})):
        for temperature in ({}, {"temperature": 2.0}):
            made = {**options, **temperature, "model": markov_llama(log_p_of(2))}
            built = Registry.discover().build_drafter(drafter, made)
            decoder = decoder_for(markov_llama(log_p_of(1)), built, verifier="auto")
            params = SamplingParams(
                max_new_tokens=9, temperature=1.0, ignore_eos=True, constraint=brackets_small()
            )
            for done in decoder.rounds([[0]] * 4, params):
                for row, context in zip(done.batch.rows, done.outcome.tokens, strict=True):
                    said = row.output[: len(row.output) - len(context)]
                    for path in paths_of(done.draft, done.batch.rows.index(row)):
                        assert legal(brackets_small(), [*said, *path])


def brackets_small() -> Rule:
    return brackets(2)


def legal(rule: Rule, text: Sequence[int]) -> bool:
    return rule.matcher().consume(list(text)) == len(text)


def paths_of(draft: Any, row: int) -> list[list[int]]:
    tokens, parents = draft.tokens[row].tolist(), draft.parents[row].tolist()
    paths: dict[int, list[int]] = {-1: []}
    for node, parent in enumerate(parents):
        if parent in paths:
            paths[node] = [*paths[parent], tokens[node]]
    return list(paths.values())


# --- rollback, transfers, errors ------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_walk_over_any_paths_is_a_fresh_matcher_each_time(data: st.DataObject) -> None:
    """Commits in between; paths that the grammar does not take, and paths through an EOS."""
    rule = data.draw(st.sampled_from([digits(3), brackets(), exactly(1, 3, 3)]))
    token = st.sampled_from([1, 2, 3, 4, 10, 11, SEMICOLON, EOS, 90, -1])
    walk, said = Walk(rule, {EOS}, VOCAB), list[int]()
    for _ in range(data.draw(st.integers(1, 4))):
        for path in data.draw(st.lists(st.lists(token, max_size=6), max_size=8)):
            assert same(walk.allowed(path), fresh_mask(rule, [*said, *path]))
            assert walk.legal(path) == fresh_legal(rule, said, path)
        mask = walk.allowed([])
        choices = [] if mask is None else [t for t in mask.nonzero().flatten().tolist() if t != EOS]
        if not choices:
            return
        said.append(data.draw(st.sampled_from(choices)))
        assert walk.commit(said[-1:]) == 1


def fresh_mask(rule: Rule, text: list[int]) -> Tensor | None:
    if not legal(rule, text) or EOS in text:
        return None
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[sorted(rule.follow(text))] = True
    mask[EOS] = rule.ends(text)
    return mask if mask.any() else None


def fresh_legal(rule: Rule, said: list[int], path: list[int]) -> int:
    for i, token in enumerate(path):
        mask = fresh_mask(rule, [*said, *path[:i]])
        if mask is None or token < 0 or not mask[token]:
            return i
    return len(path)


def test_rows_without_a_constraint_transfer_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """One transfer a round as ever; in a mixed batch the paths of constrained rows alone."""
    transferred: list[int] = []
    own = Tensor.tolist

    def counting(self: Tensor) -> Any:
        transferred.append(self.shape[0])
        return own(self)

    decoder = decoder_for(tiny_llama(), drafter_of("illegal at 1", []))
    monkeypatch.setattr(Tensor, "tolist", counting)
    free = list(decoder.rounds(PROMPTS[:3], asked(None)))
    assert len(transferred) == len(free)

    asked_for: list[list[int]] = []
    paths = History.host_paths

    def watching(self: History, rows: list[int]) -> Any:
        asked_for.append(rows)
        return paths(self, rows)

    monkeypatch.setattr(History, "host_paths", watching)
    list(decoder.rounds(PROMPTS[:3], asked(None)))
    assert asked_for == []
    params = [asked(None), asked(digits()), asked(None)]
    for done in decoder.rounds([ids(7), ids(7, 1), ids(7, 2)], params):
        constrained = [i for i, row in enumerate(done.batch.rows) if row.walk is not None]
        assert asked_for == [constrained] * bool(constrained)
        asked_for.clear()


def dead_end() -> Rule:
    """Two tokens, and then nothing."""
    return Rule("dead end", lambda text: {30, 31} if len(text) < 2 else set(), lambda _: False)


@pytest.mark.parametrize("drafter", ["none", "prompt_lookup", "early_exit:layer=1"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_dead_end_is_an_error_that_names_the_constraint(drafter: str, temperature: float) -> None:
    decoder = decoder_for(tiny_llama(), drafter)
    with pytest.raises(
        ConstraintError, match=r"^constraint dead end allows nothing after 2 generated tokens"
    ):
        decoder.generate([30, 31, 5, 30, 31, 5, 30], asked(dead_end(), temperature=temperature))
    assert decoder.generate([5], asked(digits(2))).finish_reason == FinishReason.EOS


def test_a_constraint_that_allows_nothing_at_all_is_refused_at_once() -> None:
    nothing = Rule("nothing" * 50, lambda _: set(), lambda _: False)
    with pytest.raises(ConstraintError, match=r"^constraint nothing.*\.\.\. allows nothing after 0"):
        decoder_for(tiny_llama(), "none").generate([5], asked(nothing))


def test_what_a_constraint_is() -> None:
    rule = digits()
    assert isinstance(rule, Constraint)
    matcher: Matcher = rule.matcher()
    assert matcher.consume([10, 5]) == 1
    assert SamplingParams(constraint=rule).replace(temperature=1.0).constraint is rule
    with pytest.raises(InvalidParameter, match=r"constraint='x' is not allowed: .* instance of Constraint"):
        SamplingParams(constraint="x")


def test_the_constraint_in_the_docs_works() -> None:
    page = (Path(__file__).parents[2] / "docs" / "structured-output.md").read_text(encoding="utf-8")
    code = next(part for part in page.split("```python\n")[1:] if "class Digits" in part).split("```")[0]
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    rule = names["Digits"](range(10, 20), SEMICOLON, VOCAB)
    decoder = decoder_for(tiny_llama(), "prompt_lookup")
    for seed in range(3):
        said = decoder.generate([12, 13], asked(rule, temperature=3.0, seed=seed, n=90)).token_ids
        assert said[-2:] == [SEMICOLON, EOS]
        assert set(said[:-2]) <= set(range(10, 20))


def test_a_verifier_that_takes_no_fixed_drafts_gets_none() -> None:
    """Forced tokens are ONE_HOT; whoever cannot judge them is spared them."""

    class Sampled:
        def __init__(self) -> None:
            (self.own,) = build_verifiers("rejection", Registry.discover())

        def __getattr__(self, name: str) -> Any:
            return frozenset({DraftLaw.SAMPLED}) if name == "laws" else getattr(self.own, name)

    decoder = decoder_for(tiny_llama(), "early_exit:layer=1,draft=sampled", verifier=Sampled())
    for done in decoder.rounds([5], asked(exactly(*range(40, 50)), temperature=1.0)):
        assert not done.draft.nodes or (done.draft.laws == DraftLaw.SAMPLED).all()
