"""The values that cross the boundary between drafters, the loop and verifiers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

ROOT = -1
"""Parent of a node that hangs on the last pending token."""
HOLE = -2
"""Parent of no node at all: padding, or a place where nothing was drafted."""


def on_device(values: Sequence[Any], device: torch.device | str, dtype: torch.dtype = torch.int64) -> Tensor:
    """Make a tensor of host values on a device, without waiting for what the device is doing.

    A copy from pageable memory waits for the stream, that is for the forward under way; one from pinned
    memory is queued behind it. Pinned memory comes from a cache, which reuses it when the copy has passed.
    """
    if torch.device(device).type != "cuda":
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


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

    @property
    def needs_q(self) -> bool:
        """Whether a verifier must know the q that the tokens were drawn from: `Draft.probs`."""
        return self in (DraftLaw.SAMPLED, DraftLaw.WITHOUT_REPLACEMENT)


@dataclass(frozen=True, slots=True)
class HostNodes:
    """A row's nodes as the host knows them: a fixed function of the context, so that they may be cut."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...] = ()  # as `Draft.scores`; empty: no guess

    @classmethod
    def each(
        cls,
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        scores: Sequence[Sequence[float]] | None,
    ) -> tuple[HostNodes, ...]:
        """Make those of every row."""
        guesses = [()] * len(tokens) if scores is None else scores
        rows = zip(tokens, parents, guesses, strict=True)
        return tuple(cls(tuple(row), tuple(up), tuple(guess)) for row, up, guess in rows)


@dataclass(frozen=True, eq=False, slots=True)
class Draft:
    """One round's proposal for the B rows of `Context.rows`, in that order; read until `observe` returns."""

    tokens: Tensor  # int64 [B, n]: parents come before children, siblings in the order they were drawn
    parents: Tensor  # int64 [B, n]: index of the parent node; ROOT or HOLE where there is none
    laws: Tensor  # uint8 [B]: a DraftLaw for each row; not read for a row without nodes
    depth: int  # upper bound on any node's depth (a child of the last pending token has depth 1), and on
    # that of what hangs on a hole, counted from the hole
    width: int  # upper bound on the children of a node
    probs: Tensor | None = None  # float32 [B, n, V]: the q each node was drawn from; None: no row needs it
    scores: Tensor | None = None  # float32 [B, n]: the drafter's own guess that a node is accepted
    counts: tuple[int, ...] | None = None  # [B] nodes of each row have smaller indices, where the host knows
    sources: tuple[str, ...] | None = None  # [B] which member of a combination drafted; "": none
    host: tuple[HostNodes | None, ...] | None = None  # [B] ONE_HOT nodes that were made on the host
    chain: bool = False  # surely: node 0 is a child of the last pending token, each other one of the node
    # before it, and holes come last. Known on the host, it spares everybody the general tree

    @property
    def rows(self) -> int:
        """B, the number of rows drafted for."""
        return self.tokens.shape[0]

    @property
    def nodes(self) -> int:
        """n, the width of the draft, holes included."""
        return self.tokens.shape[1]

    @property
    def hosted(self) -> bool:
        """Whether the host knows the nodes of every row."""
        return self.host is not None and None not in self.host

    @classmethod
    def of(
        cls,
        tokens: Tensor,
        parents: Tensor,
        law: DraftLaw | Sequence[DraftLaw],
        *,
        depth: int | None = None,
        width: int = 1,
        probs: Tensor | None = None,
        scores: Tensor | None = None,
        counts: tuple[int, ...] | None = None,
        host: tuple[HostNodes | None, ...] | None = None,
        chain: bool = False,
    ) -> Draft:
        """Make a draft whose rows have one law, or one each.

        tokens, parents: int64 [B, n], on the device. depth: None: n, which no node can exceed. The others
        are the fields of their names; left out, they say that no node has more than one child.
        """
        rows, n = tokens.shape
        if isinstance(law, DraftLaw):
            laws = torch.full((rows,), law, dtype=torch.uint8, device=tokens.device)
        else:
            laws = on_device(list(law), tokens.device, torch.uint8)
        depth = n if depth is None else depth
        return cls(tokens, parents, laws, depth, width, probs, scores, counts, host=host, chain=chain)

    @classmethod
    def empty(cls, rows: int, device: torch.device | str = "cpu") -> Draft:
        """Make a draft without nodes for `rows` rows."""
        none = torch.empty((rows, 0), dtype=torch.int64, device=device)
        return cls.of(none, none, DraftLaw.ONE_HOT, width=0)

    @classmethod
    def chains(
        cls,
        tokens: list[list[int]],
        device: torch.device | str = "cpu",
        scores: Sequence[Sequence[float]] | None = None,
    ) -> Draft:
        """Make a ONE_HOT draft of one chain a row, of any lengths, from token ids known on the host.

        scores: for each token of a row the chance that it is accepted, or none at all; see `Draft.scores`.
        """
        n = max(map(len, tokens), default=0)
        if n == 0:
            return cls.empty(len(tokens), device)
        ids = [row + [0] * (n - len(row)) for row in tokens]
        parents = [[*range(ROOT, len(row) - 1)] + [HOLE] * (n - len(row)) for row in tokens]
        both = on_device([ids, parents], device)
        counts = tuple(map(len, tokens))
        host = HostNodes.each(tokens, [range(ROOT, len(row) - 1) for row in tokens], scores)
        return cls.of(both[0], both[1], DraftLaw.ONE_HOT, counts=counts, host=host, chain=True)

    @classmethod
    def trees(
        cls,
        tokens: list[list[int]],
        parents: list[list[int]],
        device: torch.device | str = "cpu",
        scores: list[list[float]] | None = None,
    ) -> Draft:
        """Make a ONE_HOT draft of one tree a row, of any shapes, from nodes known on the host.

        Three lists a row, with an entry a node: its token, its parent's index (ROOT for a child of the last
        pending token) and, if given, its score.
        """
        n = max(map(len, tokens), default=0)
        if n == 0:
            return cls.empty(len(tokens), device)
        ids = [row + [0] * (n - len(row)) for row in tokens]
        up = [row + [HOLE] * (n - len(row)) for row in parents]
        both = on_device([ids, up], device)
        padded = None if scores is None else [row + [0.0] * (n - len(row)) for row in scores]
        return cls.of(
            both[0],
            both[1],
            DraftLaw.ONE_HOT,
            depth=max(map(_deepest, parents)),
            width=max(max(Counter(row).values(), default=0) for row in parents),
            scores=None if padded is None else on_device(padded, device, torch.float32),
            counts=tuple(map(len, tokens)),
            host=HostNodes.each(tokens, parents, scores),
            chain=all(row == [*range(ROOT, len(row) - 1)] for row in parents),
        )

    def cut(self, nodes: int | Sequence[int]) -> Draft:
        """Keep the first nodes of every row, or so many of each; parents come first, so none is lost.

        `host` stays as it was proposed.
        """
        columns = nodes if isinstance(nodes, int) else max(nodes, default=0)
        counts = self.counts
        if not isinstance(nodes, int) or counts is not None:
            each = [nodes] * self.rows if isinstance(nodes, int) else nodes
            counts = tuple(map(min, each, counts or [self.nodes] * self.rows))
        if columns >= self.nodes and counts == self.counts:
            return self
        return replace(
            self,
            tokens=self.tokens[:, :columns],
            parents=self.parents[:, :columns],
            depth=min(self.depth, columns),
            width=min(self.width, columns),
            probs=None if self.probs is None else self.probs[:, :columns],
            scores=None if self.scores is None else self.scores[:, :columns],
            counts=counts,
        )

    def for_rows(self, index: Sequence[int]) -> Draft:
        """Select rows by their index."""
        at = list(index)
        if at == list(range(self.rows)):
            return self
        probs, scores, chosen = self.probs, self.scores, on_device(at, self.tokens.device)
        return replace(
            self,
            tokens=self.tokens[chosen],
            parents=self.parents[chosen],
            laws=self.laws[chosen],
            probs=None if probs is None else probs[chosen],
            scores=None if scores is None else scores[chosen],
            counts=None if self.counts is None else tuple(self.counts[i] for i in at),
            sources=None if self.sources is None else tuple(self.sources[i] for i in at),
            host=None if self.host is None else tuple(self.host[i] for i in at),
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
        counts, host = [0] * rows, list[HostNodes | None]([None] * rows)
        for draft, index in parts:
            for row, count in zip(index, draft.counts or [draft.nodes] * draft.rows, strict=True):
                counts[row] = count
            for row, nodes in zip(index, draft.host or [None] * draft.rows, strict=True):
                host[row] = nodes

        def field(name: str, fill: int = 0) -> Tensor | None:
            return _placed([(getattr(draft, name), index) for draft, index in parts], (rows, n), fill, device)

        tokens, parents, laws = field("tokens"), field("parents", HOLE), field("laws")
        assert tokens is not None
        assert parents is not None
        assert laws is not None
        depth, width = max(draft.depth for draft, _ in parts), max(draft.width for draft, _ in parts)
        return cls(
            tokens,
            parents,
            laws,
            depth,
            width,
            field("probs"),
            field("scores"),
            tuple(counts),
            host=tuple(host) if any(host) else None,
            chain=all(draft.chain for draft, _ in parts),
        )


def _deepest(parents: list[int]) -> int:
    depths = {ROOT: 0}
    for node, parent in enumerate(parents):
        depths[node] = depths[parent] + 1
    return max(depths.values())


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
        at = on_device(index, device)
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
