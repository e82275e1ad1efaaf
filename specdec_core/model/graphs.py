"""Forwards at fixed shapes and addresses: fixed input tensors, and CUDA graphs captured over them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("specdec")

Inputs = dict[str, Tensor]
Outputs = tuple[Tensor, ...]


class Capture(StrEnum):
    """How forwards run."""

    OFF = "off"
    """Eagerly, at their exact shapes."""
    FIXED = "fixed"
    """Eagerly, but at the fixed shapes and addresses that a captured graph has: for tests without a GPU."""
    GRAPHS = "graphs"
    """Captured in CUDA graphs, from the second use of a shape on."""


@dataclass(eq=False)
class _Step:
    inputs: Inputs
    uses: int = 0
    graph: Any = None
    outputs: Outputs = field(default_factory=tuple)


class FixedSteps:
    """Runs a function at fixed shapes; one set of input tensors, and in time one graph, a key.

    A graph holds the addresses of the cache, so `drop` must be called when buffers move. The key that was
    not used for longest is forgotten when there are more than `most`, or when the outputs of captured ones,
    which stay where they are, take more than `most_bytes`.
    """

    def __init__(self, capture: Capture, most: int = 128, most_bytes: int = 2 << 30) -> None:
        self.capture, self.most, self.most_bytes = capture, most, most_bytes
        self._steps: dict[Hashable, _Step] = {}
        self._pool: Any = None
        self._stream: Any = None  # of every warm-up and capture

    @property
    def warm_up(self) -> int:
        """How many uses of a new shape cost more than it does later."""
        return 2 if self.capture is Capture.GRAPHS else 0

    def drop(self) -> None:
        """Forget every captured graph."""
        self._steps.clear()
        self._pool = None

    def run(self, key: Hashable, inputs: Inputs, forward: Callable[[Inputs], Outputs]) -> Outputs:
        """Copy the inputs into the key's fixed tensors and run.

        Outputs are valid until the next run of any key: captured ones share one pool of memory.
        """
        step = self._steps.pop(key, None)
        if step is None:
            while len(self._steps) >= self.most:
                del self._steps[next(iter(self._steps))]
            step = _Step({name: tensor.clone() for name, tensor in inputs.items()})
        else:
            for name, tensor in inputs.items():
                step.inputs[name].copy_(tensor, non_blocking=True)
        self._steps[key] = step  # in order of use
        step.uses += 1
        if self.capture is Capture.GRAPHS and step.graph is None and step.uses == 2:
            self._capture(step, forward)
        if step.graph is None:
            return forward(step.inputs)
        step.graph.replay()
        return step.outputs

    def _capture(self, step: _Step, forward: Callable[[Inputs], Outputs]) -> None:
        """Capture the forward; where it cannot be, go on eagerly and say why, once."""
        current = torch.cuda.current_stream()
        # One stream for all: cuBLAS keeps a workspace, up to 32 MiB, for every stream that it ever ran on,
        # and captures that share a pool must share their stream.
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.stream(current):  # a capture that fails leaves its own stream current
                self._stream.wait_stream(current)
                with torch.cuda.stream(self._stream):  # warm-up: lazy initialisation may not be captured
                    forward(step.inputs)
                current.wait_stream(self._stream)
                graph = torch.cuda.CUDAGraph()
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                mode = "thread_local"  # other threads may allocate meanwhile
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
                    step.outputs = forward(step.inputs)
                step.graph = graph
        except RuntimeError as error:
            self.capture = Capture.FIXED
            self.drop()
            cause = _first(error)
            reason = next(iter(str(cause).splitlines()), type(cause).__name__)
            logger.warning(
                "this model's forward cannot be captured in a CUDA graph and runs eagerly: %s", reason
            )
            return
        self._forget_down_to(self.most_bytes)

    def _forget_down_to(self, most_bytes: int) -> None:
        """Forget captured keys, those not used for longest first; the last one stays."""
        captured = {key: step.outputs for key, step in self._steps.items() if step.graph is not None}
        sizes = {key: sum(x.nbytes for x in outputs) for key, outputs in captured.items()}
        total = sum(sizes.values())
        for key, size in list(sizes.items())[:-1]:
            if total <= most_bytes:
                return
            del self._steps[key]
            total -= size


def _first(error: BaseException) -> BaseException:
    """Find what went wrong first: ending a broken capture raises again, and says less."""
    while error.__context__ is not None:
        error = error.__context__
    return error
