"""What was told."""

from __future__ import annotations

import logging

import pytest


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings that a user of specdec sees."""
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name == "specdec"]
