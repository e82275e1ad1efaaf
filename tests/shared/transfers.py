"""Transfers from the device to the host, counted as they happen, on a CPU too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_METHODS = [
    *("tolist", "item", "cpu", "numpy", "nonzero", "is_nonzero", "equal", "unique", "masked_select"),
    *("__bool__", "__int__", "__float__", "__index__", "__len_hint__", "__array__", "__repr__"),
]
_OPERATORS = {
    "_local_scalar_dense",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
}


class Transfers(TorchDispatchMode):
    """Counts what would make the host wait for a device; one in another counts once."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in _OPERATORS or (name == "index" and _by_mask(args[1])):
            self._count(name)
        return func(*args, **(kwargs or {}))

    def patched(self, name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)

        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._count(name)
            outer, self._inside = self._inside, True
            try:
                return method(tensor, *args, **kwargs)
            finally:
                self._inside = outer

        return counted

    def _count(self, name: str) -> None:
        if not self._inside:
            self.names.append(name)


def _by_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in indices)


@contextmanager
def counting() -> Iterator[list[str]]:
    """Give the names of transfers as they happen."""
    transfers = Transfers()
    with pytest.MonkeyPatch.context() as patch, transfers:
        for name in _METHODS:
            if hasattr(Tensor, name):
                patch.setattr(Tensor, name, transfers.patched(name))
        yield transfers.names
