"""What has been said up to each index that is scored: prompt, output and the path of drafted nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdec_core.contract.constraints import Walk
from specdec_core.contract.draft import on_device

NOTHING = -1
"""Where a sequence has no token."""


@dataclass(frozen=True)
class RowFacts:
    """What processors need to know of a row besides its params."""

    prompt_length: int
    eos: frozenset[int]
    walk: Walk | None = None  # of a row with a constraint
    fail: Callable[[Exception], object] | None = None  # ends the row, and no other, with this error


class History:
    """The sequence before each of c indices of B rows, made on the device and only when asked for.

    Args:
        committed: gives (tokens int64 [B, L] right-padded, lengths int64 [B]).
        paths: gives drafted tokens on the way to each index, int64 [B, c, d] in order, NOTHING-padded on the
            right; None: index 0 alone, right after the committed tokens.
    """

    def __init__(
        self,
        facts: Sequence[RowFacts],
        committed: Callable[[], tuple[Tensor, Tensor]],
        paths: Callable[[], Tensor] | None = None,
    ) -> None:
        self.facts = facts
        self._committed, self._paths = committed, paths

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens before each index: int64 [B, c]."""
        lengths = self._committed()[1].unsqueeze(1)
        if self._paths is None:
            return lengths
        return lengths + (self._drafted != NOTHING).sum(dim=-1)

    @cached_property
    def prompt_lengths(self) -> Tensor:
        """int64 [B]."""
        lengths = [facts.prompt_length for facts in self.facts]
        return on_device(lengths, self.lengths.device)

    @cached_property
    def ids(self) -> Tensor:
        """The sequences: int64 [B, c, S], NOTHING behind each one's length."""
        tokens, lengths = self._committed()
        behind = torch.arange(tokens.shape[1], device=tokens.device) >= lengths.unsqueeze(1)
        tokens = tokens.masked_fill(behind, NOTHING)
        if self._paths is None:
            return tokens.unsqueeze(1)
        drafted = self._drafted
        rows, c, d = drafted.shape
        padded = torch.nn.functional.pad(tokens, (0, d), value=NOTHING)
        at = lengths.view(-1, 1, 1) + torch.arange(d, device=tokens.device)
        return padded.unsqueeze(1).repeat(1, c, 1).scatter(2, at.expand(rows, c, d), drafted)

    def host_paths(self, rows: Sequence[int]) -> list[list[list[int]]]:
        """Give the drafted tokens before each index of these rows; a host transfer where there are any."""
        if self._paths is None:
            return [[[]] for _ in rows]
        found = self._drafted[list(rows)].tolist()
        return [[[token for token in path if token != NOTHING] for path in row] for row in found]

    @cached_property
    def _drafted(self) -> Tensor:
        assert self._paths is not None
        return self._paths()


def node_paths(tokens: Tensor, ancestors: Tensor, depths: Tensor, depth: int) -> Tensor:
    """Give the tokens on the way to the last pending token (none) and to every node: [B, 1 + n, depth].

    tokens, depths: int64 [B, n]; ancestors: bool [B, n, n], a node counting as its own.
    """
    rows, n = tokens.shape
    # Nodes that are no ancestor write to a column that is cut off.
    at = torch.where(ancestors, (depths - 1).unsqueeze(1), depth).clamp_(max=depth)
    paths = tokens.new_full((rows, n, depth + 1), NOTHING)
    paths.scatter_(2, at, tokens.unsqueeze(1).expand(rows, n, n))
    return torch.nn.functional.pad(paths[:, :, :depth], (0, 0, 1, 0), value=NOTHING)
