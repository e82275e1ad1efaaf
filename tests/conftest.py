"""Fixtures that all tests share."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)  # the models are tiny: threads that wait for each other only take time


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device there is a reason to test on."""
    return torch.device(request.param)
