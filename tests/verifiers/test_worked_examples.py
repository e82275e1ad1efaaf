"""The examples of the literature and of other people's bug reports, with their figures."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scenes import (
    ONE_HOT,
    SAMPLED,
    SAMPLING,
    WITHOUT,
    Forced,
    block,
    drafted,
    first_tokens,
    fits,
    greedy,
    keyed,
    match,
    rejection,
    said,
    target,
    tree_mask,
)

from specdec_core import HOLE, DraftLaw, TargetDistributions, Verifier
from specdec_core.contract.rng import Purpose
from specdec_core.testing.worlds import accepted, chain, constant, error, toy, world

DRAWS = 20_000


def drawn_from(q: list[float], nodes: int = 1) -> torch.Tensor:
    """Draw tokens as a drafter does: int64 [DRAWS, nodes]."""
    rng = keyed(DRAWS, Purpose.DRAFT)
    weights = torch.tensor(q).expand(DRAWS, -1)
    return torch.stack([rng.categorical(weights, node, 0) for node in range(nodes)], dim=1)


# --- one token ------------------------------------------------------------------------------------


@pytest.mark.parametrize("verifier", [rejection, block, tree_mask], ids=lambda v: v.name)
def test_the_worked_example(verifier: Verifier) -> None:
    p, q = [0.6, 0.3, 0.1], [0.2, 0.3, 0.5]
    draft = drafted(drawn_from(q), [-1], SAMPLED, [q])
    verdict = verifier.verify(target([p, p], DRAWS), draft, keyed(DRAWS))
    assert fits(first_tokens(draft, verdict), p)
    unlikely = draft.tokens[:, 0] == 2
    kept = verdict.path[unlikely, 0] == 0
    assert kept.double().mean().item() == pytest.approx(0.2, abs=4 * (0.16 / len(kept)) ** 0.5)
    assert set(verdict.next_token[unlikely][~kept].tolist()) == {0}, "the residual is [1, 0, 0]"
    assert (verdict.path[~unlikely, 0] == 0).all(), "what q does not overrate is always kept"


@pytest.mark.parametrize("verifier", [rejection, block, tree_mask], ids=lambda v: v.name)
def test_a_residual_is_taken_over_the_whole_vocabulary(verifier: Verifier) -> None:
    p, q = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]
    tokens = drawn_from(q)
    draft = drafted(tokens, [-1], SAMPLED, [q])
    forced = verifier.verify(target([p, p], DRAWS), draft, Forced(DRAWS))
    assert (forced.path == -1).all()
    assert (forced.next_token == 0).all()
    assert fits(first_tokens(draft, verifier.verify(target([p, p], DRAWS), draft, keyed(DRAWS))), p)


@pytest.mark.parametrize("verifier", [match, tree_mask], ids=lambda v: v.name)
@pytest.mark.parametrize(
    ("p", "pair"), [((0.51, 0.49), (0, 1)), ((0.6, 0.3, 0.1), (1, 2)), ((0.6, 0.3, 0.1), (2, 1))]
)
def test_the_most_likely_tokens_as_children_keep_the_law(
    verifier: Verifier, p: tuple[float, ...], pair: tuple[int, int]
) -> None:
    draft = drafted(pair, [-1, -1], ONE_HOT, rows=DRAWS)
    verdict = verifier.verify(target([p] * 3, DRAWS), draft, keyed(DRAWS))
    first = first_tokens(draft, verdict)
    for token, chance in enumerate(p):
        share = (first == token).double().mean().item()
        assert share == pytest.approx(chance, abs=3 * (chance * (1 - chance) / DRAWS) ** 0.5)
    kept = (verdict.path[:, 0] >= 0).double().mean().item()
    assert kept == pytest.approx(p[pair[0]] + p[pair[1]], abs=0.011)


@pytest.mark.parametrize("verifier", [match, tree_mask], ids=lambda v: v.name)
def test_branches_of_one_node_share_its_draw(verifier: Verifier) -> None:
    """The tree ab, ac, ad, ef, where the target says a or e evenly and then any letter."""
    a, b, c, d, e, f = range(6)
    start = [0.5, 0, 0, 0, 0.5, 0]
    letters = [0, 0.3, 0.2, 0.1, 0.4, 0]
    other = [0.25, 0, 0, 0, 0, 0.75]
    draft = drafted([a, e, b, c, d, f], [-1, -1, 0, 0, 0, 1], ONE_HOT, rows=DRAWS)
    after = {a: letters, e: other}
    p = target([start, after[a], after[e], *[start] * 4], DRAWS)
    verdict = verifier.verify(p, draft, keyed(DRAWS))
    first = first_tokens(draft, verdict)
    assert fits(first, start)
    assert (verdict.path[:, 0] >= 0).all(), "both first letters are in the tree"
    pairs = torch.tensor([6 * said_[0] + said_[1] for said_ in said(draft, verdict)])
    joint = [start[x] * after[x][y] if x in after else 0.0 for x, y in itertools.product(range(6), repeat=2)]
    assert fits(pairs, joint)


@pytest.mark.parametrize("verifier", [rejection, block, tree_mask], ids=lambda v: v.name)
def test_nothing_left_over_is_drawn_from_p(verifier: Verifier) -> None:
    """p equals q and the token is rejected all the same: by rounding, in earnest."""
    p = [0.5, 0.2, 0.3, 0.0]
    draft = drafted(drawn_from(p), [-1], SAMPLED, [p])
    verdict = verifier.verify(target([p, p], DRAWS), draft, Forced(DRAWS))
    assert (verdict.path == -1).all()
    assert fits(verdict.next_token, p)


@pytest.mark.parametrize("verifier", SAMPLING, ids=lambda v: v.name)
@pytest.mark.parametrize("law", [ONE_HOT, SAMPLED])
def test_a_single_possible_token_is_said(verifier: Verifier, law: DraftLaw) -> None:
    q = [0.25] * 4
    draft = drafted([[token] for token in range(4)], [-1], law, [q] if law == SAMPLED else None)
    for rng in (keyed(4), Forced(4)):
        verdict = verifier.verify(target([[0, 0, 1, 0]] * 2, 4), draft, rng)
        assert first_tokens(draft, verdict).tolist() == [2] * 4


# --- temperature 0 --------------------------------------------------------------------------------


@pytest.mark.parametrize("verifier", SAMPLING, ids=lambda v: v.name)
def test_temperature_zero_follows_the_argmax_whatever_q_was(verifier: Verifier) -> None:
    p, q = [0.3, 0.5, 0.2], [0.2, 0.2, 0.6]
    draft = drafted([[0]], [-1], SAMPLED, [q])
    assert said(draft, verifier.verify(target([p, p], at_zero=True), draft, keyed(1))) == [[1]]


@pytest.mark.parametrize("verifier", SAMPLING, ids=lambda v: v.name)
@pytest.mark.parametrize("law", [ONE_HOT, SAMPLED])
def test_temperature_zero_is_the_greedy_verifier(verifier: Verifier, law: DraftLaw) -> None:
    random = np.random.default_rng(3)
    p = target(random.dirichlet([0.3] * 6, (200, 5)), at_zero=True)
    q = torch.from_numpy(random.dirichlet([0.3] * 6, (200, 4))).float()
    right = p.argmax[:, :-1]
    draw = torch.from_numpy(random.integers(0, 6, (200, 4)))
    tokens = torch.where(torch.from_numpy(random.random((200, 4)) < 0.8), right, draw)
    q = q.scatter(2, tokens[..., None], 0.5)
    q /= q.sum(dim=-1, keepdim=True)
    draft = drafted(tokens, [-1, 0, 1, 2], law, q if law == SAMPLED else None)
    expected = greedy.verify(p, draft, keyed(200))
    verdict = verifier.verify(p, draft, keyed(200))
    assert torch.equal(verdict.path, expected.path)
    assert torch.equal(verdict.next_token, expected.next_token)
    assert len({len(text) for text in said(draft, verdict)}) == 5, "all lengths occur"


# --- what the target never says -------------------------------------------------------------------


@pytest.mark.parametrize("verifier", SAMPLING, ids=lambda v: v.name)
@pytest.mark.parametrize("law", [ONE_HOT, SAMPLED])
@pytest.mark.parametrize("place", range(3))
def test_a_token_that_p_leaves_out_is_said_at_no_position(
    verifier: Verifier, law: DraftLaw, place: int
) -> None:
    """Top-k, top-p and min-p hold for verified tokens as for all others."""
    rows = 2000
    p = torch.tensor([0.5, 0.0, 0.3, 0.2, 0.0]).expand(4, -1)
    q = torch.tensor([0.3, 0.4, 0.1, 0.1, 0.1]).expand(3, -1)
    tokens = [0, 0, 0]
    tokens[place] = 1
    draft = drafted([tokens], [-1, 0, 1], law, q if law == SAMPLED else None, rows=rows)
    verdict = verifier.verify(target(p, rows), draft, keyed(rows))
    spoken = said(draft, verdict)
    assert not {1, 4} & {token for text in spoken for token in text}
    assert max(map(len, spoken)) == place + 1


# --- block ----------------------------------------------------------------------------------------


def test_the_toy_of_the_block_paper() -> None:
    w = world(constant(1 / 3, 2 / 3), constant(2 / 3, 1 / 3), SAMPLED, chain(2), size=2)
    assert accepted(block, w) == pytest.approx(11 / 9, abs=1e-14)
    assert accepted(rejection, w) == pytest.approx(10 / 9, abs=1e-14)
    assert error(block, w) < 1e-14


def test_a_block_never_accepts_less_in_expectation() -> None:
    gains = []
    for seed in range(12):
        for k in (1, 2, 3):
            w = world(toy(seed, 3), toy(seed + 100, 3), SAMPLED, chain(k))
            gains.append(accepted(block, w) - accepted(rejection, w))
            assert gains[-1] > -1e-12
            if k == 1:
                assert gains[-1] == pytest.approx(0.0, abs=1e-12)
    assert max(gains) > 0.02


def test_fixed_chains_gain_nothing_from_blocks() -> None:
    w = world(toy(1, 3), toy(2, 3), ONE_HOT, chain(3))
    assert accepted(block, w) == pytest.approx(accepted(rejection, w), abs=1e-12)
    assert accepted(tree_mask, w) == pytest.approx(accepted(match, w), abs=1e-12)


@pytest.mark.parametrize("nearness", [0.0, 1e-9, 1e-7, 3e-7, 1e-6])
def test_a_near_perfect_drafter_is_believed(nearness: float) -> None:
    """In float32, 0/0 and chances above 1 are what this came to."""
    random = np.random.default_rng(0)
    p = random.dirichlet([0.5] * 50, (500, 6))
    q = p[:, :-1] * (1 + nearness * random.standard_normal((500, 5, 50)))
    weights = torch.from_numpy(q).float()
    rng = keyed(500, Purpose.DRAFT)
    tokens = torch.stack([rng.categorical(weights[:, i], i, 0) for i in range(5)], dim=1)

    class Checking(Forced):
        def bernoulli(self, p: torch.Tensor, node: torch.Tensor | int, draw: int) -> torch.Tensor:
            assert ((p >= 0) & (p <= 1)).all()
            return self.keyed.bernoulli(p, node, draw)

    draft = drafted(tokens, [-1, 0, 1, 2, 3], SAMPLED, weights)
    verdict = block.verify(target(p), draft, Checking(500))
    assert (verdict.path >= 0).double().mean() > 1 - 10 * nearness - 1e-6


def test_blocks_accept_more_in_a_paired_run() -> None:
    """Over 20,000 tokens of the same prompts: the difference's confidence interval is not below 0."""
    vocab, k, rows, rounds = 8, 4, 1000, 16
    random = np.random.default_rng(5)
    p = torch.from_numpy(random.dirichlet([0.6] * vocab, vocab)).float()  # a bigram model
    q = 0.5 * p + 0.5 * torch.from_numpy(random.dirichlet([0.6] * vocab, vocab)).float()
    per_round = {v.name: _run(v, p, q, k, rows, rounds) for v in (block, rejection)}
    gain = (per_round["block"] - per_round["rejection"]).double().mean(dim=1)  # of each row
    half = 1.96 * gain.std() / rows**0.5
    assert all(n.sum() + n.numel() >= 20_000 for n in per_round.values())
    assert gain.mean() - half >= 0, f"{gain.mean():.4f} +- {half:.4f}"


def _run(
    verifier: Verifier, p: torch.Tensor, q: torch.Tensor, k: int, rows: int, rounds: int
) -> torch.Tensor:
    """Count the tokens that each round of each row accepts: int64 [rows, rounds]."""
    last = torch.arange(rows) % len(p)
    counts = []
    for step in range(rounds):
        rng = keyed(rows, Purpose.DRAFT, length=step)
        tokens, seen = [], last
        for node in range(k):
            seen = rng.categorical(q[seen], node, 0)
            tokens.append(seen)
        drawn = torch.stack(tokens, dim=1)
        before = torch.cat([last[:, None], drawn], dim=1)
        draft = drafted(drawn, range(-1, k - 1), SAMPLED, q[before[:, :-1]])
        dist = TargetDistributions(p[before].log(), torch.zeros(rows, dtype=torch.bool))
        verdict = verifier.verify(dist, draft, keyed(rows, length=step))
        counts.append((verdict.path >= 0).sum(dim=1))
        last = verdict.next_token
    return torch.stack(counts, dim=1)


# --- siblings -------------------------------------------------------------------------------------


@pytest.mark.parametrize("law", [SAMPLED, WITHOUT, ONE_HOT])
def test_siblings_keep_the_law_of_a_first_token(law: DraftLaw) -> None:
    p, q = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    rng = keyed(DRAWS, Purpose.DRAFT)
    left = q.expand(DRAWS, -1)
    tokens, drawn = [], []
    for node in range(3):
        token = torch.full((DRAWS,), 3 - node) if law == ONE_HOT else rng.categorical(left, node, 0)
        tokens.append(token)
        drawn.append(left)
        if law == WITHOUT:
            left = left.scatter(1, token[:, None], 0.0)
            left = left / left.sum(dim=1, keepdim=True)
    probs = None if law == ONE_HOT else torch.stack(drawn, dim=1)
    draft = drafted(torch.stack(tokens, dim=1), [-1, -1, -1], law, probs)
    verdict = tree_mask.verify(target([p.tolist()] * 4, DRAWS), draft, keyed(DRAWS))
    assert fits(first_tokens(draft, verdict), p.tolist())


def test_a_sibling_that_could_not_be_drawn_is_a_hole() -> None:
    """q runs out of support after one token: without replacement there is no second."""
    rows, p = 5000, [0.7, 0.3]
    q = torch.tensor([[0.0, 1.0], [torch.nan, torch.nan]])
    draft = drafted([1, 0], [-1, HOLE], WITHOUT, q, rows=rows)
    draft = type(draft)(draft.tokens, draft.parents, draft.laws, 1, 2, draft.probs)
    verdict = tree_mask.verify(target([p] * 3, rows), draft, keyed(rows))
    assert fits(first_tokens(draft, verdict), p)
    assert set(verdict.path.flatten().tolist()) == {-1, 0}


# --- the target's own noise -----------------------------------------------------------------------


def test_match_says_what_plain_sampling_says() -> None:
    """One draw a position, whatever was drafted: the text is a function of the seed and the target."""
    rows, vocab = 400, 4
    random = np.random.default_rng(8)
    table = torch.from_numpy(random.dirichlet([1.0] * vocab, vocab)).float().log()  # a bigram model
    last = torch.zeros(rows, dtype=torch.int64)
    plain = []
    for depth in range(4):
        last = keyed(rows).target_draw(table[last], depth)
        plain.append(last)
    wanted = torch.stack(plain, dim=1).tolist()
    for law, tokens in [
        (ONE_HOT, torch.from_numpy(random.integers(0, vocab, (rows, 3)))),
        (DraftLaw.COUPLED, torch.tensor(wanted)[:, :3]),
    ]:
        draft = drafted(tokens, [-1, 0, 1], law)
        before = torch.cat([torch.zeros(rows, 1, dtype=torch.int64), tokens], dim=1)
        p = TargetDistributions(table[before], torch.zeros(rows, dtype=torch.bool))
        spoken = said(draft, match.verify(p, draft, keyed(rows)))
        assert spoken == [text[: len(block)] for block, text in zip(spoken, wanted, strict=True)]
        assert law == ONE_HOT or all(len(block) == 4 for block in spoken)


def test_drafts_coupled_by_the_noise_are_accepted_more_often() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.3, 0.3, 0.4])
    tokens = keyed(DRAWS, Purpose.DRAFT).target_draw(q.log().expand(DRAWS, -1), 0)[:, None]
    own = drawn_from(q.tolist())
    rates = []
    for law, drawn in ((DraftLaw.COUPLED, tokens), (SAMPLED, own)):
        draft = drafted(drawn, [-1], law)
        verdict = match.verify(target([p.tolist()] * 2, DRAWS), draft, keyed(DRAWS))
        assert fits(first_tokens(draft, verdict), p.tolist())
        rates.append((verdict.path[:, 0] >= 0).double().mean().item())
    distance = float((p - q).clamp(min=0).sum())
    assert rates[0] >= (1 - distance) / (1 + distance) - 0.011
    assert rates[1] == pytest.approx(float((p * q).sum()), abs=0.011)
