"""What in a drafter's own calls would make the host wait for a device: counted, so that none is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

_METHODS = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__", "__float__")
_OPERATORS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2"}


class _Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if mask or name in _OPERATORS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def waits(drafter: Any) -> Iterator[list[str]]:
    """Give the names of what `propose` and `observe` of a drafter wait for, as it happens.

    Patches the drafter and `torch.Tensor` while it is open. One wait may be named twice, by its method and
    by its operator.
    """
    counter = _Waits()
    with pytest.MonkeyPatch.context() as patch:
        for name in _METHODS:
            patch.setattr(torch.Tensor, name, _counted(getattr(torch.Tensor, name), name, counter))
        for call in ("propose", "observe"):
            patch.setattr(drafter, call, _watched(getattr(drafter, call), counter))
        yield counter.names


def _counted(method: Any, name: str, counter: _Waits) -> Any:
    def counted(tensor: Any, *args: Any, **options: Any) -> Any:
        if _get_current_dispatch_mode() is counter:
            counter.names.append(name)
        return method(tensor, *args, **options)

    return counted


def _watched(inner: Any, counter: _Waits) -> Any:
    def watched(*args: Any) -> Any:
        with counter:
            return inner(*args)

    return watched
