"""The positions, slots and masks of a block that holds pending tokens and drafted nodes.

A block has P columns of pending tokens, right-aligned, and then m columns of nodes. With L the slots a row
holds and p its pending tokens, pending token i lies in slot L + i and node j in slot L + p + j. Columns
without a token write to the trash slot and see slot 0 only, so that no mask row is ever empty.
The nodes of chains are laid out as if they were pending too: a hole behind a chain's end may then be fed like
a node, which harms nothing, as it lies behind all that anybody reads or keeps.
Everything here is made on the device, with shapes known on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec_core.contract.tree import Tree


@dataclass(frozen=True, eq=False, slots=True)
class Layout:
    """Where a block's columns stand and what they see."""

    positions: Tensor  # int64 [B, P + m]
    slots: Tensor | None  # int64 [B, P + m]; None: those that are its positions
    masks: dict[int | None, Tensor]  # sliding window or None -> bool [B, 1, P + m, view]


def lay_out_row(start: int, end: int, windows: tuple[int | None, ...], device: torch.device) -> Layout:
    """Lay out one row without padding, whose columns follow one another: slots start to end - 1."""
    columns = end - start
    positions = torch.arange(start, end, device=device).unsqueeze(0)
    seen = torch.ones((1, 1, columns, end), dtype=torch.bool, device=device)
    if columns > 1:
        seen = seen.tril_(start)
    masks = {window: seen if window is None else seen.triu(start - window + 1) for window in windows}
    return Layout(positions, None, masks)


def lay_out(
    held: Tensor,  # int64 [B]: slots held
    pending: Tensor,  # int64 [B]
    tree: Tree | None,  # of all fed + m nodes of the round
    columns: int,  # P
    fed: int,  # nodes fed before; with fed > 0 nothing is pending
    view: int,  # slots that attention sees
    windows: tuple[int | None, ...],
    trash: int,
    limit: int | None = None,  # positions that there are
) -> Layout:
    """Lay out one block; pure tensor work with static shapes."""
    offset = torch.arange(columns, device=held.device) - (columns - pending[:, None])  # [B, P]
    real = offset >= 0
    positions = held[:, None] + offset
    slots = positions
    limits = positions + 1  # columns see every slot below their limit
    base = held + pending
    if tree is not None:
        n = tree.real.shape[1]
        node = torch.arange(fed, n, device=held.device)
        real = torch.cat([real, tree.real[:, fed:]], dim=1)
        positions = torch.cat([positions, base[:, None] + tree.depths[:, fed:] - 1], dim=1)
        slots = torch.cat([slots, base[:, None] + node], dim=1)
        limits = torch.cat([limits, base[:, None].expand(-1, n - fed)], dim=1)
    positions = positions.where(real, 0)
    slots = slots.where(real, trash)
    if tree is None:  # chains may be rounded up beyond what is reserved, and beyond the last position
        slots = slots.clamp_(max=trash)
        positions = positions if limit is None else positions.clamp_(max=limit - 1)
    slot = torch.arange(view, device=held.device)
    seen = slot < limits.where(real, 1).unsqueeze(-1)  # [B, T, view]
    key_positions = slot.expand(held.shape[0], -1)
    if tree is not None:
        relative = slot - base[:, None]  # [B, view]: which node lies in this slot
        drafted = (relative >= 0) & (relative < n)
        relative = relative.clamp(0, n - 1)
        among = tree.ancestors[:, fed:].gather(2, relative[:, None, :].expand(-1, n - fed, -1))
        among &= drafted[:, None, :] & tree.real[:, fed:, None]
        seen[:, columns:] |= among
        if windows != (None,):
            at = base[:, None] + tree.depths.gather(1, relative) - 1
            key_positions = torch.where(drafted, at, key_positions)
    masks = {}
    for window in windows:
        mask = seen
        if window is not None:
            near = positions.unsqueeze(-1) - key_positions.unsqueeze(1) < window
            mask = seen & (near | ~real.unsqueeze(-1))
        masks[window] = mask.unsqueeze(1)
    return Layout(positions, slots, masks)


def fold(mask: Tensor, group: int) -> Tensor:
    """Repeat a mask [B, 1, T, S] for the query heads of a group; one row stands for all of them."""
    return mask if group == 1 or mask.shape[2] == 1 else mask.repeat(1, 1, group, 1)
