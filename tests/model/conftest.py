"""Fixtures of the model runtime's tests."""

from __future__ import annotations

from typing import Any

import pytest

from specdec_core.testing.models import tiny_model


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    """The model that a test's (architecture, window, attention) names: see `harness.MODELS`."""
    name, window, attention = request.param
    return tiny_model(name, window=window, attention=attention)
