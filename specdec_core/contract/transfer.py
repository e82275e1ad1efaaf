"""Small lists on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def on_device(values: Sequence[Any], device: torch.device | str, dtype: torch.dtype = torch.int64) -> Tensor:
    """Make a tensor of host values on a device, without waiting for what the device is doing.

    A copy from pageable memory waits for the stream, that is for the forward under way; one from pinned
    memory is queued behind it. Pinned memory comes from a cache, which reuses it when the copy has passed.
    """
    if torch.device(device).type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
