"""Hooks of the kit that an author may implement in a conftest.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest


@pytest.hookspec(firstresult=True)
def pytest_specdec_options(drafter: str, model: Any) -> Mapping[str, object] | None:
    """Give options of a drafter that must fit the target, such as weights; None: nothing to add.

    Called whenever the kit builds a drafter. Options of the command line go before these.

    Args:
        drafter: its name, as on the command line.
        model: the Hugging Face model that it will draft for: mostly a tiny random one, of any architecture.
    """
