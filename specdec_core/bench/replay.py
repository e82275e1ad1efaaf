"""Plain decoding replayed through blocks: how far rounding alone moves logits.

The same tokens are fed to the unmodified model through transformers' own cache, one at a time and in blocks.
No drafter, no verifier and none of specdec's caches or masks take part, so a mistake in those is not taken
for rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_core.bench.stand import device_of
from specdec_core.model.attention import cache_argument, unwrap
from specdec_core.model.runner import DEFAULT_CHUNK

_ULPS = 2  # of a logit: less than that apart, two logits are the same to the dtype
_SAFETY = 2  # the two ways may each be off by what the replays differ from plain decoding


@dataclass(frozen=True)
class Tie:
    """How close two tokens are in plain decoding, and how close rounding may bring them."""

    tokens: tuple[int, int]  # the two likeliest in plain decoding
    gap: float  # between their logits
    behind: tuple[float, float]  # how far the tokens that were said lie behind the likeliest
    noise: float  # largest change of a top-2 gap between blocks and one token at a time
    tolerance: float

    @property
    def near(self) -> bool:
        """Whether rounding explains that either token was said."""
        return max(self.behind) <= self.tolerance


class Replayer:
    """Replays texts on one model."""

    def __init__(self, model: Any) -> None:
        self._model: Any = unwrap(model)
        self._argument = cache_argument(self._model)
        self._device = device_of(self._model)

    @torch.no_grad()
    def tie(
        self, prompt: Sequence[int], said: Sequence[int], at: int, tokens: tuple[int, int], widths: set[int]
    ) -> Tie:
        """Look at the position where two ways parted.

        Args:
            said: what one of them generated; all of its positions show how much rounding does.
            at: index in `said` of the first difference.
            tokens: what the two said there.
            widths: of the blocks that they fed.
        """
        plain = self._logits(prompt, said, 1, 0)
        top = plain.topk(2, dim=-1)
        gaps = top.values[:, 0] - top.values[:, 1]
        noise = 0.0
        for width, offset in _variants(widths):
            blocks = self._logits(prompt, said, width, offset)
            pair = blocks.gather(1, top.indices)
            noise = max(noise, float((pair[:, 0] - pair[:, 1] - gaps).abs().max()))
            pair = blocks[at, list(tokens)] - plain[at, list(tokens)]
            noise = max(noise, float((pair[0] - pair[1]).abs()))
        best = float(top.values[at, 0])
        ulp = torch.finfo(self._model.dtype).eps * abs(best)
        first, second = top.indices[at].tolist()
        return Tie(
            tokens=(first, second),
            gap=float(gaps[at]),
            behind=(best - float(plain[at, tokens[0]]), best - float(plain[at, tokens[1]])),
            noise=noise,
            tolerance=max(_SAFETY * noise, _ULPS * ulp),
        )

    def _logits(self, prompt: Sequence[int], said: Sequence[int], width: int, offset: int) -> Tensor:
        """Give the logits that each token of `said` was chosen from: float32 [len(said), V].

        The first block is the prompt and `offset` tokens behind it, as where a draft is checked with it.
        """
        tokens, cache, rows = [*prompt, *said], None, []
        for start, end in _blocks(len(prompt), len(said), width, offset):
            ids = torch.tensor([tokens[start:end]], device=self._device)
            given: dict[str, Any] = {} if cache is None else {self._argument: cache}
            output = self._model(input_ids=ids, use_cache=True, **given)
            cache = output.past_key_values
            rows.append(output.logits[0, max(len(prompt) - 1 - start, 0) :].float())
        return torch.cat(rows)[: len(said)]


def _blocks(prompt: int, said: int, width: int, offset: int) -> Iterator[tuple[int, int]]:
    """Give the blocks from (included) and to (excluded): the prompt in chunks, then blocks of `width`."""
    start, end = 0, min(prompt + offset, prompt + said)
    while end - start > DEFAULT_CHUNK:
        yield start, start + DEFAULT_CHUNK
        start += DEFAULT_CHUNK
    while start < end:
        yield start, end
        start, end = end, min(end + width, prompt + said)


def _variants(widths: set[int]) -> list[tuple[int, int]]:
    """Choose widths and alignments: a position may stand first, in the middle or last in its block."""
    found = []
    for width in sorted({2, *widths} - {1}):
        found += [(width, offset) for offset in sorted({0, width // 2, width - 1})]
    return found
