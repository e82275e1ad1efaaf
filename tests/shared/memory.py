"""What is alive in this process."""

from __future__ import annotations

import gc

import torch


def live_tensors() -> tuple[int, int]:
    """Count the live tensors, and the bytes of their storages.

    The fakes that tracing leaves in its caches are left out: their sizes may be symbols, and a sum with one
    is no number. They are there wherever a test of compiled forwards ran before in this process.
    """
    gc.collect()
    storages, found = {}, 0
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter) and not thing.is_meta:
            found += 1
            if thing.layout is not torch.strided:  # packed weights have no storage that could be looked at
                continue
            storage = thing.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return found, sum(storages.values())
