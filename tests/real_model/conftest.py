"""SmolLM2-135M-Instruct, where `SPECDEC_TEST_MODEL` names its folder (see tools/fetch_smollm2.py)."""

from __future__ import annotations

import os
from typing import Any

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """(model, tokenizer) in float32."""
    folder = os.environ.get("SPECDEC_TEST_MODEL")
    if not folder:
        pytest.skip("set SPECDEC_TEST_MODEL to the folder that tools/fetch_smollm2.py made")
    from specdec_core.model.loading import load_model

    return load_model(folder, dtype="float32", device="cpu")
