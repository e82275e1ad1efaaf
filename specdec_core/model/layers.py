"""Parts of an unmodified model: its first layers as a model of their own, and its head."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_core.contract.errors import UnsupportedModel


def first_layers(model: PreTrainedModel, count: int) -> PreTrainedModel:
    """Make a model of the first `count` layers that shares every weight, with the same head.

    Only the modules on the way to the list of layers are copied, and those shallowly.

    Raises:
        UnsupportedModel: the list of layers is not found.
    """
    path = _path_to_blocks(model)
    short: PreTrainedModel = shallow(model)
    parent: Any = short
    on_the_way = [short]
    for name in path[:-1]:
        parent._modules[name] = shallow(parent._modules[name])
        parent = parent._modules[name]
        on_the_way.append(parent)
    parent._modules[path[-1]] = nn.ModuleList(list(parent._modules[path[-1]])[:count])
    config = _short_config(model.config, count)
    for module in on_the_way:
        if hasattr(module, "config"):  # of the whole, or of its text part
            whole = module.config is model.config
            module.config = config if whole else config.get_text_config(decoder=True)
    return short


def head_of(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Find final norm, head, scale and soft cap, as the model itself applies them: [..., H] -> [..., V].

    A one-layer copy, made once, runs over dummy ids, one a row; what its layer returns is replaced by the
    states.
    """
    short = first_layers(model, 1)
    block = blocks_of(short)[0]

    @torch.no_grad()
    def head(hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, 1, hidden.shape[-1])
        ids = torch.zeros(flat.shape[:2], dtype=torch.int64, device=hidden.device)
        with _replaced_output(block, flat):
            logits: Tensor = short(input_ids=ids, use_cache=False).logits
        return logits.reshape(*hidden.shape[:-1], -1)

    return head


def final_norm(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Find what the model does between its last layer and its head: [..., H] -> [..., H].

    As a rule that is one module, the final norm. Where it is more, a one-layer copy runs with what its
    layer returns replaced, as in `head_of`.
    """
    short = first_layers(model, 1)
    decoder, block = short.get_decoder(), blocks_of(short)[0]
    embedding: Any = model.get_input_embeddings()
    device, width = embedding.weight.device, model.config.get_text_config(decoder=True).hidden_size

    @torch.no_grad()
    def whole(hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, 1, hidden.shape[-1])
        ids = torch.zeros(flat.shape[:2], dtype=torch.int64, device=device)
        with _replaced_output(block, flat):
            states: Tensor = decoder(input_ids=ids, use_cache=False)[0]
        return states.reshape(*hidden.shape[:-1], -1)

    probe = torch.linspace(-1, 2, width, device=device, dtype=model.dtype)
    wanted = whole(probe)
    for module in decoder.children():
        with torch.no_grad(), suppress(Exception):  # most of them take no such states
            if torch.equal(module(probe[None])[0], wanted):
                norm: Callable[[Tensor], Tensor] = torch.no_grad()(module)
                return norm
    return whole


@contextmanager
def _replaced_output(block: nn.Module, states: Tensor) -> Iterator[None]:
    def replace(_: nn.Module, __: Any, output: Any) -> Any:
        return (states, *output[1:]) if isinstance(output, tuple) else states

    handle = block.register_forward_hook(replace)
    try:
        yield
    finally:
        handle.remove()


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


def shallow(module: Any) -> Any:
    """Copy a module, and none of its parts: its dict of children alone is new."""
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
