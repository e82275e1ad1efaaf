"""Stateless, counter-based randomness, keyed by row.

Every value is an output of a SplitMix64 stream (Steele, Lea and Flood 2014): number w of the stream s is
`mix(s + w * gamma)`, for a fixed s a bijection of the 64-bit word w. Streams are nested, with disjoint
fields in every word, so that keys are never added or xored together:

    row    = mix(seed)
    round  = number (committed length: bits 0-47, purpose: 48-55) of `row`
    owner  = number (64-bit hash of the owner's name) of `round`
    draw   = number (node + 1: bits 0-31, draw: 32-39) of `owner`

For one row, two draws of one round and owner share a value only where node and draw agree; draws of other
rounds, purposes, owners and rows are those of another stream. The target's noise of a position is a stream
of its own (absolute position, purpose TARGET), of which each token has a number. No global generator is
read or moved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from specdec_core.contract.draft import on_device

_GAMMA = 0x9E3779B97F4A7C15
_M1 = 0xBF58476D1CE4E5B9 - 2**64
_M2 = 0x94D049BB133111EB - 2**64


class Purpose(IntEnum):
    """What a draw is for; draws of two purposes never share a key."""

    SAMPLE = 0
    TARGET = 1
    VERIFY = 2
    DRAFT = 3
    ROW = 4


class KeyedRng:
    """`RowRng` of the rows of one round.

    Args:
        seeds: each row's seed, on the host: any integer, read modulo 2**64.
        lengths: committed length of each row at the start of the round.
        owner: name of who draws; a drafter's, or empty.
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
        self._stream: Tensor | None = None

    def child(self, name: str) -> KeyedRng:
        # Names hold no NUL, so that ("a", "b/c") and ("a/b", "c") stay apart.
        owner = f"{self._owner}\0{name}"
        return KeyedRng(self._seeds, self._lengths, self._purpose, owner, self._device)

    def for_rows(self, index: Sequence[int]) -> KeyedRng:
        """Select rows by their index."""
        seeds = [self._seeds[i] for i in index]
        return KeyedRng(seeds, [self._lengths[i] for i in index], self._purpose, self._owner, self._device)

    def bernoulli(self, p: Tensor, node: Tensor | int, draw: int) -> Tensor:
        return (self._uniform(node, draw) < p.to(self._device)).to(p.device)

    def categorical(self, weights: Tensor, node: Tensor | int, draw: int) -> Tensor:
        w = weights.to(self._device)
        cumulative = w.cumsum(dim=-1, dtype=torch.float64)
        point = self._uniform(node, draw)[:, None] * cumulative[:, -1:]
        # The first index with weight whose cumulative weight exceeds the point. That it has weight is asked
        # for apart: a parallel sum need not stay level over an index without.
        found, index = ((cumulative > point) & (w > 0)).max(dim=-1)
        return torch.where(found, index, w.argmax(dim=-1)).to(weights.device)

    def target_draw(self, logits: Tensor, depth: Tensor | int) -> Tensor:
        seeds, lengths = self._state()
        depth = torch.full_like(lengths, depth) if isinstance(depth, int) else depth.to(self._device)
        inner = (slice(None), *[None] * (depth.dim() - 1))
        stream = _number(seeds[inner], _round_word(lengths[inner] + depth, Purpose.TARGET))
        token = torch.arange(1, logits.shape[-1] + 1, dtype=torch.int64, device=self._device)
        # Strictly inside (0, 1): a uniform of 0 or 1 would give infinite noise.
        u = _fraction(_number(stream.unsqueeze(-1), token)).clamp_(min=2.0**-53)
        noise = u.log_().neg_().log_().neg_()
        return noise.add_(logits.to(self._device)).argmax(dim=-1).to(logits.device)

    def _uniform(self, node: Tensor | int, draw: int) -> Tensor:
        """float64 [B] in [0, 1)."""
        assert 0 <= draw < 2**8, f"draw {draw} does not fit its field"
        if self._stream is None:
            seeds, lengths = self._state()
            self._stream = _number(
                _number(seeds, _round_word(lengths, self._purpose)), _name_word(self._owner)
            )
        node = node.to(self._device) if isinstance(node, Tensor) else node
        return _fraction(_number(self._stream, ((node + 1) & (2**32 - 1)) | (draw << 32)))

    def _state(self) -> tuple[Tensor, Tensor]:
        """Stream of each row and committed length: int64 [B] each."""
        if self._made is None:
            both = on_device([[_signed(s) for s in self._seeds], list(self._lengths)], self._device)
            self._made = _mix(both[0]), both[1]
        return self._made


def sample_seed(seed: int, sample: int) -> int:
    """Derive the seed of one of several samples of a prompt; sample 0 has the row's own."""
    if sample == 0:
        return seed
    row = _mix(torch.tensor([_signed(seed)], dtype=torch.int64))
    word = _round_word(torch.tensor([sample], dtype=torch.int64), Purpose.SAMPLE)
    return int(_number(row, word)) % 2**64


def row_seed(seed: int, row: int) -> int:
    """Derive the seed of a row that must share no draw with any other row, of the same seed too."""
    stream = _mix(torch.tensor([_signed(seed)], dtype=torch.int64))
    word = _round_word(torch.tensor([row], dtype=torch.int64), Purpose.ROW)
    return int(_number(stream, word)) % 2**64


def _round_word(position: Tensor, purpose: Purpose) -> Tensor:
    return position | (int(purpose) << 48)


def _name_word(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _number(stream: Tensor, word: Tensor | int) -> Tensor:
    """Output number `word` of a SplitMix64 stream; int64 words wrap."""
    step = word * _signed(_GAMMA) if isinstance(word, Tensor) else _signed(word * _GAMMA)
    return _mix(stream + step)


def _mix(x: Tensor) -> Tensor:
    """Finalizer of SplitMix64 on int64 words, with logical shifts."""
    x = (x >> 30).bitwise_and_(2**34 - 1).bitwise_xor_(x).mul_(_M1)
    x = (x >> 27).bitwise_and_(2**37 - 1).bitwise_xor_(x).mul_(_M2)
    return (x >> 31).bitwise_and_(2**33 - 1).bitwise_xor_(x)


def _fraction(bits: Tensor) -> Tensor:
    """The upper 53 bits as float64 in [0, 1)."""
    return (bits >> 11).bitwise_and_(2**53 - 1).double().mul_(2.0**-53)


def _signed(value: int) -> int:
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
