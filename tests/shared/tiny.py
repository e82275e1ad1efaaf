"""Tiny random models: those of the conformance kit."""

from __future__ import annotations

from specdec_core.testing.models import VOCAB, tiny_model

__all__ = ["VOCAB", "tiny_model"]
