"""Whether another row fits into memory: one that does not waits, or is refused with both sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from specdec_core.contract.errors import InvalidParameter
from specdec_core.contract.interfaces import Capabilities
from specdec_core.engine.target import Target
from specdec_core.rows.row import Row

_ALWAYS_FITS = 2**26  # bytes; below, memory is not asked


class Memory:
    """Counts what rows need, before anything of it is allocated.

    That is the slots of all caches for their prompts, new tokens and drafts; and in float32 the target's
    logits and p after the last pending token and every node, and q of every node where the drafter draws:
    4 bytes x rows x ((1 + n) x 2 + n) x V.

    Args:
        nodes: n, the most nodes of a row's draft.
        limit: bytes that may be used; None: what is free on the target's device.
    """

    def __init__(self, target: Target, can: Capabilities, nodes: int, limit: int | None) -> None:
        self._target, self._nodes, self._limit = target, nodes, limit
        target.most_bytes = limit
        indices = 2 * (1 + nodes) + (nodes if any(law.needs_q for law in can.laws) else 0)
        self._of_row = 4 * indices * target.vocab_size

    def fits(self, rows: Sequence[Row]) -> bool:
        """Whether these rows have room at once."""
        wanted = self._wanted(rows)
        there = self._there(wanted)
        return there is None or wanted <= there

    def refusal(self, row: Row) -> InvalidParameter:
        """Say why a row has no room, although no other is there."""
        wanted = self._wanted([row])
        return InvalidParameter(
            f"a prompt of {len(row.prompt)} tokens with max_new_tokens={row.params.max_new_tokens} and "
            f"drafts of {self._nodes} nodes over {self._target.vocab_size} tokens needs {_size(wanted)}, "
            f"and {_size(self._there(wanted) or 0)} is there on {self._target.device}; lower max_new_tokens "
            "or the draft length, or raise `memory`"
        )

    def _wanted(self, rows: Sequence[Row]) -> int:
        needs = [(len(row.prompt), row.params.max_new_tokens) for row in rows]
        return len(rows) * self._of_row + self._target.bytes_after(needs, self._nodes)

    def _there(self, wanted: int) -> int | None:
        """Bytes that may be used; None where they are enough, or nobody knows."""
        if self._limit is not None:
            return self._limit
        if wanted <= _ALWAYS_FITS:
            return None
        free = _free(self._target.device)
        return None if free is None else free + self._target.bytes_now


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


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
