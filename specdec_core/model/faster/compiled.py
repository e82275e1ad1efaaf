"""A model's forward compiled by `torch.compile`: only where it is asked for, because it takes minutes.

Compiled is what runs at fixed shapes (see `graphs`): one graph for a single column, one for wider blocks,
with their sizes left open; on CUDA these are then captured. Inductor keeps what it makes on disk.

At every call dynamo asks whether anything has changed that it has read, thousands of attributes of modules
among it: 1.5 ms for 30 layers. Of modules it is not asked, unless adapters are there; `check` looks, between
generations, whether one was replaced. No two models may share a code object then: each has one of its own.
"""

from __future__ import annotations

import itertools
import logging
import os
import shutil
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

logger = logging.getLogger("specdec")

_NUMBERS = itertools.count()
_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
_TOLD_SECONDS = 1.0  # what compiled for longer is told


class Compiled:
    """Calls a model compiled; where that fails, goes on without and says why, once.

    Args:
        backend: of `torch.compile`; inductor is what makes it faster, others serve tests.
    """

    def __init__(self, model: nn.Module, *, backend: str = "inductor") -> None:
        self.model, self._backend = model, backend
        self._parts = list(model.modules())
        self._compiled: Any = self._traced()
        self._told = False

    def _traced(self) -> Any:
        model = self.model

        def forward(**arguments: Any) -> Any:
            return model(**arguments)

        forward.__code__ = forward.__code__.replace(co_name=f"forward_{next(_NUMBERS)}")
        skip = getattr(torch.compiler, "skip_guard_on_all_nn_modules_unsafe", None)  # newer torch
        adapters = any(hasattr(module, "base_layer") for module in self._parts)  # they can be switched
        options = None if skip is None or adapters else {"guard_filter_fn": skip}
        return torch.compile(forward, dynamic=True, backend=self._backend, options=options)

    def check(self) -> None:
        """Forget what was compiled if a module was replaced since; weights may be written at any time."""
        if self._compiled is not None and self._parts != list(self.model.modules()):
            self.forget()

    def forget(self) -> None:
        """Forget what was compiled: something was changed that is not looked at again."""
        self._parts = list(self.model.modules())
        if self._compiled is not None:
            self._compiled = self._traced()

    @property
    def works(self) -> bool:
        """Whether it is compiled, as far as is known."""
        return self._compiled is not None

    def __call__(self, **arguments: Any) -> Any:
        """Run the model's forward."""
        if self._compiled is None:
            return self.model(**arguments)
        if not self._told:
            self._told = True
            logger.warning(
                "compiling the forward of %s, which may take minutes; what is compiled is kept in %s",
                type(self.model).__name__,
                os.environ.get(_FOLDER, "inductor's own folder"),
            )
        known, start = _graphs(), time.perf_counter()
        try:
            # Numbers of modules stay what they are; left open, each graph would be traced and made twice.
            with torch._dynamo.config.patch(specialize_float=True):
                output = self._compiled(**arguments)
        except Exception as problem:  # of many kinds: of dynamo, of inductor, of the C++ compiler
            self._compiled = None
            lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
            reason = " ".join(lines[:2]) or type(problem).__name__
            logger.warning("%s cannot be compiled and runs as it is: %s", type(self.model).__name__, reason)
            return self.model(**arguments)
        took = time.perf_counter() - start
        if _graphs() > known and took > _TOLD_SECONDS:
            logger.warning("compiled %s in %.0f s", type(self.model).__name__, took)
        return output


def why_not_compiled(device: torch.device) -> str:
    """Say why nothing can be compiled here; empty if it can."""
    if device.type == "cuda":
        return "" if find_spec("triton") else "triton is not installed"
    if device.type != "cpu":
        return f"only models on the CPU or on CUDA are compiled, and this one is on {device}"
    named = os.environ.get("CXX")
    found = [name for name in ([named] if named else ["g++", "clang++", "c++", "cl"]) if shutil.which(name)]
    return "" if found else f"no C++ compiler is here ({named or 'g++, clang++'}); install one, or set CXX"


def keep_on_disk() -> None:
    """Let inductor keep what it compiles between runs, also where /tmp is emptied; a user's choice stays."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    os.environ.setdefault(_FOLDER, str(cache / "specdec" / "inductor"))


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
