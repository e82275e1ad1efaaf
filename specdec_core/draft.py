"""The values that cross the boundary between drafters, the loop and verifiers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor

ROOT = -1
"""Parent of a node that hangs on the last pending token."""
HOLE = -2
"""Parent of no node at all: padding, or a place where nothing was drafted."""


class DraftLaw(IntEnum):
    """How the tokens of a row's draft came to be. Declared by the drafter, never guessed."""

    ONE_HOT = 0
    """A fixed function of the context (lookup, argmax, top-k children): q is a point mass on each node."""
    SAMPLED = 1
    """Siblings were drawn independently from q."""
    WITHOUT_REPLACEMENT = 2
    """Siblings were drawn from q one after another, without replacement."""
    COUPLED = 3
    """Drawn with the target's own noise of that position; for `greedy` and `match` only."""


@dataclass(frozen=True, eq=False, slots=True)
class Draft:
    """One round's proposal for the B rows of `Context.rows`, in that order; read until `observe` returns."""

    tokens: Tensor  # int64 [B, n]: parents come before children, siblings in the order they were drawn
    parents: Tensor  # int64 [B, n]: index of the parent node; ROOT or HOLE where there is none
    laws: Tensor  # uint8 [B]: a DraftLaw for each row; not read for a row without nodes
    depth: int  # upper bound on any node's depth (a child of the last pending token has depth 1)
    width: int  # upper bound on the children of a node
    probs: Tensor | None = None  # float32 [B, n, V]: the q each node was drawn from; None: no row needs it
    scores: Tensor | None = None  # float32 [B, n]: the drafter's own guess that a node is accepted
    counts: tuple[int, ...] | None = None  # [B] most nodes of each row, where the host knows; 0: surely none
    sources: tuple[str, ...] | None = None  # [B] which member of a combination drafted; "": none

    @property
    def rows(self) -> int:
        """B, the number of rows drafted for."""
        return self.tokens.shape[0]

    @property
    def nodes(self) -> int:
        """n, the width of the draft, holes included."""
        return self.tokens.shape[1]

    @classmethod
    def empty(cls, rows: int, device: torch.device | str = "cpu") -> Draft:
        """Make a draft without nodes for `rows` rows."""
        none = torch.empty((rows, 0), dtype=torch.int64, device=device)
        return cls(none, none, torch.zeros(rows, dtype=torch.uint8, device=device), depth=0, width=0)

    @classmethod
    def chains(cls, tokens: list[list[int]], device: torch.device | str = "cpu") -> Draft:
        """Make a ONE_HOT draft of one chain a row, of any lengths, from token ids known on the host."""
        n = max(map(len, tokens), default=0)
        if n == 0:
            return cls.empty(len(tokens), device)
        ids = [row + [0] * (n - len(row)) for row in tokens]
        parents = [[*range(ROOT, len(row) - 1)] + [HOLE] * (n - len(row)) for row in tokens]
        both = torch.tensor([ids, parents], dtype=torch.int64).to(device, non_blocking=True)
        laws = torch.full((len(tokens),), DraftLaw.ONE_HOT, dtype=torch.uint8, device=device)
        return cls(both[0], both[1], laws, depth=n, width=1, counts=tuple(map(len, tokens)))

    def for_rows(self, index: Sequence[int]) -> Draft:
        """Select rows by their index."""
        at = list(index)
        if at == list(range(self.rows)):
            return self
        probs, scores = self.probs, self.scores
        return replace(
            self,
            tokens=self.tokens[at],
            parents=self.parents[at],
            laws=self.laws[at],
            probs=None if probs is None else probs[at],
            scores=None if scores is None else scores[at],
            counts=None if self.counts is None else tuple(self.counts[i] for i in at),
            sources=None if self.sources is None else tuple(self.sources[i] for i in at),
        )

    @classmethod
    def merged(
        cls, rows: int, parts: Sequence[tuple[Draft, Sequence[int]]], device: torch.device | str = "cpu"
    ) -> Draft:
        """Put drafts of different rows together; a part is a draft and, for each of its rows, which it is."""
        parts = [(draft, index) for draft, index in parts if draft.nodes]
        if not parts:
            return cls.empty(rows, device)
        if len(parts) == 1 and list(parts[0][1]) == list(range(rows)):
            return parts[0][0]
        n = max(draft.nodes for draft, _ in parts)
        counts = [0] * rows
        for draft, index in parts:
            for row, count in zip(index, draft.counts or [draft.nodes] * draft.rows, strict=True):
                counts[row] = count

        def field(name: str, fill: int = 0) -> Tensor | None:
            return _placed([(getattr(draft, name), index) for draft, index in parts], (rows, n), fill, device)

        tokens, parents, laws = field("tokens"), field("parents", HOLE), field("laws")
        assert tokens is not None
        assert parents is not None
        assert laws is not None
        depth, width = max(draft.depth for draft, _ in parts), max(draft.width for draft, _ in parts)
        return cls(tokens, parents, laws, depth, width, field("probs"), field("scores"), tuple(counts))


def _placed(
    parts: list[tuple[Tensor | None, Sequence[int]]],
    size: tuple[int, int],
    fill: int,
    device: torch.device | str,
) -> Tensor | None:
    """Put rows where they belong, [B] or [B, n, ...]; the rest is filled. None where no part has any."""
    whole: Tensor | None = None
    for part, index in parts:
        if part is None:
            continue
        if whole is None:
            shape = (*size[: part.dim()], *part.shape[2:])
            whole = torch.full(shape, fill, dtype=part.dtype, device=device)
        at = torch.tensor(index, device=device)
        if part.dim() == 1:
            whole[at] = part
        else:
            whole[at, : part.shape[1]] = part
    return whole


@dataclass(frozen=True, eq=False, slots=True)
class Verdict:
    """What a verifier decided about a draft."""

    path: Tensor  # int64 [B, d]: accepted node indices from the root, -1 padded
    next_token: Tensor  # int64 [B]: recovered or bonus
