"""The models that the kit decodes with: tiny random ones with a draft beside them, and an author's own."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec_core.testing.models import VOCAB, cousin, tiny_model

DRAFT, EXIT = "draft", 1
ARCHITECTURES = ("llama", "gpt2", "qwen3", "mistral", "gemma2")
_WINDOW = 8
_WINDOWED = ("mistral", "gemma2")


@dataclass(frozen=True, eq=False)
class KitTarget:
    """A target, and the folder it would be loaded from."""

    label: str
    model: Any
    folder: Path
    tokenizer: Any | None = None

    @property
    def vocab(self) -> int:
        """V."""
        return int(self.model.get_input_embeddings().weight.shape[0])

    @property
    def draft(self) -> str:
        """The folder of a small model with the same vocabulary; the target itself where none is shipped."""
        folder = self.folder / DRAFT
        return str(folder if folder.is_dir() else self.folder)

    def on(self, device: str) -> KitTarget:
        """The same on another device."""
        if self.model.device.type == device:
            return self
        return replace(self, model=copy.deepcopy(self.model).to(device))


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """Lives as long as the process."""
    return tempfile.TemporaryDirectory(prefix="specdec-kit-")


@functools.cache
def tiny_target(architecture: str = "llama", vocab: int = VOCAB, context: int = 256) -> KitTarget:
    """A random model of two layers, saved with a draft and an exit layer as its companions."""
    window = _WINDOW if architecture in _WINDOWED else None
    model = tiny_model(architecture, layers=2, vocab=vocab, window=window, context=context, fresh=True)
    folder = Path(_scratch().name) / f"{architecture}-{vocab}-{context}"
    for one, where in ((model, folder), (cousin(model, noise=0.03), folder / DRAFT)):
        _save(one, where)
    companions = {"draft": DRAFT, "exit_layer": EXIT}
    (folder / "specdec.json").write_text(json.dumps(companions), encoding="utf-8")
    model.config._name_or_path = str(folder)
    return KitTarget(f"a tiny {architecture}", model, folder)


def _save(model: Any, folder: Path) -> None:
    """Save without a bar."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if bars:
            logging.enable_progress_bar()


@functools.cache
def loaded_target(folder: str) -> KitTarget:
    """An author's own target, in float32."""
    from specdec_core.model.loading import load_model

    model, tokenizer = load_model(folder, dtype="float32", device="cpu", offline=True)
    return KitTarget(folder, model, Path(folder), tokenizer)
