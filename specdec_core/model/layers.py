"""Parts of an unmodified model: its first layers as a model of their own, and its head."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_core.errors import UnsupportedModel


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """Make a model of the first `count` layers that shares every weight, with the same head.

    Only the modules on the way to the list of layers are copied, and those shallowly.

    Raises:
        UnsupportedModel: the list of layers is not found.
    """
    path = _path_to_layers(model)
    short: PreTrainedModel = _shallow(model)
    config = _short_config(model.config, count)
    parent: Any = short
    for name in path[:-1]:
        parent._modules[name] = _shallow(parent._modules[name])
        parent = parent._modules[name]
    parent._modules[path[-1]] = nn.ModuleList(list(parent._modules[path[-1]])[:count])
    for end in range(len(path)):
        module: Any = short
        for name in path[:end]:
            module = module._modules[name]
        if hasattr(module, "config"):
            module.config = config
    return short


def apply_head(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Apply final norm, head, scale and soft cap, as the model itself does: [..., H] -> [..., V].

    A one-layer copy runs over dummy ids; what its layer returns is replaced by `hidden`.
    """
    flat = hidden.reshape(1, -1, hidden.shape[-1])
    short = first_layers(model, 1)
    module: Any = short
    for name in _path_to_layers(short):
        module = module._modules[name]

    def replace(_: nn.Module, __: Any, output: Any) -> Any:
        return (flat, *output[1:]) if isinstance(output, tuple) else flat

    handle = module[0].register_forward_hook(replace)
    try:
        ids = torch.zeros(flat.shape[:2], dtype=torch.int64, device=hidden.device)
        with torch.no_grad():
            logits: Tensor = short(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    return logits.reshape(*hidden.shape[:-1], -1)


def _path_to_layers(model: PreTrainedModel) -> list[str]:
    wanted = model.config.get_text_config(decoder=True).num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted:
            return str(name).split(".")
    raise UnsupportedModel(
        f"{type(model).__name__} has no list of {wanted} layers that could be cut; use a "
        "drafter that does not exit early"
    )


def _shallow(module: Any) -> Any:
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied


def _short_config(config: Any, count: int) -> Any:
    short = copy.deepcopy(config)
    text = short.get_text_config(decoder=True)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:count]
    text.num_hidden_layers = count
    return short
