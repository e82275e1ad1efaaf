"""Whether a batch's distributions fit into memory: a batch that would not is refused, with its size."""

from __future__ import annotations

from pathlib import Path

import torch

from specdec_core.contract.errors import InvalidParameter
from specdec_core.contract.interfaces import Capabilities

_ALWAYS_FITS = 2**26  # bytes; below, memory is not asked


def check_room(rows: int, nodes: int, vocab_size: int, can: Capabilities, device: torch.device) -> None:
    """Refuse a batch before anything of it is allocated.

    Counted are, in float32, the target's logits and p after the last pending token and every node, and q of
    every node where the drafter draws: 4 bytes x rows x ((1 + n) x 2 + n) x V.

    Raises:
        InvalidParameter: they are larger than the memory that is free.
    """
    indices = 2 * (1 + nodes) + (nodes if any(law.needs_q for law in can.laws) else 0)
    wanted = 4 * rows * indices * vocab_size
    if wanted <= _ALWAYS_FITS:
        return
    free = _free(device)
    if free is not None and wanted > free:
        raise InvalidParameter(
            f"max_batch={rows} with drafts of {nodes} nodes over {vocab_size} tokens needs "
            f"{wanted / 1e9:.1f} GB for its distributions, and {free / 1e9:.1f} GB is free on {device}; "
            "lower max_batch or the draft length"
        )


def _free(device: torch.device) -> int | None:
    """Bytes that can be allocated; None where nobody knows."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + idle
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(facts["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in facts else None
