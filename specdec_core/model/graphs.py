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
    not used for longest is forgotten when there are more than `most`.
    """

    def __init__(self, capture: Capture, most: int = 128) -> None:
        self.capture, self.most = capture, most
        self._steps: dict[Hashable, _Step] = {}
        self._pool: Any = None

    @property
    def warm_up(self) -> int:
        """How many uses of a new shape cost more than it does later."""
        return 2 if self.capture is Capture.GRAPHS else 0

    def drop(self) -> None:
        """Forget every captured graph."""
        self._steps.clear()
        self._pool = None

    def run(self, key: Hashable, inputs: Inputs, forward: Callable[[Inputs], Outputs]) -> Outputs:
        """Copy the inputs into the key's fixed tensors and run; outputs are valid until the next run."""
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
        try:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):  # warm-up: lazy initialisation may not be captured
                for _ in range(2):
                    forward(step.inputs)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            self._pool = self._pool or torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._pool):
                step.outputs = forward(step.inputs)
            step.graph = graph
        except RuntimeError as error:
            self.capture = Capture.FIXED
            self.drop()
            reason = str(error).splitlines()[0]
            logger.warning(
                "this model's forward cannot be captured in a CUDA graph and runs eagerly: %s", reason
            )
