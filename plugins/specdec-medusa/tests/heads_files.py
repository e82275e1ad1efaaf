"""Heads with random weights, as tensors in the published layout, and prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

from specdec_core.testing.models import VOCAB

HIDDEN = 32
PROMPTS = [[3], [5, 9, 2, 5, 9], [7, 1, 7, 1, 7, 1, 7], list(range(20, 41))]


def tensors(
    heads: int = 3, layers: int = 1, vocab: int | None = VOCAB, hidden: int = HIDDEN, seed: int = 0
) -> dict[str, Tensor]:
    """Weights under the published names; vocab None: heads without projections."""
    generator = torch.Generator().manual_seed(seed)
    made: dict[str, Tensor] = {}
    for head in range(heads):
        for layer in range(layers):
            made[f"{head}.{layer}.linear.weight"] = 0.3 * torch.randn(hidden, hidden, generator=generator)
            made[f"{head}.{layer}.linear.bias"] = 0.3 * torch.randn(hidden, generator=generator)
        if vocab is not None:
            made[f"{head}.{layers}.weight"] = torch.randn(vocab, hidden, generator=generator)
    return made


def says(made: dict[str, Tensor], head: int, layers: int, state: Tensor) -> Tensor:
    """One head, spelled out as the paper does: state [H] -> logits [V]."""
    x = state
    for layer in range(layers):
        x = x + silu(made[f"{head}.{layer}.linear.weight"] @ x + made[f"{head}.{layer}.linear.bias"])
    return made[f"{head}.{layers}.weight"] @ x


def write(folder: Path, made: dict[str, Any], name: str = "medusa_lm_head.safetensors") -> Path:
    """Write weights into a folder, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if name.endswith(".safetensors"):
        save_file(made, folder / name)
    else:
        torch.save(made, folder / name)
    return folder
