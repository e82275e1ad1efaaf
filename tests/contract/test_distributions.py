"""The largest scores, found by blocks: those that torch finds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdec_core import TargetDistributions, top_token, top_tokens
from specdec_core.contract import distributions as largest


@pytest.fixture(autouse=True, params=[0, largest._LEAST_WORK], ids=["by blocks", "as it pays"])
def work(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small widths would not be found by blocks otherwise."""
    monkeypatch.setattr(largest, "_LEAST_WORK", request.param)


WIDTHS = [1, 97, 2047, 2048, 2049, 4096, 4351, 5000, 49152]


def scores(width: int, dtype: torch.dtype = torch.float32, levels: int | None = None) -> Tensor:
    made = torch.randn((2, 3, width), generator=torch.Generator().manual_seed(width))
    return (made if levels is None else (made * levels).round()).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_smallest_id_among_equals(width: int, dtype: torch.dtype) -> None:
    for x in (scores(width, dtype), scores(width, dtype, levels=2), torch.zeros(1, width, dtype=dtype)):
        first = (x == x.amax(dim=-1, keepdim=True)).int().argmax(dim=-1)
        assert torch.equal(top_token(x), first)
        assert torch.equal(TargetDistributions(x).argmax, first)


@pytest.mark.parametrize("at", [0, 255, 256, 4351])
def test_at_the_borders_of_blocks(at: int) -> None:
    x = torch.zeros(1, 4352 - 0)[:, :4352].clone()
    x[0, at] = 1
    assert top_token(x).tolist() == [at]
    short = torch.full((1, 4099), -torch.inf)
    short[0, 4098] = -5
    assert top_token(short).tolist() == [4098]


def test_nan_and_nothing_but_infinity() -> None:
    x = scores(4351)
    x[0, 0, 4300] = torch.nan
    x[1, 2] = -torch.inf
    assert torch.equal(top_token(x), x.argmax(dim=-1))


@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("width", WIDTHS[1:])
def test_the_k_largest(width: int, k: int) -> None:
    x = scores(width)
    values, ids = top_tokens(x, k)
    assert torch.equal(values, x.topk(k, dim=-1).values)
    assert torch.equal(x.gather(-1, ids), values)
    ties = scores(width, levels=1)
    values, ids = top_tokens(ties, k)
    assert torch.equal(values, ties.topk(k, dim=-1).values)
    assert torch.equal(ties.gather(-1, ids), values)
    assert all(len(set(row)) == k for row in ids.flatten(0, 1).tolist())  # none twice


def test_fewer_than_k_that_are_possible() -> None:
    """In the last block, which is not full: what is given are tokens that there are."""
    x = torch.full((1, 4099), -torch.inf)
    x[0, 4097] = 0
    values, ids = top_tokens(x, 2)
    assert (values.tolist(), ids[0, 0].tolist()) == ([[0, -torch.inf]], 4097)
    assert ids.max() < 4099
