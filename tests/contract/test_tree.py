"""Ancestors, positions, slots and masks, against what they mean, spelled out in plain Python."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ScriptedDrafter, base, greedy, ids, tiny_llama
from torch import Tensor

from specdec_core import HOLE, ROOT, SpecDecoder
from specdec_core.contract.tree import Tree
from specdec_core.model.layout import Layout, lay_out

VIEW, TRASH = 40, 63
WINDOWS = (None, 1, 3, 8)


@st.composite
def forests(draw: st.DrawFn, rows: int = 2, most: int = 9) -> list[list[int]]:
    """Forests of one width; a child of a hole may name it as its parent."""
    n = draw(st.integers(0, most))
    parent = [st.sampled_from([ROOT, ROOT, HOLE, *range(i), *range(i)]) for i in range(n)]
    return [[draw(one) for one in parent] for _ in range(rows)]


def lineage(parents: list[int], node: int) -> list[int] | None:
    """The nodes from the root to this one; None if there is a hole among them."""
    path: list[int] = []
    while node != ROOT:
        if parents[node] == HOLE:
            return None
        path.insert(0, node)
        node = parents[node]
    return path


def tree_of(forest: list[list[int]], depth: int | None = None) -> Tree:
    return Tree.of(torch.tensor(forest, dtype=torch.int64).reshape(len(forest), -1), depth)


@settings(deadline=None)
@given(forests())
def test_ancestors_depths_and_holes(forest: list[list[int]]) -> None:
    paths = [[lineage(row, node) for node in range(len(row))] for row in forest]
    valid = [
        [HOLE if path is None else parent for parent, path in zip(row, each, strict=True)]
        for row, each in zip(forest, paths, strict=True)
    ]
    depth = max((len(path) for row in paths for path in row if path), default=1)
    for tree in (tree_of(forest), tree_of(valid, depth)):  # a bound on the depth changes nothing
        for i, row in enumerate(paths):
            for node, path in enumerate(row):
                assert bool(tree.real[i, node]) == (path is not None)
                if path is not None:
                    assert int(tree.depths[i, node]) == len(path)
                    assert tree.ancestors[i, node].nonzero().flatten().tolist() == path


@settings(deadline=None)
@given(forests(most=12), st.integers(1, 12))
def test_what_lies_deeper_than_a_bound_is_told_to(forest: list[list[int]], depth: int) -> None:
    """Nodes within it have all their ancestors; a hole counts like a child of the last pending token."""
    tree = tree_of(forest, depth)
    for i, row in enumerate(forest):
        for node in range(len(row)):
            path = lineage([ROOT if parent == HOLE else parent for parent in row], node) or []
            if len(path) > depth:
                assert int(tree.depths[i, node]) >= depth
                continue
            assert int(tree.depths[i, node]) == len(path)
            assert tree.ancestors[i, node].nonzero().flatten().tolist() == path
            assert bool(tree.real[i, node]) == all(row[at] != HOLE for at in path)


def test_a_round_makes_the_tree_of_its_draft_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is checked; the forward takes it from there."""
    made, of = [], Tree.of.__func__  # type: ignore[attr-defined]

    def noted(cls: type[Tree], parents: Tensor, depth: int | None = None) -> Tree:
        made.append(depth)
        found: Tree = of(cls, parents, depth)
        return found

    model, prompt = tiny_llama(), ids(5)
    drafter = ScriptedDrafter(
        lambda ask: [(3, -1), (4, -1), (5, 0)][: 3 * ask.depth], depth=2, nodes=3, trees=True
    )
    decoder = SpecDecoder(model, drafter=drafter, draft_tokens=2)
    monkeypatch.setattr(Tree, "of", classmethod(noted))
    rounds = list(decoder.rounds(prompt, greedy(12)))
    assert rounds[-1].batch.rows[0].output == base(model, prompt, 12)
    assert made == [2 + 1] * sum(done.draft.nodes > 0 for done in rounds)
    assert len(made) > 5


def test_a_long_chain_is_closed_over() -> None:
    """Doubling must reach the far end: depths that are no power of two too."""
    for n in (1, 2, 3, 5, 16, 17, 33):
        tree = tree_of([list(range(-1, n - 1))])
        assert tree.depths[0].tolist() == list(range(1, n + 1))
        assert torch.equal(tree.ancestors[0], torch.ones(n, n).tril().bool())


@settings(deadline=None)
@given(
    forests(), st.lists(st.tuples(st.integers(0, 12), st.integers(0, 4)), min_size=2, max_size=2), st.data()
)
def test_positions_slots_and_masks(
    forest: list[list[int]], sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    """B65, B76: every column, of rows of any lengths, one of them maybe not in the batch at all (0, 0)."""
    n = len(forest[0])
    fed = data.draw(st.integers(0, n), label="fed before")
    held, pending = zip(*sizes, strict=True)
    if fed:
        held, pending = tuple(map(sum, sizes)), (0, 0)
    columns = max(pending) + data.draw(st.integers(0, 2), label="padding")
    tree = tree_of(forest) if n else None
    layout = lay_out(torch.tensor(held), torch.tensor(pending), tree, columns, fed, VIEW, WINDOWS, TRASH)
    for row in range(2):
        check_pending(layout, row, held[row], pending[row], columns)
        for node in range(fed, n):
            check_node(layout, row, columns + node - fed, forest[row], node, held[row] + pending[row])
    assert all(mask.any(dim=-1).all() for mask in layout.masks.values())  # none is empty
    assert all(mask.shape == (2, 1, columns + n - fed, VIEW) for mask in layout.masks.values())


def check_pending(layout: Layout, row: int, held: int, pending: int, columns: int) -> None:
    for column in range(columns):
        i = column - (columns - pending)  # right-aligned
        if i < 0:
            check_padding(layout, row, column)
            continue
        assert layout.positions[row, column] == layout.slots[row, column] == held + i
        check_seen(layout, row, column, held + i, {slot: slot for slot in range(held + i + 1)})


def check_node(layout: Layout, row: int, column: int, parents: list[int], node: int, base: int) -> None:
    path = lineage(parents, node)
    if path is None:
        check_padding(layout, row, column)
        return
    position = base + len(path) - 1
    assert layout.positions[row, column] == position
    assert layout.slots[row, column] == base + node
    # slot -> position of what lies there: an ancestor stands at its depth, whatever its slot
    seen = {slot: slot for slot in range(base)} | {base + at: base + depth for depth, at in enumerate(path)}
    check_seen(layout, row, column, position, seen)


def check_padding(layout: Layout, row: int, column: int) -> None:
    assert layout.slots[row, column] == TRASH
    assert layout.positions[row, column] == 0
    assert all(slots(mask, row, column) == [0] for mask in layout.masks.values())


def check_seen(layout: Layout, row: int, column: int, position: int, seen: dict[int, int]) -> None:
    for window in WINDOWS:
        near = [slot for slot, at in seen.items() if window is None or position - at < window]
        assert slots(layout.masks[window], row, column) == sorted(near), (window, position)


def slots(mask: Tensor, row: int, column: int) -> list[int]:
    found: list[int] = mask[row, 0, column].nonzero().flatten().tolist()
    return found


def test_a_row_that_is_not_in_the_batch_sees_one_slot_under_any_window() -> None:
    """B65: its nodes are no nodes, so that its depths are zeros, and its slots mean nothing."""
    none = torch.zeros(1, 3, dtype=torch.int64)
    tree = Tree(torch.zeros(1, 3, 3, dtype=torch.bool), none, none.bool())
    layout = lay_out(none[:, 0], none[:, 0], tree, 2, 0, VIEW, WINDOWS, TRASH)
    for mask in layout.masks.values():
        assert all(slots(mask, 0, column) == [0] for column in range(5))
