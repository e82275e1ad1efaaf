"""A draft model of its own: from a hub id, a folder or memory, with its tokenizer where there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, Field, field_serializer
from torch import nn

from specdec_core import DrafterConfig, TargetInfo, UsageError
from specdec_drafters._vocabulary import check_vocabulary

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNREADABLE = (OSError, ValueError, ImportError, KeyError)


class OwnModelConfig(DrafterConfig):
    """Options of a drafter with a model of its own."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    model: str | nn.Module | None = Field(
        None,
        description="hub id or folder (in Python also a model); default: the draft that the target ships",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="dtype of a model that is loaded; auto: the target's"
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub id")
    tokenizer: Any = Field(
        None, description="the draft model's tokenizer, or its id or folder; default: found beside the model"
    )

    @field_serializer("model", "tokenizer")
    def _named(self, value: object) -> str | None:
        return value if value is None or isinstance(value, str) else type(value).__name__


def own_model(model: str | nn.Module, config: OwnModelConfig, target: TargetInfo) -> nn.Module:
    """Load a draft model, or take one that is in memory, and check that it speaks the target's vocabulary.

    Raises:
        UsageError: it cannot be loaded, lies on another device, or has another vocabulary.
    """
    loaded, label = isinstance(model, str), model if isinstance(model, str) else type(model).__name__
    if isinstance(model, str):
        model = _load(model, config, target)
    own: Any = model
    embedding: Any = own.get_input_embeddings()
    if embedding.weight.device != target.device:
        raise UsageError(
            f"model={label} is on {embedding.weight.device} and the target on {target.device}: move it there"
        )
    head: Any = own.get_output_embeddings() or embedding
    tokenizer = config.tokenizer
    if isinstance(tokenizer, str):
        tokenizer = _tokenizer(tokenizer, _where(tokenizer, config.revision, target))
    elif tokenizer is None:  # for a model in memory only what is at hand: no download behind its back
        beside = label if loaded else getattr(own.config, "_name_or_path", "")
        where = _where(beside, config.revision, target) | ({} if loaded else {"local_files_only": True})
        tokenizer = _tokenizer(beside, where)
    check_vocabulary(label, tokenizer, head.weight.shape[0], target.tokenizer, target.vocab_size)
    return model


def _load(name: str, config: OwnModelConfig, target: TargetInfo) -> nn.Module:
    from transformers import AutoModelForCausalLM  # takes seconds: a wrong name is told before

    if not Path(name).expanduser().is_dir() and name.startswith(("/", "./", "../", "~")):
        raise UsageError(f"model={name} does not exist; name a model folder or a hub id")
    options = _where(name, config.revision, target)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(options.pop("name"), dtype="auto", **options)
    except _UNREADABLE as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UsageError(
            f"model={name} cannot be loaded: {reason} (name a local folder, or a hub id that can be reached)"
        ) from error
    dtype = _DTYPES.get(config.dtype, target.dtype)
    moved: nn.Module = model.to(device=target.device, dtype=dtype)
    return moved


def _tokenizer(name: str, options: dict[str, Any]) -> Any | None:
    """Load the tokenizer that lies beside a model; None where there is none."""
    if not name:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(options.pop("name"), **options)
    except _UNREADABLE:
        return None


def _where(name: str, revision: str | None, target: TargetInfo) -> dict[str, Any]:
    """Say where to load from, and that what holds for the target holds here: offline, trust."""
    folder = Path(name).expanduser()
    options: dict[str, Any] = {"trust_remote_code": target.trust_remote_code}
    if revision is not None:
        options["revision"] = revision
    if target.offline:
        options["local_files_only"] = True
    if folder.is_dir():
        return options | {"name": str(folder), "local_files_only": True}
    return options | {"name": name}
