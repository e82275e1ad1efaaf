"""Parts of an unmodified model: its first layers as a model of their own, and its head."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from specdec_core.contract.errors import UnsupportedModel
from specdec_core.model.replica import shallow


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

    A one-layer copy, made once, runs over dummy ids, one a row; its layer is a stub that gives the states.
    """
    short, giving = _without_layers(model)

    @torch.no_grad()
    def head(hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, 1, hidden.shape[-1])
        ids = torch.zeros(flat.shape[:2], dtype=torch.int64, device=hidden.device)
        with giving(flat):
            logits: Tensor = short(input_ids=ids, use_cache=False).logits
        return logits.reshape(*hidden.shape[:-1], -1)

    return head


def final_norm(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Find what the model does between its last layer and its head: [..., H] -> [..., H].

    As a rule that is one module, the final norm. Where it is more, a one-layer copy runs with a stub for a
    layer, as in `head_of`.
    """
    short, giving = _without_layers(model)
    decoder = short.get_decoder()
    embedding: Any = model.get_input_embeddings()
    device, width = embedding.weight.device, model.config.get_text_config(decoder=True).hidden_size

    @torch.no_grad()
    def whole(hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, 1, hidden.shape[-1])
        ids = torch.zeros(flat.shape[:2], dtype=torch.int64, device=device)
        with giving(flat):
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


@torch.no_grad()
def _without_layers(
    model: PreTrainedModel,
) -> tuple[PreTrainedModel, Callable[[Tensor], AbstractContextManager[None]]]:
    """Make a model of one layer, a stub, which gives the states that are set for it.

    The stub has all that a real layer has, and returns what it was seen to return: a tensor, or a tuple.
    """
    short = first_layers(model, 1)
    blocks = _list_of_blocks(short)
    stub: Any = shallow(blocks[0])
    blocks[0] = stub  # that list is the copy's own
    seen: list[Any] = []
    handle = stub.register_forward_hook(lambda _, __, output: seen.append(output))
    embedding: Any = model.get_input_embeddings()
    short(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=embedding.weight.device), use_cache=False)
    handle.remove()
    behind = seen[0][1:] if isinstance(seen[0], tuple) else None
    given = threading.local()

    def forward(*_: Any, **__: Any) -> Any:
        return given.states if behind is None else (given.states, *behind)

    stub.forward = forward
    for hooks in (stub._forward_hooks, stub._forward_pre_hooks):  # they would change the states again
        hooks.clear()

    @contextmanager
    def giving(states: Tensor) -> Iterator[None]:
        given.states = states
        try:
            yield
        finally:
            del given.states

    return short, giving


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """Find the list of layers.

    Raises:
        UnsupportedModel: there is none.
    """
    return list(_list_of_blocks(model))


def _list_of_blocks(model: PreTrainedModel) -> nn.ModuleList:
    module: Any = model
    for name in _path_to_blocks(model):
        module = module._modules[name]
    found: nn.ModuleList = module
    return found


class BlockStates:
    """Gathers what comes out of these layers, 1 the first, in forwards that ask; 0: what goes into the first.

    These are HF's `hidden_states`, but for the last: HF gives that one with the final norm applied. The hooks
    are for a replica's blocks, and installed once; nobody else runs them.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._found: dict[int, Tensor] | None = None  # of the forward that asks
        self._handles: list[RemovableHandle] = []

    def install(self, blocks: Sequence[nn.Module]) -> None:
        """Hook the blocks; hooks of earlier ones are removed."""
        self.remove()
        for layer in self.layers:
            if layer == 0:
                handle = blocks[0].register_forward_pre_hook(self._before, with_kwargs=True)
            else:
                handle = blocks[layer - 1].register_forward_hook(functools.partial(self._after, layer))
            self._handles.append(handle)

    def remove(self) -> None:
        """Leave the blocks as they were."""
        while self._handles:
            self._handles.pop().remove()

    @contextmanager
    def gathered(self) -> Iterator[dict[int, Tensor]]:
        """Gather in the forward within: layer -> [B, T, H]."""
        self._found = {}
        try:
            yield self._found
        finally:
            self._found = None

    def _after(self, layer: int, _: nn.Module, __: Any, output: Any) -> None:
        if self._found is not None:
            self._found[layer] = output[0] if isinstance(output, tuple) else output

    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._found is not None:
            self._found[0] = args[0] if args else kwargs["hidden_states"]


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


def _short_config(config: Any, count: int) -> Any:
    short = copy.deepcopy(config)
    text = short.get_text_config(decoder=True)
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:count]
    text.num_hidden_layers = count
    return short
