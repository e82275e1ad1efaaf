"""Where the tokens before a position stood earlier: a tree of contexts, read backwards, split on demand.

A position is an index into `tokens`; its context is what stands before it. The root holds all positions, its
child for token a those whose context ends with a, the child's child for b those ending with b a, and so on.
A node is split when it has more than `window` positions, so the tree has fewer nodes than tokens, and a
position is passed down at most DEPTH levels: adding one costs O(DEPTH), whatever the length of the text.
"""

from __future__ import annotations

from array import array

DEPTH = 16
"""Levels of the tree. Longer matches are told apart by looking at the tokens themselves."""
GAP = -1
"""Stands between sequences in `tokens`, and before the first: it is no token, so no match crosses it."""


class _Node:
    """The positions of one context."""

    __slots__ = ("children", "latest")

    def __init__(self) -> None:
        self.latest: list[int] = []  # the `window` latest positions; of a node without children: all
        self.children: dict[int, _Node] | None = None  # by the token before this context


class ContextIndex:
    """Finds the latest positions whose context has the longest suffix in common with another text's end.

    Args:
        window: most positions that are given.
        longest: most tokens that a match counts.
    """

    def __init__(self, window: int, longest: int) -> None:
        self.tokens = array("i", [GAP])
        self._window, self._longest = window, longest
        self._depth = min(DEPTH, longest)
        self._root = _Node()
        self._base = 0  # position of tokens[0]: positions keep their numbers when the front is dropped

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self._base + len(self.tokens)

    def at(self, position: int) -> int:
        """Where a position is in `tokens`."""
        return position - self._base

    def append(self, token: int) -> None:
        """Add a token, without its position: it will be context only."""
        self.tokens.append(token)

    def add(self, token: int) -> None:
        """Add a token and its position."""
        tokens = self.tokens
        tokens.append(token)
        at = len(tokens) - 1
        position = self._base + at
        node, depth = self._root, 0
        while True:
            latest = node.latest
            latest.append(position)
            children = node.children
            if children is None:
                if len(latest) > self._window:
                    self._overflow(node, depth)
                return
            if len(latest) > self._window:
                del latest[0]
            depth += 1
            before = tokens[at - depth]
            child = children.get(before)
            if child is None:
                child = children[before] = _Node()
            if before == GAP:
                depth = self._depth  # where the text begins, the context ends
            node = child

    def _overflow(self, node: _Node, depth: int) -> None:
        """Split a node, or at the last level let it forget its oldest position."""
        if depth < self._depth:
            node.children = {}
            for position in node.latest:
                before = self.tokens[position - self._base - 1 - depth]
                node.children.setdefault(before, _Node()).latest.append(position)
            for before, child in node.children.items():
                if len(child.latest) > self._window:  # all of them went the same way
                    self._overflow(child, self._depth if before == GAP else depth + 1)
        del node.latest[0]

    def find(self, text: array[int]) -> tuple[list[int], int]:
        """Match the end of `text`, which begins with a GAP: the positions, oldest first, and the length.

        No position has a longer context in common, up to `longest` tokens; beyond DEPTH tokens, none of the
        `window` latest positions with DEPTH in common has. The list is not to be changed.
        """
        node, depth, most = self._root, 0, len(text) - 1
        while node.children is not None and depth < most:
            child = node.children.get(text[-1 - depth])
            if child is None:
                return node.latest, depth
            node, depth = child, depth + 1
        if node.children is not None or not node.latest:
            return node.latest, depth
        lengths = [self._common(position - self._base, text, depth) for position in node.latest]
        longest = max(lengths)
        return [p for p, length in zip(node.latest, lengths, strict=True) if length == longest], longest

    def _common(self, end: int, text: array[int], known: int) -> int:
        """How long a suffix tokens[:end] and text have in common, up to `longest`, of which `known` are."""
        tokens, n = self.tokens, len(text)
        most = min(self._longest, end, n - 1)
        step = 1 << (most - known).bit_length() >> 1
        while step:  # the bits of the length, the highest first: a suffix in common has all shorter ones
            more = known + step
            if more <= most and tokens[end - more : end - known] == text[n - more : n - known]:
                known = more
            step >>= 1
        return known

    def forget(self, first: int, stop: int) -> None:
        """Take back the positions from `first` to `stop`: no older one is left, and later ones stay."""
        for position in range(first, stop):
            self._forget_oldest(position)

    def _forget_oldest(self, position: int) -> None:
        parent, node, before, depth = None, self._root, GAP, 0
        while node.latest[0] != position:  # it is none of this node's latest
            if node.children is None:
                return  # nor of any other: the last level forgot it
            depth += 1
            before = self.tokens[position - self._base - depth]
            parent, node = node, node.children[before]
        if len(node.latest) > 1 or parent is None:
            del node.latest[0]
            node.children = None  # as few as are left need no split
        else:
            assert parent.children is not None
            del parent.children[before]

    def drop(self, stop: int) -> None:
        """Free the tokens before `stop`, where a GAP stands; all positions before it were forgotten."""
        del self.tokens[: stop - self._base]
        self._base = stop
