"""The target's states over whole sequences, and the tokens that heads should guess from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_core import SpecDecoder
from specdec_medusa.data import Sample

IGNORED = -100
_TOKENS = 4096  # most of one forward


@dataclass(frozen=True, eq=False)
class States:
    """Positions of many sequences, one after another, on the CPU.

    A position is that of the last token a round has fed: head k is to guess the token k + 2 places on.
    """

    hidden: Tensor  # [P, H] as the target's head reads them, in its dtype
    labels: Tensor  # int64 [P, K]; IGNORED behind the end of a sequence
    lengths: tuple[int, ...]  # positions of each sequence; they sum to P

    def __len__(self) -> int:
        return self.hidden.shape[0]


@torch.no_grad()
def collect(
    decoder: SpecDecoder,
    samples: Sequence[Sample],
    heads: int,
    progress: Callable[[int], object] = lambda done: None,
) -> States:
    """Run the target over sequences, those of like length together."""
    model: Any = decoder.target.model
    device, base = decoder.target.device, model.get_decoder()
    hidden: list[Tensor] = [torch.empty(0)] * len(samples)
    for batch in _batches(samples):
        width = max(len(samples[i].ids) for i in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        for row, i in enumerate(batch):
            ids[row, : len(samples[i].ids)] = torch.tensor(samples[i].ids)
        # what lies to the right of a position is not seen from it, so padding needs no mask
        out = base(input_ids=ids.to(device), use_cache=False)[0].cpu()
        for row, i in enumerate(batch):
            hidden[i] = out[row, samples[i].start - 1 : len(samples[i].ids) - 2].clone()
        progress(len(batch))
    labels = [_labels(sample, heads) for sample in samples]
    return States(torch.cat(hidden), torch.cat(labels), tuple(map(len, labels)))


def _batches(samples: Sequence[Sample]) -> list[list[int]]:
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].ids))
    batches: list[list[int]] = []
    for i in order:
        if not batches or (len(batches[-1]) + 1) * len(samples[i].ids) > _TOKENS:
            batches.append([])
        batches[-1].append(i)
    return batches


def _labels(sample: Sample, heads: int) -> Tensor:
    """Line up what each head should guess: int64 [positions, K]."""
    ids = torch.tensor(sample.ids[sample.start + 1 :])
    padded = torch.cat([ids, torch.full((heads,), IGNORED)])
    return padded.unfold(0, heads, 1)[: len(ids)]
