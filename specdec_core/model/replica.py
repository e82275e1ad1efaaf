"""A model's modules copied and its weights shared: ours to set up, while the model itself stays as it is.

A decoder names its attention, gathers states, packs weights and leaves dropout out in its replica alone, so
whoever holds the model may run it, train it or build more decoders over it meanwhile. What they change in it
is followed between calls: see `Replica.refresh`.
"""

from __future__ import annotations

import copy
import functools
import operator
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from specdec_core.contract.errors import UnsupportedModel

# What a forward reads of a module; other hooks are of training, loading and saving.
_DICTS = [
    *("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
]
_EMPTY: dict[Any, Any] = {}
_PLAIN = {bool, int, float, str, type(None), list, tuple, set, dict, OrderedDict, torch.dtype, torch.device}
_ORIGINAL = "_orig_mod"  # what is below a module that torch.compile made
_COMPILED = "_torchdynamo_orig_callable"  # of what torch.compile gives for a function
_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()


class Replica:
    """Copies of all modules of a model, in evaluation mode, with configs of their own.

    A module whose forward was replaced by a function that holds the module itself would run the original;
    it is shared, with all that is below it.

    Raises:
        UnsupportedModel: a shared module is in training mode.
    """

    def __init__(self, model: nn.Module) -> None:
        model = model._modules.get(_ORIGINAL) or model
        self._root = weakref.ref(model)  # whoever drops a model need not know of its decoders
        self._copies: weakref.WeakKeyDictionary[nn.Module, nn.Module] = weakref.WeakKeyDictionary()
        self._originals: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]]
        self._originals = weakref.WeakKeyDictionary()
        self._changes: dict[str, Callable[[], object]] = {}
        self.version = 0  # how often it was made anew
        self._stale = False  # it could not be
        self._make(model)
        self.model: Any = self._copy_of(model)
        self._shared_at_first = self._shared

    @property
    def whole(self) -> bool:
        """Whether no module is shared."""
        return not self._shared

    def original(self, copied: nn.Module) -> nn.Module | None:
        """Give the module that a copy was made of; None: it is none, or that one is gone."""
        found = self._originals.get(copied)
        return None if found is None else found()

    def change(self, what: str, change: Callable[[], object]) -> None:
        """Change the copies, now and whenever they are made anew; one of the same name is replaced."""
        change()
        self._changes[what] = change

    def refresh(self) -> int:
        """Follow what was changed in the model: modules, hooks, attributes, tensors that were replaced.

        What is written into a weight needs no following. Copies of modules that are still there stay the
        same objects.

        Returns:
            The version, another one if anything had changed.

        Raises:
            UnsupportedModel: a shared module is in training mode, or was none before.
        """
        model = self._root()
        if model is None:
            self._seen.clear()
        elif self._stale or not all(seen.is_unchanged() for seen in self._seen):
            self._stale = True
            self._make(model)
            self._check_kind(model)
            for change in self._changes.values():
                change()
            self._stale = False
            self.version += 1
        self._check_shared()
        return self.version

    def _make(self, model: nn.Module) -> None:
        self._shared: dict[nn.Module, None] = {}
        self._seen: list[_Seen] = []
        memo: dict[int, Any] = {}  # of configs
        originals: dict[nn.Module, None] = {}
        self._find(model, originals)
        for module in originals:
            self._seen.append(_Seen(module))  # first: another thread may be about to change it
            copied = self._copies[module]
            state = _mapped(_own_state(module), self._copy_of, memo)
            vars(copied).clear()
            vars(copied).update(state, training=False)
            self._originals[copied] = weakref.ref(module)
        held = [value for module in originals for value in list(vars(module).values())]
        self._seen += map(_Seen, {id(value): value for value in held if _is_config(value)}.values())
        self.exclusive: AbstractContextManager[object] = nullcontext()
        """What one thread at a time may do with this model, of all those that have a replica of it."""
        if any("_hf_hook" in vars(module) for module in model.modules()):
            # What accelerate's hooks keep while a model runs is shared.
            self.exclusive = lock = _locks.setdefault(model, threading.RLock())
            _locks[self._copy_of(model)] = lock
        self._check_shared()

    def _copy_of(self, module: nn.Module) -> nn.Module:
        return module if module in self._shared else self._copies.get(module, module)

    def _find(self, module: nn.Module, found: dict[nn.Module, None]) -> None:
        """Find all modules that can be copied, and have an object for each copy."""
        if module in found:
            return
        original = module._modules.get(_ORIGINAL)
        if original is not None:
            self._find(original, found)
            self._copies[module] = self._copy_of(original)
        elif _runs_the_original(module):
            self._shared[module] = None
        else:
            found[module] = None
            known = self._copies.get(module)
            if type(known) is not type(module):
                self._copies[module] = object.__new__(type(module))
            for child in list(module._modules.values()):
                if child is not None:
                    self._find(child, found)

    def _check_kind(self, model: nn.Module) -> None:
        """Insist that what was planned for a whole replica, or a part of one, is still for the same."""
        if self._copy_of(model) is not self.model or self._shared != self._shared_at_first:
            raise UnsupportedModel(
                f"a forward of {type(model).__name__} was replaced, after the decoder was built, by one that "
                "holds the module itself (or that one is gone): build a new decoder"
            )

    def _check_shared(self) -> None:
        for module in self._shared:
            if any(part.training for part in module.modules()):
                raise UnsupportedModel(
                    f"{type(module).__name__} is in training mode and its forward was replaced by one that "
                    "holds the module itself; call eval() on it first"
                )


class _Seen:
    """A module, or a config, as it was when it was copied."""

    def __init__(self, one: nn.Module | PreTrainedConfig) -> None:
        self._live, self._kept = vars(one), dict(vars(one))
        parts = [self._live[name] for name in _DICTS if name in self._live]
        self._parts = [(part, dict(part) if part else _EMPTY) for part in parts]

    def is_unchanged(self) -> bool:
        if "training" in self._live:
            self._kept["training"] = self._live["training"]  # that of the copies is their own
        return _is_same(self._live, self._kept) and all(_is_same(*part) for part in self._parts)


def _is_same(live: dict[Any, Any], kept: dict[Any, Any]) -> bool:
    if len(live) != len(kept):
        return False
    return not live or all(map(operator.is_, list(live.values()), kept.values()))


def _is_config(value: Any) -> bool:
    return isinstance(value, PreTrainedConfig)


def shallow(module: Any) -> Any:
    """Copy a module, and none of its parts: its dicts of children, tensors and hooks are new.

    A forward that would run the original gives way to that of the class.
    """
    copied = object.__new__(type(module))
    state = _own_state(module)
    if _runs_the_original(module):
        state.pop("forward")
        state.pop("_old_forward", None)
    vars(copied).update(_mapped(state, lambda one: copied if one is module else one, None))
    return copied


def _own_state(module: nn.Module) -> dict[str, Any]:
    state = dict(vars(module))
    for name in _DICTS:
        if name in state:
            state[name] = state[name].copy()
    state.pop("_compiled_call_impl", None)  # it runs the original
    return state


def _mapped(
    state: dict[str, Any], mapping: Callable[[nn.Module], nn.Module], memo: dict[int, Any] | None
) -> dict[str, Any]:
    """Let what refers to modules refer to their copies; memo: configs are copied too."""

    def of(value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if isinstance(value, nn.Module):
            return mapping(value)
        if isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
            return MethodType(value.__func__, mapping(value.__self__))
        if isinstance(value, functools.partial):  # accelerate's way of hooking
            keywords = {name: of(held) for name, held in value.keywords.items()}
            rebound = functools.partial(of(value.func), *map(of, value.args), **keywords)
            vars(rebound).update((name, of(held)) for name, held in vars(value).items())
            return rebound
        if memo is not None and _is_config(value):
            return copy.deepcopy(value, memo)
        return value

    mapped = {name: of(value) for name, value in state.items()}
    mapped["_modules"] = {name: of(child) for name, child in state["_modules"].items()}
    if hasattr(forward := mapped.get("forward"), _COMPILED):
        mapped["forward"] = of(getattr(forward, _COMPILED))
    return mapped


def _runs_the_original(module: nn.Module) -> bool:
    """Whether a forward was hung on a module that would run this very one, whatever it is called with."""
    own = vars(module)
    return any(not _can_be_bound(own[name]) for name in ("forward", "_old_forward") if name in own)


def _can_be_bound(forward: Any) -> bool:
    """Whether a forward finds its module in an argument that we can give it, and nowhere else."""
    forward = getattr(forward, _COMPILED, forward)
    if isinstance(forward, functools.partial):
        return isinstance(forward.func, FunctionType) and not _holds_modules(forward.func)
    return isinstance(forward, MethodType) and not _holds_modules(forward.__func__)


def _holds_modules(function: Any) -> bool:
    """Whether a function, or one that it calls, has modules or what is bound to one among what it reads."""
    if not isinstance(function, FunctionType):
        return not isinstance(function, type)  # it may hold anything
    functions = [function]  # those it closes over are found on the way
    for one in functions:
        for value in _read_by(one):
            if isinstance(value.__self__ if isinstance(value, MethodType) else value, nn.Module):
                return True
            if isinstance(value, FunctionType) and value not in functions:
                functions.append(value)
    return False


def _read_by(function: FunctionType) -> Iterator[Any]:
    """Give what a function closes over, and what is no function of the global names that it reads."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # not filled yet
            yield cell.cell_contents
    found = (function.__globals__.get(name) for name in function.__code__.co_names)
    yield from (value for value in found if not isinstance(value, FunctionType))
