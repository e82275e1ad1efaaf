"""What makes a model's forwards faster and is not asked of the model: packed weights, fused projections."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from specdec_core.contract.errors import InvalidParameter, UnsupportedModel
from specdec_core.model.attention import unwrap
from specdec_core.model.faster.fused import GROUPS, fused, groups_of
from specdec_core.model.faster.packed import Projection, packed, why_not_packed
from specdec_core.model.replica import Replica

logger = logging.getLogger("specdec")

_WRAPPERS = ("base_layer", "modules_to_save")  # of PEFT, which reads the weights below in its own ways
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_BYTES_A_SECOND = 0.5e9  # packed by one thread, at the least
_TOLD_SECONDS = 3.0  # who waits longer is told


class Optimization(StrEnum):
    """One way to make forwards faster."""

    PACK = "pack"
    """On the CPU, weights in the order in which oneDNN reads them."""
    FUSE = "fuse"
    """Projections of one input (q, k and v; gate and up) multiplied at once."""
    COMPILE = "compile"
    """Forwards at fixed shapes compiled by torch.compile; named alone, with what auto chooses beside it."""


@dataclass(frozen=True)
class Optimizations:
    """What was asked for: auto, none, or a list."""

    chosen: frozenset[Optimization] = frozenset()
    auto: bool = False
    told: bool = False  # what cannot be done was told before

    @classmethod
    def of(cls, text: str | Optimizations) -> Optimizations:
        """Read "auto", "none", or names with commas between them.

        Raises:
            InvalidParameter: a name is unknown.
        """
        if isinstance(text, Optimizations):
            return text
        if text == "auto":
            return cls(auto=True)
        known = [one.value for one in Optimization]
        names = [] if text == "none" else [name.strip() for name in text.split(",")]
        for name in names:
            if name not in known:
                raise InvalidParameter(
                    f"optimize={text!r}: {name!r} is unknown; use auto, none, or any of {','.join(known)}"
                )
        return cls(frozenset(map(Optimization, names)))

    def known(self) -> Optimizations:
        """The same, once what cannot be done was told."""
        return replace(self, told=True)

    @property
    def left_to_us(self) -> bool:
        """Whether it is left to us how linear layers run."""
        return self.auto or self.chosen == {Optimization.COMPILE}

    def on(self, device: torch.device) -> frozenset[Optimization]:
        """Choose where it is left to us: packing and fusing on x86 CPUs, where it was measured."""
        measured = device.type == "cpu" and torch.backends.cpu.get_cpu_capability().startswith("AVX")
        if self.left_to_us and measured:
            return self.chosen | {Optimization.PACK, Optimization.FUSE}
        return self.chosen


NOTHING = Optimizations()


@dataclass(eq=False)
class Optimized:
    """A model to run, and the layers whose weights it holds copies of."""

    model: nn.Module
    copied: list[_Copied] = field(default_factory=list)
    replica: Replica | None = None  # whose modules these are, where they are not the model's own

    def check(self) -> None:
        """Insist that the copies are still true.

        Raises:
            UnsupportedModel: a weight was written or a layer replaced since.
        """
        for layer in self.copied:
            if not layer.is_unchanged():
                raise UnsupportedModel(
                    f"the model's weights ({layer.name}) were changed after this decoder had made copies of "
                    "them; build a new decoder, or use optimize='none'"
                )


class _Copied:
    """A layer of a model that somebody else holds, as it was when its weights were copied."""

    def __init__(self, parent: nn.Module, name: str) -> None:
        linear: Any = parent._modules[name]
        self.name = name
        self._parent, self._linear = weakref.ref(parent), weakref.ref(linear)
        self._states = _states(linear)

    def is_unchanged(self) -> bool:
        parent, linear = self._parent(), self._linear()
        if parent is None:  # nobody holds the model any more
            return True
        return parent._modules.get(self.name) is linear and self._states == _states(linear)


def _states(linear: Any) -> list[tuple[int, int]]:
    tensors = [x for x in (linear.weight, linear.bias) if x is not None]
    return [(id(x), 0 if x.is_inference() else x._version) for x in tensors]


@torch.no_grad()
def optimized(model: nn.Module, wanted: Optimizations, *, in_place: bool = False) -> Optimized:
    """Make a model's forwards faster, as far as it can be.

    What was asked for by name and cannot be is told in one line; `auto` leaves it without a word.

    Args:
        in_place: change the model itself, so that each weight is there only once: for one that nobody else
            holds. Else a replica of it is, and the weights of the layers in question are copied.
    """
    base: Any = unwrap(model)
    embedding = base.get_input_embeddings()
    parts = wanted.on(embedding.weight.device)
    if not parts - {Optimization.COMPILE} or any(isinstance(module, Projection) for module in base.modules()):
        return Optimized(model)
    units, reason = _units(base, parts)
    if not wanted.left_to_us and not wanted.told:
        _tell_what_is_left(units, parts, reason)
    if not units or (wanted.left_to_us and not any(unit.pack for unit in units)):  # fusing alone gains little
        return Optimized(model)
    _tell_the_wait(units)
    if in_place:
        for unit in units:
            unit.replace()
        return Optimized(model)
    return _optimized_replica(base, parts)


def _optimized_replica(model: Any, parts: Set[Optimization]) -> Optimized:
    replica = Replica(model)
    units, _ = _units(replica.model, parts)
    sources, places = [], []
    for unit in units:
        # Parts of a module that runs the original are the model's own.
        found = [replica.original(parent) for parent, _ in unit.places]
        parents = [parent for parent in found if parent is not None]
        if len(parents) == len(found):
            sources += [_Copied(parent, name) for parent, (_, name) in zip(parents, unit.places, strict=True)]
            places += unit.replace()

    def put() -> None:
        for parent, name, made in places:
            parent._modules[name] = made

    replica.change("optimize", put)
    return Optimized(replica.model, sources, replica)


@dataclass(eq=False)
class _Unit:
    """Linear layers that are replaced together."""

    places: list[tuple[nn.Module, str]]  # parent and name
    pack: bool
    keep: bool  # the weight has another owner within the model

    @property
    def linears(self) -> list[nn.Linear]:
        return [parent._modules[name] for parent, name in self.places]  # type: ignore[misc]

    def replace(self) -> list[tuple[nn.Module, str, nn.Module]]:
        """Put others in their place; give parents, names, and what stands there now."""
        made: list[Any]
        if len(self.places) > 1:
            made = list(fused(self.linears, pack=self.pack))
        else:
            made = [packed(self.linears[0], keep=self.keep)]
        for (parent, name), module in zip(self.places, made, strict=True):
            parent._modules[name] = module
        return [(*place, module) for place, module in zip(self.places, made, strict=True)]


def _units(model: Any, parts: Set[Optimization]) -> tuple[list[_Unit], str]:
    """Find what is to be replaced, and a reason why something is not packed."""
    owners = Counter(id(w) for module in model.modules() for w in module._parameters.values())
    homes = Counter(id(child) for module in model.modules() for child in module._modules.values())

    def is_plain(module: nn.Module) -> bool:
        return _is_plain(module) and homes[id(module)] == 1

    def packs(linear: nn.Linear) -> bool:
        why = "" if Optimization.PACK in parts else "it was not asked for"
        why = why or why_not_packed(linear.weight.device.type, linear.weight.dtype)
        reasons.append(why)
        return not why

    units: list[_Unit] = []
    reasons: list[str] = []
    for parent, names in _parents(model):
        grouped: set[str] = set()
        for group in groups_of(parent, names, is_plain) if Optimization.FUSE in parts else ():
            linears: list[Any] = [parent._modules[name] for name in group]
            if all(owners[id(linear.weight)] == 1 for linear in linears):
                units.append(_Unit([(parent, name) for name in group], packs(linears[0]), keep=False))
                grouped.update(group)
        for name in names:
            child: Any = parent._modules[name]
            if name not in grouped and child is not None and is_plain(child) and packs(child):
                units.append(_Unit([(parent, name)], True, owners[id(child.weight)] > 1))
    return units, next(filter(None, reasons), "it has no plain linear layers")


def _parents(model: Any) -> Iterator[tuple[nn.Module, list[str]]]:
    """Give modules and those of their children that may be replaced: of the decoder, and the head."""
    below = list(_below(model.get_decoder()))
    for module in below:
        yield module, list(module._modules)
    known, head = set(map(id, below)), model.get_output_embeddings()
    for module in model.modules():
        if id(module) not in known and head is not None:
            yield module, [name for name, child in module._modules.items() if child is head]


def _below(module: nn.Module) -> Iterator[nn.Module]:
    if not any(hasattr(module, name) for name in _WRAPPERS):
        yield module
        for child in module.children():
            yield from _below(child)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is nothing but a linear layer with a weight that lies in memory as it says."""
    if type(module) is not nn.Linear or "forward" in vars(module) or hasattr(module, "_hf_hook"):
        return False
    if any(getattr(module, hooks) for hooks in _HOOKS):
        return False
    pair: tuple[Tensor | None, ...] = (module.weight, module.bias)
    tensors = [x for x in pair if x is not None]
    return all(type(x.data) is Tensor and x.layout is torch.strided and not x.is_meta for x in tensors)


def _tell_what_is_left(units: list[_Unit], parts: Set[Optimization], reason: str) -> None:
    if Optimization.PACK in parts and not any(unit.pack for unit in units):
        logger.warning("optimize=pack has no effect on this model: %s", reason)
    if Optimization.FUSE in parts and not any(len(unit.places) > 1 for unit in units):
        names = " or ".join(", ".join(group) for group in GROUPS)
        logger.warning(
            "optimize=fuse has no effect on this model: it has no siblings %s that are plain linear layers",
            names,
        )


def _tell_the_wait(units: list[_Unit]) -> None:
    weights = [linear.weight for unit in units if unit.pack for linear in unit.linears]
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    if size > _TOLD_SECONDS * _BYTES_A_SECOND:
        logger.warning(
            "packing %.1f GB of weights, at most about %.0f s (optimize=none, --optimize none leaves them)",
            size / 1e9,
            size / _BYTES_A_SECOND,
        )
