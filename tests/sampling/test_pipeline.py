"""p is made in the meaning and order of transformers, and what is sampled has exactly that law."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from support import base, decoder_for, greedy, ids, markov_llama, sampled, tiny_llama, warped
from torch import Tensor

from specdec_core import InvalidParameter, SamplingParams, SpecDecoder
from specdec_core.sampling.pipeline import distributions, warp

MIX = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5, top_k=5),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=1000),
    SamplingParams(temperature=0.7, top_p=0.6),
    SamplingParams(temperature=1.0, top_p=0.001),
    SamplingParams(temperature=1.3, min_p=0.2),
    SamplingParams(temperature=1.0, min_p=1.0),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02),
    SamplingParams(temperature=1.7, top_k=3, top_p=0.5),
    SamplingParams(top_k=2, top_p=0.1, min_p=0.9),  # temperature 0: nothing of it applies
]


def random_logits(rows: int, columns: int, vocab: int = 40, seed: int = 0) -> Tensor:
    return torch.randn((rows, columns, vocab), generator=torch.Generator().manual_seed(seed)) * 3


def check(logits: Tensor, params: list[SamplingParams]) -> None:
    """Compare p with that of transformers' own warpers, row by row."""
    got = distributions(logits, params)
    for i, one in enumerate(params):
        expected = warped(logits[i], one).softmax(dim=-1)
        if one.greedy:
            expected = torch.nn.functional.one_hot(logits[i].argmax(dim=-1), logits.shape[-1]).float()
        torch.testing.assert_close(got.probs[i], expected, atol=1e-6, rtol=1e-5)
        assert torch.equal(got.probs[i] > 0, expected > 0)
        assert torch.equal(got.argmax[i], expected.argmax(dim=-1))
        finite = got.noise_logits[i] > -torch.inf
        assert torch.equal(finite, expected > 0)
        torch.testing.assert_close(got.noise_logits[i].softmax(dim=-1), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("columns", [1, 6])
@pytest.mark.parametrize("seed", range(3))
def test_a_mixed_batch_is_processed_as_transformers_does(columns: int, seed: int) -> None:
    """B10's pipeline: every combination of parameters in one batch, at every position."""
    check(random_logits(len(MIX), columns, seed=seed), MIX)


@pytest.mark.parametrize("one", MIX, ids=str)
def test_each_set_of_params_alone_is_processed_as_transformers_does(one: SamplingParams) -> None:
    """B10's pipeline."""
    check(random_logits(2, 3), [one] * 2)


def test_ties_are_treated_as_transformers_does() -> None:
    """B10's pipeline: equals of the k-th largest stay; top-p cuts between equals where the sort puts them."""
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0, 0.0, -1.0, 2.0]).expand(len(MIX), 1, 8)
    check(logits.contiguous(), MIX)
    kept = warp(logits[:1], [SamplingParams(temperature=1.0, top_k=3)])[0, 0] > -torch.inf
    assert kept.tolist() == [True, True, True, True, False, False, False, True]


@pytest.mark.parametrize("top_p", [0.1, 0.25, 0.5, 0.75, 0.9])
@pytest.mark.parametrize("vocab", [4, 10])
def test_a_mass_that_is_met_exactly_is_treated_as_transformers_does(vocab: int, top_p: float) -> None:
    """B10's pipeline: equal tokens, of which so many make up top_p to the last bit."""
    check(torch.zeros((1, 1, vocab)), [SamplingParams(temperature=1.0, top_p=top_p)])


def test_a_masked_vocabulary_stays_masked() -> None:
    """B16's pipeline: -inf in the logits."""
    logits = random_logits(len(MIX), 2)
    logits[..., 3:] = -torch.inf
    check(logits, MIX)


def test_order_matters_and_is_temperature_top_k_top_p_min_p() -> None:
    """B10's pipeline: top-p of a sharpened distribution keeps less."""
    logits = torch.tensor([[[2.0, 1.5, 1.0, 0.0]]])
    kept = {
        t: int((warp(logits, [SamplingParams(temperature=t, top_p=0.6)]) > -torch.inf).sum())
        for t in (0.1, 5.0)
    }
    assert kept == {0.1: 1, 5.0: 3}


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-45, 1e-60, 1e-300, 5e-324, 1e30, 1e300])
def test_no_temperature_makes_a_nan(temperature: float) -> None:
    """B14's pipeline: a tiny one is greedy at last, a huge one uniform."""
    logits = random_logits(1, 4)
    logits[..., 5] = -torch.inf
    params = [SamplingParams(temperature=temperature, top_k=7, top_p=0.99, min_p=1e-6)]
    p = distributions(logits, params)
    assert not p.probs.isnan().any()
    assert not p.noise_logits.isnan().any()
    torch.testing.assert_close(p.probs.sum(dim=-1), torch.ones(1, 4))
    if temperature < 1e-3:
        assert torch.equal(p.probs.argmax(dim=-1), logits.argmax(dim=-1))
        assert (p.probs.amax(dim=-1) == 1).all()
    elif temperature > 1:
        assert (p.probs > 0).sum() == 4 * 7
    assert (p.probs[..., 5] == 0).all()


def test_a_nearly_cold_row_says_what_greedy_says() -> None:
    """B14: through the whole stack."""
    model, prompt = tiny_llama(), ids(5, 61)
    result = SpecDecoder(model, strict=True).generate(
        prompt, SamplingParams(max_new_tokens=12, temperature=1e-40, seed=1)
    )
    assert result.token_ids == base(model, prompt, 12)


def test_greedy_rows_are_left_in_order() -> None:
    """B15's pipeline: beside rows that sample, in any dtype."""
    logits = random_logits(3, 2)
    params = [greedy(1, top_k=1), SamplingParams(temperature=0.5), greedy(1, top_p=0.1)]
    for row in (0, 2):
        assert torch.equal(warp(logits, params)[row].argsort(dim=-1), logits[row].argsort(dim=-1))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        rounded = logits.to(dtype)
        assert torch.equal(distributions(rounded, params).argmax[0], rounded[0].argmax(dim=-1))
        assert torch.equal(distributions(rounded, [greedy(1)] * 3).argmax, rounded.argmax(dim=-1))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", -1, "greater than or equal to 0"),
        ("temperature", float("nan"), "finite"),
        ("temperature", float("inf"), "finite"),
        ("temperature", "warm", "number"),
        ("top_k", -3, "greater than or equal to 0"),
        ("top_k", 2.5, "integer"),
        ("top_k", True, "integer"),
        ("top_p", 0, "greater than 0"),
        ("top_p", 2, "less than or equal to 1"),
        ("min_p", -0.1, "greater than or equal to 0"),
        ("min_p", 1.5, "less than or equal to 1"),
        ("seed", 1.5, "integer"),
        ("seed", "x", "integer"),
        ("max_new_tokens", -1, "greater than or equal to 0"),
        ("seed", True, "not a truth value"),
        ("eos_token_id", "x", "integer"),
        ("eos_token_id", True, "not a truth value"),
        ("eos_token_id", [1, True], "not a truth value"),
        ("bad_words_ids", [[True]], "not a truth value"),
        ("logit_bias", {True: 1.0}, "not a truth value"),
        ("temperature", True, "not a truth value"),
    ],
)
def test_a_wrong_parameter_is_named_with_its_value_and_what_is_allowed(
    field: str, value: Any, words: str
) -> None:
    """B71's kind: one line, and a ValueError."""
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert message.startswith(f"{field}={value!r} is not allowed: it should be")
    assert words in message
    assert "\n" not in message
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("stop", "", "it must not hold an empty string"),
        ("stop", ["a", ""], "it must not hold an empty string"),
        ("bad_words_ids", [[1], []], "it must not hold an empty sequence"),
    ],
)
def test_an_empty_part_is_refused(field: str, value: Any, words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{field: value})
    assert str(caught.value) == f"{field}={value!r} is not allowed: {words}"


def test_an_unknown_parameter_is_named_with_those_there_are() -> None:
    """B105's kind."""
    with pytest.raises(
        InvalidParameter, match=r"unknown sampling parameter 'temprature'; known: .*temperature"
    ):
        SamplingParams(temprature=1)


def test_params_cannot_be_changed_and_can_be_replaced() -> None:
    """B71's kind: a changed copy is checked too."""
    params = SamplingParams(temperature=0.5, seed=3)
    with pytest.raises(Exception, match="frozen"):
        params.temperature = 1.0  # type: ignore[misc]
    assert params.replace(seed=4) == SamplingParams(temperature=0.5, seed=4)
    assert params.seed == 3
    with pytest.raises(InvalidParameter, match="top_p=7"):
        params.replace(top_p=7)


# --- the law --------------------------------------------------------------------------------------

LAW_VOCAB = 6
LAW_LOG_P = torch.randn((LAW_VOCAB, LAW_VOCAB), generator=torch.Generator().manual_seed(5)) * 1.2


@pytest.mark.parametrize(
    ("params", "runs"),
    [
        (SamplingParams(max_new_tokens=2, temperature=1.0), 8192),
        (SamplingParams(max_new_tokens=2, temperature=0.8, top_k=4, top_p=0.9), 4096),
    ],
    ids=["plain", "warped"],
)
def test_two_sampled_tokens_have_exactly_the_law_of_the_model(params: SamplingParams, runs: int) -> None:
    """B10: `prompt_lookup` with `match`; the draft is right in some runs, wrong in others."""
    model = markov_llama(LAW_LOG_P)
    decoder = SpecDecoder(
        model, drafter="prompt_lookup", verifier="match", max_batch=64, strict=True, draft_tokens=None
    )
    drafted = int(LAW_LOG_P[3].topk(2).indices[1])  # second likeliest after a 3
    prompt = [3, drafted, 3]
    p = torch.stack(
        [warped(LAW_LOG_P[i][None], params)[0].softmax(dim=-1) for i in range(LAW_VOCAB)]
    ).double()
    law = (p[3][:, None] * p).flatten()  # of (first, second)
    counts = torch.zeros(LAW_VOCAB * LAW_VOCAB, dtype=torch.float64)
    results = decoder.generate([prompt] * runs, [params.replace(seed=seed) for seed in range(runs)])
    for result in results:
        first, second = result.token_ids
        counts[first * LAW_VOCAB + second] += 1
    possible = law > 0
    assert counts[~possible].sum() == 0
    assert chisquare(counts[possible], law[possible] / law.sum() * runs).pvalue > 1e-4
    accepted = sum(result.stats.accepted_tokens for result in results)
    share = float(p[3, drafted])  # what a draft without a q is accepted with
    assert 0.1 < share < 0.5
    assert abs(accepted / runs - share) < 5 * (share * (1 - share) / runs) ** 0.5


def test_a_markov_model_says_what_it_was_made_to_say() -> None:
    """B10: the law that the test above compares with is the model's own."""
    model = markov_llama(LAW_LOG_P)
    with torch.no_grad():
        logits = model(input_ids=torch.arange(LAW_VOCAB)[None]).logits[0]
    torch.testing.assert_close(logits, LAW_LOG_P, atol=1e-4, rtol=1e-4)


def test_a_seed_is_all_that_a_text_depends_on() -> None:
    """B72's kind: the same twice, another for another seed; the plain sampler's."""
    model, prompt = tiny_llama(), ids(5, 62)
    decoder = decoder_for(model)
    params = SamplingParams(max_new_tokens=10, temperature=1.0, seed=9)
    said = decoder.generate(prompt, params).token_ids
    assert said == decoder.generate(prompt, params).token_ids == sampled(model, prompt, params)
    assert said != decoder.generate(prompt, params.replace(seed=10)).token_ids
