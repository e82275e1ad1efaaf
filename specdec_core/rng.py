"""Stateless, counter-based randomness, keyed by row.

A draw hashes the row's seed and two 64-bit words of disjoint fields through the finalizer of SplitMix64
(Steele, Lea and Flood 2014, a bijection of 64-bit words): `mix(mix(mix(seed) ^ word1) ^ word2)`. For one
seed two draws share a value only where both words agree. No global generator is read or moved.

word1: committed length (bits 0-47), purpose (48-55). word2: node + 1 (0-23), draw (24-31), owner (32-62).
The target's noise of a position has a word1 of its own (absolute position, purpose TARGET) and counts
tokens from there, as SplitMix64 does.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15
_M1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_M2 = -7723592293110705685  # 0x94D049BB133111EB


class Purpose(IntEnum):
    """What a draw is for; draws of two purposes never share a key."""

    TARGET = 1
    VERIFY = 2
    DRAFT = 3


class KeyedRng:
    """`RowRng` of the rows of one round.

    Args:
        seeds: int64 value of each row's seed, on the host.
        lengths: committed length of each row at the start of the round.
    """

    def __init__(
        self,
        seeds: Sequence[int],
        lengths: Sequence[int],
        purpose: Purpose,
        owner: str,
        device: torch.device,
    ) -> None:
        self._seeds, self._lengths = seeds, lengths
        self._purpose, self._owner = purpose, owner
        # Noise is made in float64: on the CPU for a device without it.
        self._device = torch.device("cpu") if device.type == "mps" else device
        self._made: tuple[Tensor, Tensor] | None = None

    def child(self, name: str) -> KeyedRng:
        return KeyedRng(self._seeds, self._lengths, self._purpose, f"{self._owner}/{name}", self._device)

    def for_rows(self, index: Sequence[int]) -> KeyedRng:
        """Select rows by their index."""
        seeds = [self._seeds[i] for i in index]
        return KeyedRng(seeds, [self._lengths[i] for i in index], self._purpose, self._owner, self._device)

    def bernoulli(self, p: Tensor, node: Tensor | int, draw: int) -> Tensor:
        return (self._uniform(node, draw) < p.to(self._device)).to(p.device)

    def categorical(self, weights: Tensor, node: Tensor | int, draw: int) -> Tensor:
        cumulative = weights.to(self._device).double().cumsum(dim=-1)
        total = cumulative[:, -1:]
        point = self._uniform(node, draw)[:, None] * total
        # `right`: the first index whose cumulative weight exceeds the point, so never one of weight 0.
        index = torch.searchsorted(cumulative, point, right=True).squeeze(-1)
        last = (cumulative < total).sum(dim=-1)  # the last index with weight, should rounding reach the end
        return torch.minimum(index, last).to(weights.device)

    def target_draw(self, logits: Tensor, depth: Tensor | int) -> Tensor:
        seeds, lengths = self._state()
        depth = torch.full_like(lengths, depth) if isinstance(depth, int) else depth.to(self._device)
        columns = depth.dim() == 2
        position = (lengths[:, None] if columns else lengths) + depth
        row_seeds = seeds[:, None] if columns else seeds
        key = _mix(row_seeds ^ _word1(position, Purpose.TARGET))
        token = torch.arange(1, logits.shape[-1] + 1, dtype=torch.int64, device=self._device)
        bits = _mix(key.unsqueeze(-1) + token * _GAMMA)
        # 53 bits strictly inside (0, 1): rounding to 1 would give infinite noise, and few bits would cut
        # off unlikely tokens.
        u = ((bits >> 11) & (2**53 - 1)).clamp_(min=1).double().mul_(2.0**-53)
        noise = u.log_().neg_().log_().neg_()
        return (logits.to(device=self._device, dtype=torch.float64) + noise).argmax(dim=-1).to(logits.device)

    def _uniform(self, node: Tensor | int, draw: int) -> Tensor:
        """float64 [B] in [0, 1)."""
        seeds, lengths = self._state()
        owner = zlib.crc32(self._owner.encode()) & 0x7FFFFFFF
        node = node.to(self._device) if isinstance(node, Tensor) else node
        word2 = (node + 1) | (draw << 24) | (owner << 32)
        key = _mix(seeds ^ _word1(lengths, self._purpose))
        return ((_mix(key ^ word2) >> 11) & (2**53 - 1)).double() * 2.0**-53

    def _state(self) -> tuple[Tensor, Tensor]:
        if self._made is None:
            both = torch.tensor([[_signed(s) for s in self._seeds], list(self._lengths)], dtype=torch.int64)
            both = both.to(self._device)
            self._made = _mix(both[0]), both[1]
        return self._made


def sample_seed(seed: int, sample: int) -> int:
    """Derive the seed of one of several samples of a prompt; sample 0 has the row's own."""
    if sample == 0:
        return seed
    word = torch.tensor([_signed(seed), sample], dtype=torch.int64)
    return int(_mix(_mix(word[:1]) ^ word[1:]))


def _word1(position: Tensor, purpose: Purpose) -> Tensor:
    return position | (int(purpose) << 48)


def _mix(x: Tensor) -> Tensor:
    """Finalizer of SplitMix64 on int64 words, with logical shifts."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _M1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _M2
    return x ^ ((x >> 31) & (2**33 - 1))


def _signed(value: int) -> int:
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
