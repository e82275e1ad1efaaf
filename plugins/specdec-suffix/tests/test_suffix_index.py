"""What the index finds is what a search through all tokens finds, while sequences come and go."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_suffix import index as index_module
from specdec_suffix.history import History
from specdec_suffix.index import GAP, ContextIndex

Texts = list[tuple[list[int], list[int]]]  # what stood before, and what was said


def common(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """Length of the longest common suffix."""
    n = 0
    while n < min(most, len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n


def search(
    texts: Texts, query: Sequence[int], window: int, longest: int, depth: int
) -> tuple[list[int], int]:
    """The rule, as it is written down: ordinal numbers of positions among all, and the match's length."""
    contexts = [
        (before + said)[:at] for before, said in texts for at in range(len(before), len(before + said))
    ]
    lengths = [common(context, query, longest) for context in contexts]
    if not lengths:
        return [], 0
    nearest = min(max(lengths), depth)
    latest = [i for i, length in enumerate(lengths) if length >= nearest][-window:]
    if nearest < min(depth, longest):
        return latest, nearest
    most = max(lengths[i] for i in latest)
    return [i for i in latest if lengths[i] == most], most


tokens = st.integers(0, 2)
pieces = st.lists(
    st.tuples(st.lists(tokens, max_size=4), st.lists(tokens, min_size=1, max_size=12)), max_size=12
)


@settings(max_examples=120, deadline=None)
@given(
    texts=pieces,
    queries=st.lists(st.lists(tokens, min_size=1, max_size=12), min_size=1, max_size=6),
    window=st.integers(1, 5),
    longest=st.integers(1, 9),
    depth=st.integers(1, 6),
)
def test_the_index_finds_what_a_search_finds(
    texts: Texts, queries: list[list[int]], window: int, longest: int, depth: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "DEPTH", depth)
        index = ContextIndex(window, longest)
        numbers: list[int] = []  # the position of each ordinal number
        for before, said in texts:
            for token in before:
                index.append(token)
            for token in said:
                index.add(token)
                numbers.append(index.end - 1)
            index.append(GAP)
        for query in queries:
            found, length = index.find(array("i", [GAP, *query]))
            ordinals, expected = search(texts, query, window, longest, depth)
            assert (found, length) == ([numbers[i] for i in ordinals], expected)


@settings(max_examples=120, deadline=None)
@given(
    texts=pieces,
    query=st.lists(tokens, min_size=1, max_size=8),
    window=st.integers(1, 4),
    capacity=st.integers(12, 40),
    depth=st.integers(1, 4),
)
def test_after_evictions_it_is_as_if_the_oldest_had_never_been(
    texts: Texts, query: list[int], window: int, capacity: int, depth: int
) -> None:
    longest = 6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "DEPTH", depth)
        history = History(capacity, window, longest)
        kept: Texts = []
        for before, said in texts:
            history.learn([*before, *said], len(before))
            said_kept = said[-(capacity - longest - 1) :]
            whole = [*before, *said]
            kept.append((whole[: len(whole) - len(said_kept)][-longest:], said_kept))
            while sum(len(b) + len(s) + 1 for b, s in kept) > capacity:
                kept.pop(0)
            assert [(list(b), list(s)) for b, s in history.sequences()] == kept
            assert history.size == sum(len(b) + len(s) + 1 for b, s in kept) <= capacity
            found, length = history.index.find(array("i", [GAP, *query]))
            ordinals, expected = search(kept, query, window, longest, depth)
            assert length == expected
            after = [history.index.tokens[history.index.at(p)] for p in found]
            following = [token for _, said_ in kept for token in said_]
            assert after == [following[i] for i in ordinals]


def test_a_long_match_is_measured_to_its_end() -> None:
    index = ContextIndex(window=4, longest=64)
    text = [i % 97 for i in range(120)]
    for token in [*text, 5, *text[50:]]:
        index.add(token)
    index.add(7)
    found, length = index.find(array("i", [GAP, *text]))
    assert length == 64
    assert [index.tokens[p] for p in found] == [5, 7]
    _, length = index.find(array("i", [GAP, 1, *text[100:]]))
    assert length == 20


def test_a_text_that_repeats_one_token_costs_a_bounded_number_of_nodes() -> None:
    index = ContextIndex(window=8, longest=64)
    for _ in range(5000):
        index.add(3)
    assert count(index) <= 2 * index_module.DEPTH + 1
    assert index.find(array("i", [GAP, 3, 3]))[1] == 2


def count(index: ContextIndex) -> int:
    """Nodes of the tree."""
    nodes, waiting = 0, [index._root]
    while waiting:
        node = waiting.pop()
        nodes += 1
        assert node is index._root or node.latest
        waiting += (node.children or {}).values()
    return nodes


@settings(max_examples=60, deadline=None)
@given(texts=pieces, window=st.integers(1, 4))
def test_nodes_are_bounded_by_what_is_held(texts: Texts, window: int) -> None:
    history = History(30, window, 6)
    for before, said in texts * 3:
        history.learn([*before, *said], len(before))
        alive = sum(len(s) for _, s in history.sequences())
        assert count(history.index) <= 1 + alive + alive * min(index_module.DEPTH, 6) // window
