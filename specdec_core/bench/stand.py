"""What all methods run on: one target, and what decoders are built with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specdec_core.engine.decoder import SpecDecoder
from specdec_core.model.faster.optimize import Optimizations, optimized
from specdec_core.model.graphs import Capture
from specdec_core.plugins.registry import Registry


def device_of(model: Any) -> torch.device:
    """Say where a model takes its input."""
    device: torch.device = model.get_input_embeddings().weight.device
    return device


@dataclass(frozen=True)
class Stand:
    """A target as it was loaded, and the one that decoders share: with the optimizations that were asked for.

    transformers runs on the former; weights that are the same are there once.
    """

    plain: Any
    fast: Any
    tokenizer: Any
    registry: Registry
    options: dict[str, Any]  # of every decoder
    loading: dict[str, Any]  # of an assistant model
    target: str = ""  # its name, for a program that loads it itself
    revision: str | None = None

    @classmethod
    def of(
        cls,
        model: Any,
        tokenizer: Any,
        registry: Registry,
        *,
        optimize: str = "none",
        capture: Capture | None = None,
        alone: bool = False,
        target: str = "",
        **loading: Any,
    ) -> Stand:
        """Make the target faster.

        capture: how forwards run; None: as they would.
        alone: in place: nobody needs it as it was loaded.
        target: what it was loaded from.

        Raises:
            InvalidParameter: an optimization is unknown.
        """
        wanted = Optimizations.of(optimize)
        fast = optimized(model, wanted, in_place=alone).model
        options: dict[str, Any] = {
            name: loading[name] for name in ("offline", "trust_remote_code") if name in loading
        }
        ours = {**options, "optimize": wanted.known(), "capture": capture}
        return cls(model, fast, tokenizer, registry, ours, options, target, loading.get("revision"))

    def decoder(self, **options: Any) -> SpecDecoder:
        """Build a decoder for measurements: a failure is one, and every prompt is fed anew."""
        return SpecDecoder(
            self.fast,
            self.tokenizer,
            strict=True,
            reuse_prefixes=False,
            registry=self.registry,
            **self.options,
            **options,
        )
