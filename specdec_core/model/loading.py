"""Load a target by hub id or local folder, with errors that a user can act on."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_peft_available
from transformers.utils.peft_utils import find_adapter_config_file

from specdec_core.contract.errors import InvalidParameter, UnsupportedModel

logger = logging.getLogger("specdec")

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}

_ADAPTER = "adapter_config.json"


def load_model(
    target: str,
    *,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    offline: bool = False,
    trust_remote_code: bool = False,
) -> tuple[nn.Module, Any]:
    """Load a causal language model and its tokenizer; a PEFT adapter comes with the model it was made for.

    Args:
        device: "auto" takes a GPU where there is one; or a torch device, or "balanced" to spread layers.
        dtype: "auto" is the checkpoint's own; or float32, bfloat16, float16.

    Raises:
        InvalidParameter: the device or dtype is not there, or nothing can be loaded from `target`.
        UnsupportedModel: it is no causal language model.
    """
    where = None if device == "balanced" else pick_device(device)
    if dtype != "auto" and dtype not in _DTYPES:
        raise InvalidParameter(f"dtype={dtype!r} is unknown; use auto, {', '.join(_DTYPES)}")
    name, options = _source(target, revision, offline)
    options["trust_remote_code"] = trust_remote_code
    try:
        base = _base_of_adapter(target, name, options)
        tokenizer = _tokenizer(name, base, options)
        device_map = _device_map(base or name, where, options)
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=_DTYPES.get(dtype, "auto"), **device_map, **options
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise _explained(target, error) from error
    return (model if device_map else model.to(where)).eval(), tokenizer  # type: ignore[arg-type]


def _source(target: str, revision: str | None, offline: bool) -> tuple[str, dict[str, Any]]:
    """Tell a folder from a hub id: its name, and options of `from_pretrained`."""
    folder = Path(target).expanduser()
    if folder.exists() and not folder.is_dir():
        raise InvalidParameter(f"target {target!r} is a file; name a model folder or a hub id")
    if not folder.is_dir() and (folder.is_absolute() or target.startswith(("./", "../", "~"))):
        raise InvalidParameter(f"target {target!r} does not exist; name a model folder or a hub id")
    if folder.is_dir() and not any((folder / name).is_file() for name in ("config.json", _ADAPTER)):
        raise InvalidParameter(f"target {target!r} has no config.json, so it is no model folder")
    if not folder.is_dir() and not offline and try_to_load_from_cache(target, "config.json") is None:
        logger.warning("no folder %r is here: asking the hub for it (--offline does not)", target)
    if folder.is_dir() and revision is not None:
        raise InvalidParameter(
            f"revision={revision!r} needs a hub id, and {target!r} is a folder; leave it out"
        )
    options: dict[str, Any] = {} if revision is None else {"revision": revision}
    if offline or (
        folder.is_dir() and not (folder / _ADAPTER).is_file()
    ):  # an adapter's model may be elsewhere
        options["local_files_only"] = True
    return str(folder) if folder.is_dir() else target, options


def _base_of_adapter(target: str, name: str, options: dict[str, Any]) -> str | None:
    """Name the model that a PEFT adapter was made for; None: this is no adapter."""
    file = find_adapter_config_file(name, **_for_hub(options))
    if file is None:
        return None
    if not is_peft_available():
        raise InvalidParameter(f"target {target!r} is a PEFT adapter; install peft to load it")
    base: str | None = json.loads(Path(file).read_text(encoding="utf-8")).get("base_model_name_or_path")
    return base


def _for_hub(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key in ("revision", "local_files_only")}


def _tokenizer(name: str, base: str | None, options: dict[str, Any]) -> Any:
    """Load a tokenizer; an adapter may leave it to its model."""
    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError, ImportError):  # what is not there is sometimes taken for another format
        if base is None:
            raise
    return AutoTokenizer.from_pretrained(base, **{k: v for k, v in options.items() if k != "revision"})


def _device_map(name: str, where: torch.device | None, options: dict[str, Any]) -> dict[str, Any]:
    """Say where weights go while they are loaded: those that are quantized cannot all be moved later."""
    if where is None:
        return {"device_map": "balanced"}
    try:
        config = AutoConfig.from_pretrained(name, **options)
    except (OSError, ValueError):
        return {}
    return {"device_map": {"": where}} if getattr(config, "quantization_config", None) else {}


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
    if "prompt learning" in str(error):
        return UnsupportedModel(
            f"target {target!r} is a PEFT adapter that adds virtual tokens, which speculative decoding does "
            "not support; use a LoRA-like adapter, or merge it into the model"
        )
    if "trust_remote_code" in str(error):
        return InvalidParameter(
            f"target {target!r} comes with model code of its own; run it with --trust-remote-code "
            "(trust_remote_code=True) if you trust it"
        )
    return InvalidParameter(
        f"target {target!r} cannot be loaded: {text} (name a local folder, or a hub id that can be reached)"
    )
