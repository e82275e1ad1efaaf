"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct (tools/fetch_smollm2.py): $SPECDEC_TEST_MODEL, or `smollm2` in the checkout."""
    folder = Path(os.environ.get("SPECDEC_TEST_MODEL") or Path(__file__).parents[1] / "smollm2")
    if not folder.is_dir():
        pytest.skip("the real model is not there: python tools/fetch_smollm2.py smollm2")
    return folder


@pytest.fixture(scope="session")
def _smollm2(smollm2_folder: Path) -> Any:
    from specdec_core.model.loading import load_model

    return load_model(str(smollm2_folder), dtype="float32", device="cpu")


@pytest.fixture
def smollm2(_smollm2: Any) -> Iterator[Any]:
    """(model, tokenizer) in float32; for once a model that more than one thread helps."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield _smollm2
    torch.set_num_threads(1)
