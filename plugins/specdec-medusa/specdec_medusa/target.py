"""The target of the commands, and what heads must know of it."""

from __future__ import annotations

import torch

from specdec_core import SpecDecoder, TargetInfo


def open_target(target: str, drafter: str, max_batch: int, device: str, dtype: str) -> SpecDecoder:
    """Load a target; dtype auto: float32 on a CPU, else its own."""
    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    return SpecDecoder.from_pretrained(
        target,
        drafter=drafter,
        max_batch=max_batch,
        device=device,
        dtype="float32" if dtype == "auto" and on_cpu else dtype,
        optimize="none",  # heads that share the target's head learn through it
    )


def state_width(target: TargetInfo) -> int:
    """Give the width of the states that the target's head reads; some models project them."""
    probe = torch.zeros(1, target.config.hidden_size, dtype=target.dtype, device=target.device)
    return target.final_norm(probe).shape[-1]
