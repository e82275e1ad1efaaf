"""p as verifiers read it: processed, a point mass at temperature 0, and one index at a time."""

from __future__ import annotations

import pytest
import torch

from specdec_core import TargetDistributions

LOGITS = torch.randn(4, 3, 7, generator=torch.Generator().manual_seed(0))
GREEDY = torch.tensor([True, False, False, True])


def test_p_is_a_softmax_or_a_point_mass() -> None:
    p = TargetDistributions(LOGITS, GREEDY)
    soft = LOGITS.softmax(dim=-1)
    assert torch.equal(p.probs[~GREEDY], soft[~GREEDY])
    assert torch.equal(p.probs[GREEDY], torch.nn.functional.one_hot(LOGITS.argmax(-1), 7)[GREEDY].float())
    assert p.vocab_size == 7
    assert torch.equal(p.argmax, LOGITS.argmax(dim=-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_where_all_rows_are_greedy_any_dtype_will_do(dtype: torch.dtype) -> None:
    p = TargetDistributions(LOGITS.to(dtype))
    assert p.probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(p.probs.sum(dim=-1), torch.ones(4, 3, dtype=p.probs.dtype))
    assert torch.equal(p.probs.argmax(dim=-1), LOGITS.to(dtype).argmax(dim=-1))
    assert torch.equal(p.noise_logits.isfinite(), p.probs > 0)


def test_of_equals_the_smallest_id_is_the_argmax() -> None:
    logits = torch.tensor([[[1.0, 3.0, 3.0, 0.0]]])
    assert TargetDistributions(logits).argmax.tolist() == [[1]]
    assert TargetDistributions(logits, torch.tensor([True])).probs.tolist() == [[[0, 1, 0, 0]]]


def test_noise_is_added_to_log_p() -> None:
    logits = LOGITS.clone()
    logits[1, 0, :6] = -torch.inf
    p = TargetDistributions(logits, GREEDY)
    torch.testing.assert_close(p.noise_logits.softmax(dim=-1), p.probs)
    assert torch.equal(p.noise_logits[~GREEDY], logits[~GREEDY])
    assert torch.equal(p.noise_logits == -torch.inf, p.probs == 0)


@pytest.mark.parametrize("greedy", [None, GREEDY], ids=["greedy", "mixed"])
def test_one_index_of_each_row(greedy: torch.Tensor | None) -> None:
    p = TargetDistributions(LOGITS, greedy)
    index = torch.tensor([2, 0, 1, 1])
    rows = torch.arange(4)
    one = p.at(index)
    assert torch.equal(one.probs[:, 0], p.probs[rows, index])
    assert torch.equal(one.noise_logits[:, 0], p.noise_logits[rows, index])
    assert torch.equal(one.argmax[:, 0], p.argmax[rows, index])


def test_logits_are_not_written_to() -> None:
    before = LOGITS.clone()
    for greedy in (None, GREEDY):
        p = TargetDistributions(LOGITS, greedy)
        assert p.probs is p.probs
        assert p.noise_logits is p.noise_logits
    assert torch.equal(LOGITS, before)
