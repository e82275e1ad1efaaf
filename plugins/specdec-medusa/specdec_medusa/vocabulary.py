"""Heads that draft from a part of the target's vocabulary, and the map that makes their ids the target's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specdec_core import UsageError

MAP_NAMES = ("token_map", "d2t")


def target_ids(found: Mapping[str, Tensor], size: int, vocab_size: int, where: str) -> Tensor | None:
    """Give the target's id of each of `size` draft ids: int64 [size]; None where they are the same.

    Two maps are known: `token_map`, the target's ids themselves, and `d2t`, what is to be added to a draft
    id. Without one, fewer draft tokens than the target has are refused: they would be taken for its first.
    More are cut off by the drafter: a padded vocabulary.

    Raises:
        UsageError: the map is missing, or is no map from draft ids into the target's vocabulary.
    """
    known = [name for name in MAP_NAMES if name in found]
    if not known:
        if size >= vocab_size:
            return None
        raise UsageError(
            f"heads={where} draft from {size} tokens, the target has {vocab_size}, and there is no map "
            f"between them ({' or '.join(MAP_NAMES)}); use the file that was made with it"
        )
    name = known[0]
    ids = found[name].long()
    if ids.shape != (size,):
        raise UsageError(
            f"heads={where}: {name} has shape {list(ids.shape)}, and the heads draft from {size} tokens"
        )
    if name == "d2t":
        ids = ids + torch.arange(size)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise UsageError(
            f"heads={where}: {name} leads to ids {low} to {high}; the target has 0 to {vocab_size - 1}"
        )
    if len(set(ids.tolist())) != size:
        raise UsageError(
            f"heads={where}: {name} gives two draft ids one target id; it is no map of a vocabulary"
        )
    return ids
