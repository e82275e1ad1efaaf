"""The demo pair: a small target with early exits and a draft for it; see MODEL_CARD.md beside this file."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent

TARGET = _HERE / "target"
DRAFT = _HERE / "draft"
