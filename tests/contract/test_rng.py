"""Keyed randomness: uniform, independent between keys, the same in any batch, and nobody else's generator."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from specdec_core.contract.rng import KeyedRng, Purpose, sample_seed

CPU = torch.device("cpu")
ROWS = 4096
LIKELY = 1e-4  # seeds are fixed: a test below this would have been a find


def keyed(
    seeds: range | list[int],
    lengths: int | range | list[int] = 20,
    purpose: Purpose = Purpose.VERIFY,
    owner: str = "",
) -> KeyedRng:
    """Make a generator with one row a seed."""
    lengths = [lengths] * len(seeds) if isinstance(lengths, int) else list(lengths)
    return KeyedRng(list(seeds), lengths, purpose, owner, CPU)


def uniforms(rng: KeyedRng, node: int | Tensor = 0, draw: int = 0) -> np.ndarray:
    """The uniform behind a draw of each row, found through the public interface: 16 bits of bisection."""
    low = torch.zeros(len(rng._lengths), dtype=torch.float64)
    for bit in range(1, 17):
        upper = ~rng.bernoulli(low + 2.0**-bit, node, draw)
        low = low + upper * 2.0**-bit
    return (low + 2.0**-17).numpy()


VARIED: dict[str, Callable[[int], np.ndarray]] = {
    "seeds": lambda i: uniforms(keyed(range(ROWS)), i),
    "far seeds": lambda i: uniforms(keyed([s << 40 for s in range(ROWS)]), i),
    "lengths": lambda i: uniforms(keyed([7 + i] * ROWS, range(ROWS))),
    "nodes": lambda i: uniforms(keyed([7 + i] * ROWS), torch.arange(ROWS)),
    "draws": lambda i: np.concatenate(
        [uniforms(keyed(range(i * 999, i * 999 + 32)), 3, draw) for draw in range(256)]
    ),
    "owners": lambda i: np.concatenate(
        [uniforms(keyed(range(i * 999, i * 999 + 32), owner=f"drafter{o}")) for o in range(256)]
    ),
    "purposes": lambda i: np.stack(
        [uniforms(keyed(range(ROWS), purpose=purpose), i) for purpose in Purpose], axis=1
    ).ravel(),
}


# --- uniform and independent ----------------------------------------------------------------------


@pytest.mark.parametrize("key", VARIED)
def test_uniforms_are_uniform_along_every_field_of_the_key(key: str) -> None:
    u = VARIED[key](0)
    assert stats.kstest(u, "uniform").pvalue > LIKELY
    assert stats.chisquare(np.histogram(u, bins=64, range=(0, 1))[0]).pvalue > LIKELY
    assert stats.kstest((u * 2**8) % 1.0, "uniform").pvalue > LIKELY, "the low bits are as good"


@pytest.mark.parametrize("key", VARIED)
def test_neighbouring_keys_are_independent(key: str) -> None:
    u = VARIED[key](1)
    for lag in (1, 2, 3, 16, 64):
        table = np.histogram2d(u[:-lag], u[lag:], bins=6, range=[[0, 1], [0, 1]])[0]
        assert stats.chi2_contingency(table).pvalue > LIKELY, f"lag {lag}"
        assert abs(stats.pearsonr(u[:-lag], u[lag:]).statistic) < 4.5 / len(u) ** 0.5


def test_no_two_keys_share_a_value() -> None:
    seen: set[int] = set()
    count = 0
    for purpose in Purpose:
        for owner in ("", "a", "b", "a/b"):
            for length in (0, 1, 2, 2**24, 2**40):
                for node in (-1, 0, 1, 2, 2**24 - 1, 2**24):
                    for draw in (0, 1, 2, 255):
                        # 40 bits through a draw among 2**20 equal weights, twice, would be slow: look inside.
                        rng = keyed([0, 1, -1, 2**40], length, purpose, owner)
                        seen.update((rng._uniform(node, draw) * 2**53).long().tolist())
                        count += 4
    assert len(seen) == count


def test_fields_of_the_key_do_not_run_into_each_other() -> None:
    rng = keyed([5])

    def value(node: int, draw: int) -> float:
        return float(rng._uniform(node, draw))

    # One more node is never one more draw, at the edges of the field either.
    edges = [value(node, draw) for node in (-1, 0, 2**24 - 2, 2**24 - 1, 2**24) for draw in (0, 1, 2)]
    assert len(set(edges)) == len(edges)
    assert value(-2, 0) != value(-2, 1), "a place without a node keeps its draws apart too"
    with pytest.raises(AssertionError, match="draw 256"):
        value(0, 256)


@pytest.mark.parametrize("node", [-1, 0, 5, 2**24])
def test_a_node_may_be_a_number_or_a_tensor(node: int) -> None:
    rng = keyed(range(50))
    assert torch.equal(rng._uniform(node, 3), rng._uniform(torch.full((50,), node), 3))


def test_owners_that_read_alike_share_nothing() -> None:
    rng = keyed(range(64))
    members = [
        rng.child("a").child("b"),
        rng.child("a/b"),
        rng.child("ab"),
        rng.child("a").child("c"),
        rng.child("plumless"),  # these two have one CRC-32
        rng.child("buckeroo"),
        rng,
    ]
    values = [tuple(member._uniform(0, 0).tolist()) for member in members]
    assert len(set(values)) == len(members)


@pytest.mark.parametrize(
    "seed", [0, 1, -1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15, 3 << 62]
)
def test_any_seed_will_do(seed: int) -> None:
    rng = keyed([seed] * ROWS, range(ROWS))
    u = uniforms(rng)
    assert stats.kstest(u, "uniform").pvalue > LIKELY
    assert np.array_equal(u, uniforms(keyed([seed % 2**64] * ROWS, range(ROWS))))


def test_neighbouring_seeds_say_different_things() -> None:
    logits = torch.zeros(4, 1000)
    drawn = [keyed([seed] * 4, range(4)).target_draw(logits, 0).tolist() for seed in range(-50, 50)]
    assert len({tuple(d) for d in drawn}) == len(drawn)


# --- samples of one prompt ------------------------------------------------------------------------


def test_samples_of_a_prompt_have_seeds_of_their_own() -> None:
    assert sample_seed(11, 0) == 11
    seeds = {sample_seed(seed, i) for seed in (-1, 0, 1, 2**63, 2**64 - 2) for i in range(1, 200)}
    assert len(seeds) == 5 * 199
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_the_noise_of_two_samples_is_independent() -> None:
    logits = torch.zeros(ROWS, 8)
    first = keyed([0] * ROWS, range(ROWS)).target_draw(logits, 0)
    second = keyed([sample_seed(0, 1)] * ROWS, range(ROWS)).target_draw(logits, 0)
    table = torch.zeros(8, 8).index_put_((first, second), torch.ones(ROWS), accumulate=True)
    assert stats.chi2_contingency(table.numpy()).pvalue > LIKELY


# --- draws ----------------------------------------------------------------------------------------


class Fixed(KeyedRng):
    """The generator with a given uniform."""

    def __init__(self, u: list[float]) -> None:
        super().__init__([0] * len(u), [0] * len(u), Purpose.VERIFY, "", CPU)
        self.u = torch.tensor(u, dtype=torch.float64)

    def _uniform(self, node: Tensor | int, draw: int) -> Tensor:
        return self.u


LAST = 1.0 - 2.0**-53


def test_bernoulli_has_the_given_chance() -> None:
    p = torch.linspace(0, 1, 11).repeat_interleave(4000)
    hits = keyed(range(len(p))).bernoulli(p, 0, 0).view(11, 4000).sum(dim=1)
    assert hits[0] == 0
    assert hits[-1] == 4000
    for k, chance in zip(hits[1:-1].tolist(), p[::4000][1:-1].tolist(), strict=True):
        assert stats.binomtest(k, 4000, chance).pvalue > LIKELY


def test_bernoulli_is_sure_where_it_must_be() -> None:
    edge = Fixed([0.0, LAST, 0.0, LAST])
    for dtype in (torch.float32, torch.float64):
        assert edge.bernoulli(torch.tensor([0, 0, 1, 1], dtype=dtype), 0, 0).tolist() == [
            False,
            False,
            True,
            True,
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_categorical_draws_in_proportion(dtype: torch.dtype) -> None:
    weights = torch.tensor([0.0, 3.0, 0.5, 0.0, 1.0, 2.5, 0.0], dtype=dtype)  # sums to 7
    drawn = keyed(range(30_000)).categorical(weights.expand(30_000, -1), 2, 1)
    counts = torch.bincount(drawn, minlength=7)
    assert counts[weights == 0].sum() == 0
    expected = weights[weights > 0].double() * 30_000 / 7
    assert stats.chisquare(counts[weights > 0], expected).pvalue > LIKELY


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, LAST])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_categorical_never_draws_what_has_no_weight(u: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(300, 501, generator=generator, dtype=dtype)
    weights *= 10.0 ** torch.randint(-30, 3, weights.shape, generator=generator)
    weights[torch.rand(weights.shape, generator=generator) < 0.6] = 0.0
    weights[:, 0] = weights[:, -40:] = 0.0
    weights[:, 250] = torch.finfo(dtype).tiny  # never all zero
    weights[0] = weights[0] > weights[0].max() * 2  # all zero but for one, the smallest there is
    weights[0, 77] = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    drawn = Fixed([u] * 300).categorical(weights, 0, 0)
    assert (weights.gather(1, drawn[:, None]) > 0).all()
    assert drawn[0] == 77


def test_categorical_survives_an_uneven_running_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    # A parallel sum may step over a token without weight, or fall short at the end.
    uneven = torch.tensor([[0.0, 0.25, 0.26, 1.0, 0.99]], dtype=torch.float64)
    monkeypatch.setattr(Tensor, "cumsum", lambda *_, **__: uneven)
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    for u in (0.0, 0.2, 0.255, 0.26, 0.9, LAST):
        assert Fixed([u]).categorical(weights, 0, 0).item() in (1, 3)


# --- the target's noise ---------------------------------------------------------------------------


def test_target_draws_have_the_law_of_the_logits() -> None:
    p = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.009, 0.001, 0.0])
    drawn = keyed([1] * 100_000, range(100_000)).target_draw(p.log().expand(100_000, -1), 0)
    counts = torch.bincount(drawn, minlength=8)
    assert counts[-1] == 0
    assert stats.chisquare(counts[:-1], p[:-1].double() / p.double().sum() * 100_000).pvalue > LIKELY


@pytest.mark.parametrize("rows", [300, pytest.param(6000, marks=pytest.mark.slow)])
def test_target_draws_have_the_law_of_the_logits_over_a_large_vocabulary(rows: int) -> None:
    vocab = 50_000
    logits = torch.full((vocab,), -9.0)  # 50k tokens of 1.2e-4 of the largest: 86% of the mass together
    logits[[0, 17, vocab - 1]] = 0.0
    drawn = torch.cat(
        [
            keyed([3] * 10, range(at, at + 10)).target_draw(logits.expand(10, -1), 0)
            for at in range(0, rows, 10)
        ]
    )
    p = logits.double().softmax(dim=0)
    heads = [int((drawn == token).sum()) for token in (0, 17, vocab - 1)]
    tail = drawn[(drawn != 0) & (drawn != 17) & (drawn != vocab - 1)]
    expected = [*(p[[0, 17, vocab - 1]] * rows).tolist(), float(rows * (1 - p[[0, 17, vocab - 1]].sum()))]
    assert stats.chisquare([*heads, len(tail)], expected).pvalue > LIKELY
    assert stats.kstest(tail.double().numpy() / vocab, "uniform").pvalue > LIKELY


def test_a_very_unlikely_token_can_win() -> None:
    # With 24 bits no noise exceeds 16.6 and is below -2.9: nothing under 1.7e-9 of the largest could win.
    noise = _noise(keyed([1]), 1_000_000)
    assert noise.isfinite().all()
    assert stats.kstest(noise[:100_000].numpy(), "gumbel_r").pvalue > LIKELY
    high = 1 - np.exp(-np.exp(-noise[noise > 9].numpy()))  # the law of the tail alone: uniform up to here
    assert stats.kstest(high / (1 - np.exp(-np.exp(-9))), "uniform").pvalue > LIKELY
    ends = _extremes()
    assert ends.isfinite().all()
    assert ends.max() > 36
    assert ends.min() < -3.5


def _noise(rng: KeyedRng, vocab: int) -> Tensor:
    """Gumbel noise of a row's next position, seen through a float64 maximum."""
    return _capture(lambda: rng.target_draw(torch.zeros(1, vocab, dtype=torch.float64), 0))


def _extremes() -> Tensor:
    """The noise of the smallest and the largest 53 bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specdec_core.contract.rng._number", lambda stream, word: torch.tensor([[0, -1]]))
        return _noise(keyed([0]), 2)


def _capture(call: Callable[[], object]) -> Tensor:
    """What a call takes the largest of."""
    seen: list[Tensor] = []
    original = Tensor.argmax

    def argmax(self: Tensor, dim: int) -> Tensor:
        seen.append(self)
        return original(self, dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "argmax", argmax)
        call()
    return seen[0].flatten()


def test_impossible_tokens_never_win() -> None:
    logits = torch.full((500, 40), -torch.inf)
    logits[torch.arange(500), torch.arange(500) % 40] = -1e4
    assert torch.equal(keyed(range(500)).target_draw(logits, 0), torch.arange(500) % 40)


def test_both_forms_of_target_draw_agree() -> None:
    rng = keyed(range(6), range(10, 16))
    logits = torch.randn(6, 5, 300, generator=torch.Generator().manual_seed(0))
    depths = torch.tensor([[0, 1, 2, 2, 3]]).expand(6, -1)
    together = rng.target_draw(logits, depths)
    for column, depth in enumerate([0, 1, 2, 2, 3]):
        assert torch.equal(together[:, column], rng.target_draw(logits[:, column], depth))
        assert torch.equal(together[:, column], rng.target_draw(logits[:, column], torch.full((6,), depth)))


def test_the_targets_noise_depends_on_seed_and_position_alone() -> None:
    logits = torch.randn(1, 300, generator=torch.Generator().manual_seed(1)).expand(8, -1)
    lengths = [20, 19, 18, 17, 16, 15, 14, 13]
    depths = torch.tensor([20 - length for length in lengths])
    tokens = {
        int(token)
        for purpose in Purpose
        for owner in ("", "x")
        for token in keyed([4] * 8, lengths, purpose, owner).target_draw(logits, depths)
    }
    assert len(tokens) == 1
    elsewhere = keyed([4] * 200, range(200)).target_draw(torch.zeros(200, 10_000), 0)
    assert len(set(elsewhere.tolist())) > 190, "every position has noise of its own"


def test_noise_and_uniforms_are_independent() -> None:
    rng = keyed(range(20_000))
    drawn = rng.target_draw(torch.zeros(20_000, 4), 0)
    u = rng.categorical(torch.ones(20_000, 4), -1, 0)
    table = torch.zeros(4, 4).index_put_((drawn, u), torch.ones(20_000), accumulate=True)
    assert stats.chi2_contingency(table.numpy()).pvalue > LIKELY


# --- batches and other generators -----------------------------------------------------------------


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    seeds, lengths = [9, -3, 2**63 + 5, 9], [4, 100, 0, 5]
    together = KeyedRng(seeds, lengths, Purpose.DRAFT, "d", CPU).child("m")
    weights = torch.rand(4, 50, generator=torch.Generator().manual_seed(2))
    nodes = torch.tensor([3, 1, 0, 7])
    again = together.for_rows([2, 0, 2])._uniform(1, 0)
    assert torch.equal(again, together._uniform(1, 0)[[2, 0, 2]])
    for i in range(4):
        alone = KeyedRng([seeds[i]], [lengths[i]], Purpose.DRAFT, "d", CPU).child("m")
        for one in (alone, together.for_rows([i])):
            row = slice(i, i + 1)
            assert one._uniform(nodes[row], 2) == together._uniform(nodes, 2)[i]
            assert one.categorical(weights[row], 5, 1) == together.categorical(weights, 5, 1)[i]
            assert (
                one.target_draw(weights[row].log(), nodes[row])
                == together.target_draw(weights.log(), nodes)[i]
            )


def test_no_global_generator_is_touched() -> None:
    before, python, numbers = torch.get_rng_state(), random.getstate(), np.random.get_state()
    rng = keyed([1, 2]).child("x")
    rng.bernoulli(torch.tensor([0.5, 0.5]), 0, 0)
    rng.categorical(torch.ones(2, 3), 0, 1)
    rng.target_draw(torch.zeros(2, 3), 0)
    sample_seed(1, 2)
    assert torch.equal(before, torch.get_rng_state())
    assert python == random.getstate()
    assert all(np.array_equal(a, b) for a, b in zip(numbers, np.random.get_state(), strict=True))
    torch.manual_seed(1)
    first = keyed([1])._uniform(0, 0)
    torch.manual_seed(2)
    assert first == keyed([1])._uniform(0, 0)


def test_draws_live_on_the_devices_of_their_arguments(device: torch.device) -> None:
    rng = KeyedRng([1, 2], [3, 4], Purpose.VERIFY, "", device)
    weights = torch.rand(2, 9, device=device)
    for drawn in (
        rng.bernoulli(weights[:, 0], torch.tensor([0, 1], device=device), 0),
        rng.categorical(weights, 0, 1),
        rng.target_draw(weights, 0),
    ):
        assert drawn.device.type == device.type
    here = KeyedRng([1, 2], [3, 4], Purpose.VERIFY, "", CPU)
    assert torch.equal(rng._uniform(0, 0).cpu(), here._uniform(0, 0)), "uniforms are the same on every device"


def test_the_values_do_not_change_between_versions() -> None:
    """A seed promises the same text tomorrow: whoever changes the keys must say so in the changelog."""
    rng = KeyedRng([1, 2**63], [10, 11], Purpose.VERIFY, "", CPU)
    assert rng._uniform(0, 0).tolist() == [0.8339835795813064, 0.06123923856587765]
    assert rng.target_draw(torch.zeros(2, 1000), 0).tolist() == [175, 274]
    assert sample_seed(1, 1) == 13830413928045401970
