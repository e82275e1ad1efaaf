"""Load a target by hub id or local folder, with errors that a user can act on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec_core.errors import InvalidParameter, UnsupportedModel

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def load_model(
    target: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    offline: bool = False,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, Any]:
    """Load a causal language model and its tokenizer.

    Args:
        device: "auto" takes a GPU where there is one; or a torch device, or "balanced" to spread layers.
        dtype: "auto" is the checkpoint's own; or float32, bfloat16, float16.

    Raises:
        InvalidParameter: the device or dtype is not there, or nothing can be loaded from `target`.
        UnsupportedModel: it is no causal language model.
    """
    where = pick_device(device)
    if dtype != "auto" and dtype not in _DTYPES:
        raise InvalidParameter(f"dtype={dtype!r} is unknown; use auto, {', '.join(_DTYPES)}")
    folder = Path(target).expanduser()
    if folder.exists() and not folder.is_dir():
        raise InvalidParameter(f"target {target!r} is a file; name a model folder or a hub id")
    if not folder.is_dir() and (folder.is_absolute() or target.startswith(("./", "../", "~"))):
        raise InvalidParameter(f"target {target!r} does not exist; name a model folder or a hub id")
    if folder.is_dir() and revision is not None:
        raise InvalidParameter(
            f"revision={revision!r} needs a hub id, and {target!r} is a folder; leave it out"
        )
    name = str(folder) if folder.is_dir() else target
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if folder.is_dir() or offline:
        options["local_files_only"] = True
    if revision is not None:
        options["revision"] = revision
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=_DTYPES.get(dtype, "auto"), **options)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise _explained(target, error) from error
    return model.to(where).eval(), tokenizer  # type: ignore[arg-type]


def pick_device(device: str) -> torch.device:
    """Choose a device by name; "auto" is a GPU where there is one.

    Raises:
        InvalidParameter: no such device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise InvalidParameter(f"device={device!r} is unknown; use auto, cpu, cuda, cuda:1, ...") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise InvalidParameter(f"device={device!r}: no CUDA device is there; use auto or cpu")
    return found


def _explained(target: str, error: Exception) -> Exception:
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "Unrecognized configuration class" in str(error):
        return UnsupportedModel(f"target {target!r} is no causal language model: {text}")
    return InvalidParameter(
        f"target {target!r} cannot be loaded: {text} (name a local folder, or a hub id that can be reached)"
    )
