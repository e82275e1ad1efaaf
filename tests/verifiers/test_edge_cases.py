"""Ragged batches: holes, rows without nodes, mixed laws and temperatures, odd tokens, batches of one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scenes import EVERY, ONE_HOT, SAMPLED, SAMPLING, WITHOUT, drafted, greedy, keyed, said, target, typical

from specdec_core import HOLE, Draft, DraftLaw, TargetDistributions, Verdict, Verifier
from specdec_core.contract.rng import KeyedRng, Purpose
from specdec_core.testing.worlds import Drafted, as_draft, as_p, chain, drafts, toy, tree

VOCAB = 5
CPU = torch.device("cpu")


def batch(seed: int, rows: int, verifier: Verifier) -> tuple[TargetDistributions, Draft]:
    """Random drafts of every law and shape that a verifier treats, some empty, some rows greedy."""
    random = np.random.default_rng(seed)
    laws = sorted(verifier.laws - {DraftLaw.COUPLED})
    p, q = toy(seed, VOCAB, sharpness=0.3), toy(seed + 1, VOCAB)
    shapes = [chain(0), chain(1), chain(3)] + [tree(2, 1), tree(1, 2)] * verifier.handles_trees
    members: list[Drafted] = []
    contexts = [(int(random.integers(VOCAB)),) for _ in range(rows)]
    for context in contexts:
        law = laws[random.integers(len(laws))]
        every = drafts(q, law, shapes[random.integers(len(shapes))], context, holes=bool(random.integers(2)))
        members.append(every[random.integers(len(every))])
    return as_p(p, contexts, members, (random.random(rows) < 0.3).tolist()), as_draft(members, VOCAB)


def rng_of(rows: list[int]) -> KeyedRng:
    """Make the generator of some rows of a batch."""
    return KeyedRng([100 + row for row in rows], [3 + row for row in rows], Purpose.VERIFY, "", CPU)


def same(a: Verdict, b: Verdict) -> bool:
    """Whether two verdicts accept the same nodes and say the same token."""
    width = max(a.path.shape[1], b.path.shape[1])
    wide = [torch.nn.functional.pad(v.path, (0, width - v.path.shape[1]), value=-1) for v in (a, b)]
    return torch.equal(*wide) and torch.equal(a.next_token, b.next_token)


@pytest.mark.parametrize("verifier", EVERY, ids=lambda v: v.name)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_a_row_is_judged_alone_as_in_any_batch(verifier: Verifier, seed: int) -> None:
    p, draft = batch(seed, 6, verifier)
    together = verifier.verify(p, draft, rng_of([*range(6)]))
    assert p.greedy is not None
    for row in range(6):
        n = _used(draft, row)
        one = Draft(
            draft.tokens[[row], :n],
            draft.parents[[row], :n],
            draft.laws[[row]],
            draft.depth,
            draft.width,
            None if draft.probs is None else draft.probs[[row], :n],
        )
        alone = TargetDistributions(p.logits[[row], : 1 + n], p.greedy[[row]])
        verdict = verifier.verify(alone, one, rng_of([row]))
        assert same(verdict, Verdict(together.path[[row]], together.next_token[[row]]))


def _used(draft: Draft, row: int) -> int:
    """Width that holds every node of a row."""
    real = [i for i, parent in enumerate(draft.parents[row].tolist()) if parent != HOLE]
    return max(real, default=-1) + 1


@pytest.mark.parametrize("verifier", EVERY, ids=lambda v: v.name)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_a_verdict_is_a_path_of_real_nodes(verifier: Verifier, seed: int) -> None:
    p, draft = batch(seed, 8, verifier)
    verdict = verifier.verify(p, draft, rng_of([*range(8)]))
    probs = p.probs
    for row in range(8):
        path = verdict.path[row].tolist()
        accepted = [node for node in path if node >= 0]
        assert path == accepted + [-1] * (len(path) - len(accepted))
        at = -1
        for node in accepted:
            assert draft.parents[row, node] == at
            assert probs[row, at + 1, draft.tokens[row, node]] > 0
            at = node
        assert probs[row, at + 1, verdict.next_token[row]] > 0


@pytest.mark.parametrize("verifier", EVERY, ids=lambda v: v.name)
def test_permuting_rows_permutes_verdicts(verifier: Verifier) -> None:
    p, draft = batch(7, 9, verifier)
    order = [4, 0, 8, 2, 1, 7, 3, 6, 5]
    straight = verifier.verify(p, draft, rng_of([*range(9)]))
    assert p.greedy is not None
    moved = TargetDistributions(p.logits[order], p.greedy[order])
    mixed = verifier.verify(moved, draft.for_rows(order), rng_of(order))
    assert torch.equal(mixed.path, straight.path[order])
    assert torch.equal(mixed.next_token, straight.next_token[order])


@pytest.mark.parametrize("verifier", SAMPLING, ids=lambda v: v.name)
def test_seeds_decide_and_nothing_else_does(verifier: Verifier) -> None:
    p, draft = batch(8, 40, verifier)
    one, again, other = (
        verifier.verify(p, draft, KeyedRng([seed] * 40, range(40), Purpose.VERIFY, "", CPU))
        for seed in (1, 1, 2)
    )
    assert same(one, again)
    assert not same(one, other)


@pytest.mark.parametrize("verifier", EVERY, ids=lambda v: v.name)
@pytest.mark.parametrize("greedy_rows", [None, False], ids=["greedy", "sampling"])
def test_a_draft_without_nodes(verifier: Verifier, greedy_rows: bool | None) -> None:
    p = target([[0.0, 0.2, 0.8, 0.0]], rows=3)
    if greedy_rows is None:
        p.greedy = None
    verdict = verifier.verify(p, Draft.empty(3), keyed(3))
    assert verdict.path.shape == (3, 0)
    assert set(verdict.next_token.tolist()) <= ({2} if greedy_rows is None or verifier is greedy else {1, 2})


@pytest.mark.parametrize("verifier", EVERY, ids=lambda v: v.name)
def test_a_row_of_holes_says_what_a_row_without_nodes_says(verifier: Verifier) -> None:
    p = target([[0.3, 0.2, 0.4, 0.1]] * 4, rows=50)
    holes = drafted([0, 1, 2], [HOLE] * 3, SAMPLED, torch.full((3, 4), torch.nan), rows=50)
    # Bounds are those of the batch; a law is not read where there are no nodes.
    holes = replace(holes, depth=3, width=2, laws=torch.full_like(holes.laws, 99))
    verdict = verifier.verify(p, holes, keyed(50))
    assert (verdict.path == -1).all()
    empty = verifier.verify(target([[0.3, 0.2, 0.4, 0.1]], rows=50), Draft.empty(50), keyed(50))
    assert torch.equal(verdict.next_token, empty.next_token)


@pytest.mark.parametrize("verifier", EVERY, ids=lambda v: v.name)
def test_bounds_may_be_generous(verifier: Verifier) -> None:
    p, draft = batch(11, 12, verifier)
    loose = replace(draft, depth=draft.depth + 3, width=draft.width + 2 * verifier.handles_trees)
    assert same(
        verifier.verify(p, draft, rng_of([*range(12)])), verifier.verify(p, loose, rng_of([*range(12)]))
    )


@pytest.mark.parametrize(
    ("verifier", "law"),
    [
        pytest.param(verifier, law, id=f"{verifier.name}-{law.name.lower()}")
        for verifier in EVERY
        for law in (ONE_HOT, SAMPLED, WITHOUT)
        if law in verifier.laws
    ],
)
@pytest.mark.parametrize("token", [-1, -(2**40), VOCAB, 2**40])
def test_a_token_outside_the_vocabulary_is_never_said(verifier: Verifier, law: DraftLaw, token: int) -> None:
    p = [0.1, 0.2, 0.3, 0.4, 0.0]
    q = None if law == ONE_HOT else [[0.2] * VOCAB, [0.2] * VOCAB]
    draft = drafted([token, 1], [-1, 0], law, q, rows=200)
    verdict = verifier.verify(target([p] * 3, rows=200), draft, keyed(200))
    assert (verdict.path == -1).all()
    assert ((verdict.next_token >= 0) & (verdict.next_token < 4)).all()


@pytest.mark.parametrize("verifier", SAMPLING, ids=lambda v: v.name)
@pytest.mark.parametrize("always_probs", [False, True])
def test_fixed_rows_need_no_q(verifier: Verifier, always_probs: bool) -> None:
    """Where a batch has a q, that of fixed rows is not looked at; where none has one, there is none."""
    p, q = toy(1, VOCAB), toy(2, VOCAB)
    members = [drafts(q, ONE_HOT, chain(3), (row,))[0] for row in range(30)]
    draft = as_draft(members, VOCAB, always_probs=always_probs)
    assert (draft.probs is not None) == always_probs
    dist = as_p(p, [(row,) for row in range(30)], members)
    verdict = verifier.verify(dist, draft, rng_of([*range(30)]))
    bare = verifier.verify(dist, replace(draft, probs=None), rng_of([*range(30)]))
    assert same(verdict, bare)
    assert (verdict.path >= 0).any()


@pytest.mark.parametrize("verifier", SAMPLING, ids=lambda v: v.name)
def test_greedy_and_sampling_rows_share_a_batch(verifier: Verifier) -> None:
    p, draft = batch(13, 60, verifier)
    mixed = verifier.verify(p, draft, rng_of([*range(60)]))
    expected = greedy.verify(p, draft, rng_of([*range(60)]))
    hot = torch.zeros(60, dtype=torch.bool)
    sampled = verifier.verify(TargetDistributions(p.logits, hot), draft, rng_of([*range(60)]))
    assert p.greedy is not None
    rows = p.greedy
    assert torch.equal(mixed.next_token[rows], expected.next_token[rows])
    assert torch.equal(mixed.path[rows], expected.path[rows])
    assert torch.equal(mixed.next_token[~rows], sampled.next_token[~rows])
    assert torch.equal(mixed.path[~rows], sampled.path[~rows])
    assert not torch.equal(sampled.next_token[rows], expected.next_token[rows])


@pytest.mark.parametrize("verifier", [v for v in SAMPLING if v.handles_trees], ids=lambda v: v.name)
def test_equal_siblings_are_no_trouble(verifier: Verifier) -> None:
    for law in (ONE_HOT, SAMPLED):
        q = None if law == ONE_HOT else [[0.1, 0.9]] * 3
        draft = drafted([1, 1, 1], [-1, -1, -1], law, q, rows=4000)
        verdict = verifier.verify(target([[0.7, 0.3]] * 4, rows=4000), draft, keyed(4000))
        spoken = torch.tensor([text[0] for text in said(draft, verdict)])
        if law == ONE_HOT:
            assert spoken.double().mean().item() == pytest.approx(0.3, abs=0.03)
        assert set(verdict.path[:, 0].tolist()) <= {-1, 0}, "what was rejected once is rejected again"


@pytest.mark.parametrize("verifier", SAMPLING, ids=lambda v: v.name)
def test_match_alone_says_the_same_whatever_was_drafted(verifier: Verifier) -> None:
    """And the others do not: that is what `drafter_invariant` tells `auto`."""
    rows, p = 300, torch.tensor([[0.4, 0.3, 0.2, 0.1]]).expand(4, -1)
    texts = []
    for tokens in ([0, 1, 2], [3, 3, 3], [1, 0, 1]):
        draft = drafted(tokens, [-1, 0, 1], ONE_HOT, rows=rows)
        verdict = verifier.verify(target(p, rows), draft, keyed(rows))
        texts.append([text[0] for text in said(draft, verdict)])
    assert (texts[0] == texts[1] == texts[2]) == verifier.drafter_invariant


def test_a_typical_path_is_the_longest_and_then_the_likeliest() -> None:
    flat = [0.25] * 4  # threshold min(.09, .3 / 4) = .075
    sure = [0.85, 0.05, 0.05, 0.05]  # entropy .588, threshold min(.09, .167) = .09
    first = [0.4, 0.35, 0.2, 0.05]
    # 0: token 0, 1: token 1; children of 0: 2 (token 1, unlikely); of 1: 3 (token 2), 4 (token 0); of 3: none
    draft = drafted([0, 1, 1, 2, 0], [-1, -1, 0, 1, 1], ONE_HOT)
    verdict = typical.verify(target([first, sure, flat, flat, flat, flat]), draft, keyed(1))
    assert verdict.path.tolist() == [[1, 3]], "of two equally likely paths the first"
    skewed = [0.5, 0.2, 0.2, 0.1]
    verdict = typical.verify(target([first, sure, skewed, flat, flat, flat]), draft, keyed(1))
    assert verdict.path.tolist() == [[1, 4]], "the likelier of two of a length"
    verdict = typical.verify(target([first, sure, sure, flat, flat, flat]), draft, keyed(1))
    assert verdict.path.tolist() == [[1, 4]]
    only = [0.02, 0.03, 0.9, 0.05]
    verdict = typical.verify(target([only, sure, sure, flat, flat, flat]), draft, keyed(1))
    assert verdict.path.tolist() == [[-1, -1]]


def test_typical_accepts_by_both_its_thresholds() -> None:
    p = [0.5, 0.08, *[0.42 / 8] * 8]  # entropy 1.79: .3 exp(-H) = .05, and .0525 is above it
    draft = drafted([2], [-1], ONE_HOT)
    dist = target([p, p])
    assert typical.verify(dist, draft, keyed(1)).path.tolist() == [[0]]
    strict = type(typical)(typical.Config(epsilon=0.09, delta=0.35))
    assert strict.verify(dist, draft, keyed(1)).path.tolist() == [[-1]]
    sharp = [0.92, 0.08]  # entropy .279: .3 exp(-H) = .227, and epsilon is what counts
    draft = drafted([1], [-1], ONE_HOT)
    assert typical.verify(target([sharp, sharp]), draft, keyed(1)).path.tolist() == [[-1]]
    loose = type(typical)(typical.Config(epsilon=0.07))
    assert loose.verify(target([sharp, sharp]), draft, keyed(1)).path.tolist() == [[0]]
