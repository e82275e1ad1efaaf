"""Parts of an unmodified model: its first layers as a model of their own, and its head."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
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
    path = _path_to_blocks(model)
    short: PreTrainedModel = _shallow(model)
    parent: Any = short
    on_the_way = [short]
    for name in path[:-1]:
        parent._modules[name] = _shallow(parent._modules[name])
        parent = parent._modules[name]
        on_the_way.append(parent)
    parent._modules[path[-1]] = nn.ModuleList(list(parent._modules[path[-1]])[:count])
    config = _short_config(model.config, count)
    for module in on_the_way:
        if hasattr(module, "config"):  # of the whole, or of its text part
            whole = module.config is model.config
            module.config = config if whole else config.get_text_config(decoder=True)
    return short


def apply_head(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Apply final norm, head, scale and soft cap, as the model itself does: [..., H] -> [..., V].

    A one-layer copy runs over dummy ids, one a row; what its layer returns is replaced by `hidden`.
    """
    flat = hidden.reshape(-1, 1, hidden.shape[-1])
    short = first_layers(model, 1)

    def replace(_: nn.Module, __: Any, output: Any) -> Any:
        return (flat, *output[1:]) if isinstance(output, tuple) else flat

    handle = blocks_of(short)[0].register_forward_hook(replace)
    try:
        ids = torch.zeros(flat.shape[:2], dtype=torch.int64, device=hidden.device)
        with torch.no_grad():
            logits: Tensor = short(input_ids=ids, use_cache=False).logits
    finally:
        handle.remove()
    return logits.reshape(*hidden.shape[:-1], -1)


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """Find the list of layers.

    Raises:
        UnsupportedModel: there is none.
    """
    module: Any = model
    for name in _path_to_blocks(model):
        module = module._modules[name]
    return list(module)


@contextmanager
def block_states(blocks: Sequence[nn.Module], layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Gather what comes out of these layers, 1 the first, in forwards within; 0: what goes into the first.

    These are HF's `hidden_states`, but for the last: HF gives that one with the final norm applied.
    """
    states: dict[int, Tensor] = {}

    def after(layer: int) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            states[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states[0] = args[0] if args else kwargs["hidden_states"]

    handles = []
    for layer in layers:
        if layer == 0:
            handles.append(blocks[0].register_forward_pre_hook(before, with_kwargs=True))
        else:
            handles.append(blocks[layer - 1].register_forward_hook(after(layer)))
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()


def _path_to_blocks(model: PreTrainedModel) -> list[str]:
    wanted = model.config.get_text_config(decoder=True).num_hidden_layers
    of_decoder = {id(module) for module in model.get_decoder().modules()}  # and not of a vision tower
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == wanted and id(module) in of_decoder:
            return str(name).split(".")
    raise UnsupportedModel(
        f"{type(model).__name__} has no list of {wanted} layers that could be cut; use a "
        "drafter that does not exit early"
    )


def _shallow(module: Any) -> Any:
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    forward = copied.__dict__.pop("forward", None)  # it would run the original
    if isinstance(forward, functools.partial) and forward.args == (module,):  # accelerate's way of hooking
        copied._old_forward = MethodType(type(module).forward, copied)
        copied.forward = functools.partial(forward.func, copied)
    return copied


def _short_config(config: Any, count: int) -> Any:
    short = copy.deepcopy(config)
    text = short.get_text_config(decoder=True)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:count]
    text.num_hidden_layers = count
    return short
