"""Lets the conformance kit build `medusa` for whatever target it draws: with random heads of its width."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from heads_files import tensors, write

_FOLDER = tempfile.TemporaryDirectory(prefix="medusa-heads-")


def pytest_specdec_options(drafter: str, model: Any) -> Mapping[str, object] | None:
    """Write heads of the target's width and vocabulary, once each."""
    if drafter != "medusa":
        return None
    vocab, hidden = model.get_output_embeddings().weight.shape
    folder = Path(_FOLDER.name) / f"{vocab}-{hidden}"
    if not folder.exists():
        write(folder, tensors(heads=3, vocab=vocab, hidden=hidden))
    return {"heads": str(folder)}
