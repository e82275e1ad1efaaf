"""What is drafted is what a table in plain dicts gives; templates are what they are said to be."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core import HOLE, ROOT, Budget, Outcome, Registry, Rows, SamplingParams, UsageError
from specdec_recycling import Recycling, RecyclingConfig
from specdec_recycling.template import CHANCES, cut, full, grown

VOCAB = 7
CPU = torch.device("cpu")


class FakeTarget:
    """What `bind` reads."""

    def __init__(self, vocab: int = VOCAB, max_rows: int = 4) -> None:
        self.vocab_size, self.max_rows, self.device, self.tokenizer = vocab, max_rows, CPU, None


class HostContext:
    """The part of a `Context` that the drafter reads."""

    def __init__(self, texts: list[list[int]], places: list[int]) -> None:
        self.rows = self.places = tuple(places)
        self.device = CPU
        self.lengths = torch.tensor([len(text) for text in texts])
        self.tokens = torch.zeros((len(texts), max(map(len, texts))), dtype=torch.int64)
        for row, text in zip(self.tokens, texts, strict=True):
            row[: len(text)] = torch.tensor(text)


def made(vocab: int = VOCAB, **options: Any) -> Recycling:
    drafter = Recycling(RecyclingConfig(**options))
    drafter.bind(FakeTarget(vocab))  # type: ignore[arg-type]
    return drafter


def admit(drafter: Recycling, place: int, prompt: list[int]) -> None:
    drafter.admit(Rows((place,), (place,), (tuple(prompt),), (SamplingParams(),)))


def observe(drafter: Recycling, places: list[int], scored: Any, ids: Any) -> None:
    """Let the target have scored these tokens, with these candidates after each."""
    top = torch.tensor(ids)
    rows = len(places)
    drafter.observe(
        Outcome(
            tuple(places),
            tuple(places),
            ([1],) * rows,
            ([],) * rows,
            (None,) * rows,
            top_logits=(top, torch.zeros(top.shape)),
            scored=torch.tensor(scored),
        )
    )


def nodes_of(
    drafter: Recycling, texts: list[list[int]], places: list[int], budget: Budget
) -> list[list[Any]]:
    draft = drafter.propose(HostContext(texts, places), budget)  # type: ignore[arg-type]
    kept = []
    for tokens, parents in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        real = {node: at for at, node in enumerate(n for n, up in enumerate(parents) if up != HOLE)}
        kept.append([(tokens[n], ROOT if parents[n] == ROOT else real[parents[n]]) for n in real])
    return kept


# --- the table ------------------------------------------------------------------------------------

token = st.integers(0, VOCAB - 1)
round_of_two = st.lists(
    st.tuples(st.integers(-1, VOCAB + 1), st.permutations(range(VOCAB))), min_size=6, max_size=6
)


@settings(max_examples=150, deadline=None)
@given(
    rounds=st.lists(round_of_two, max_size=4),
    prompts=st.lists(st.lists(token, min_size=1, max_size=6), min_size=2, max_size=2),
    last=st.tuples(token, token),
    shared=st.booleans(),
    prompt=st.booleans(),
    depths=st.tuples(st.integers(0, 4), st.integers(1, 4)),
    nodes=st.integers(1, 30),
)
def test_drafts_are_what_the_table_says(
    rounds: list[Any],
    prompts: list[list[int]],
    last: tuple[int, int],
    shared: bool,
    prompt: bool,
    depths: tuple[int, int],
    nodes: int,
) -> None:
    """Two rows; what was written last stays, and what is no token is left out."""
    k = 3
    drafter = made(candidates=k, shape="3x2x2", shared=shared, prompt=prompt)
    known: list[dict[int, list[int]]] = [{}, {}]
    if shared:
        known[1] = known[0]
    for place, text in enumerate(prompts):
        admit(drafter, place, text)
        if prompt:
            hints = dict(pairwise(text))
            known[place].update({a: [b] for a, b in hints.items() if a not in known[place]})
    for entries in rounds:
        scored = [[at for at, _ in entries[:3]], [at for at, _ in entries[3:]]]
        observe(drafter, [0, 1], scored, [[ids for _, ids in entries[:3]], [ids for _, ids in entries[3:]]])
        for i, (at, ids) in enumerate(entries):
            if 0 <= at < VOCAB:
                known[i // 3][at] = list(ids[:k])
    template = full((3, 2, 2))
    expected = []
    for place in (0, 1):
        kept: dict[int, tuple[int, int]] = {}  # node -> (token, its place among those kept)
        row = []
        for node in range(min(nodes, template.nodes)):
            up, rank = template.parents[node], template.ranks[node]
            above = last[place] if up == ROOT else kept[up][0] if up in kept else None
            options = known[place].get(above, []) if above is not None else []
            if template.depths[node] <= depths[place] and rank < len(options):
                kept[node] = (options[rank], len(row))
                row.append((options[rank], ROOT if up == ROOT else kept[up][1]))
        expected.append(row)
    texts = [[*prompts[0], last[0]], [*prompts[1], last[1]]]
    assert nodes_of(drafter, texts, [0, 1], Budget(list(depths), nodes)) == expected


def test_what_was_written_last_wins_also_within_a_round() -> None:
    drafter = made(candidates=1, shape="1", prompt=False)
    admit(drafter, 0, [1])
    observe(drafter, [0, 1], [[2, 3], [2, 2]], [[[4], [5]], [[6], [0]]])
    assert nodes_of(drafter, [[2], [3]], [0, 1], Budget([1, 1], 1)) == [[(0, ROOT)], [(5, ROOT)]]
    observe(drafter, [0], [[2]], [[[3]]])
    assert nodes_of(drafter, [[2]], [0], Budget([1], 1)) == [[(3, ROOT)]]


def test_a_place_that_is_taken_again_begins_empty_unless_shared() -> None:
    for shared in (True, False):
        drafter = made(candidates=1, shape="1", shared=shared)
        admit(drafter, 2, [5])
        observe(drafter, [2], [[5]], [[[6]]])
        drafter.release([2])
        admit(drafter, 2, [5])
        found = nodes_of(drafter, [[5]], [2], Budget([1], 1))
        assert found == ([[(6, ROOT)]] if shared else [[]])
        assert drafter.capabilities.learns == shared


def test_outcomes_without_scores_change_nothing() -> None:
    drafter = made(candidates=1, shape="1", prompt=False)
    drafter.observe(Outcome((0,), (0,), ([],), ([],), (None,)))
    assert nodes_of(drafter, [[2]], [0], Budget([1], 1)) == [[]]


# --- templates ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "depth", "width"), [(1, 1, 1), (5, 2, 3), (12, 3, 2), (80, 6, 8), (7, 9, 1)]
)
def test_a_grown_template_holds_the_best_paths(nodes: int, depth: int, width: int) -> None:
    """Compared with all paths there are."""
    found = grown(nodes, depth, width)
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(found.parents, found.ranks, strict=True):
        paths.append((rank,) if parent == ROOT else (*paths[parent], rank))
    depths = range(1, min(depth, 5) + 1)
    every = (
        [path for d in depths for path in product(range(width), repeat=d)]
        if width ** min(depth, 5) < 40_000
        else []
    )
    worth = sorted((prod(CHANCES[rank] for rank in path) for path in every), reverse=True)
    if every and depth <= 5:
        chances = sorted((prod(CHANCES[rank] for rank in path) for path in paths), reverse=True)
        assert chances == pytest.approx(worth[:nodes])
    assert len(set(paths)) == len(paths) == found.nodes == min(nodes, found.nodes)
    assert found.depth <= depth
    assert found.width <= width
    assert list(found.depths) == sorted(found.depths)
    assert all(parent < node for node, parent in enumerate(found.parents))
    assert found.chances == pytest.approx([prod(CHANCES[rank] for rank in path) for path in paths])


def test_the_default_is_a_tree_like_the_papers() -> None:
    can = Recycling(RecyclingConfig()).capabilities
    assert (can.nodes, can.max_depth, can.top_logits, can.makes_trees, can.learns) == (80, 6, 8, True, True)


def test_full_and_cut_templates() -> None:
    tree = full((2, 3))
    assert tree.parents == (-1, -1, 0, 0, 0, 1, 1, 1)
    assert tree.ranks == (0, 1, 0, 1, 2, 0, 1, 2)
    assert tree.levels == ((0, 2), (2, 8))
    assert cut(tree, 4, 2).parents == (-1, -1, 0, 0)
    assert cut(tree, 99, 1).parents == (-1, -1)
    assert Recycling(RecyclingConfig(shape="1x1x1")).capabilities.makes_trees is False


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shape": "9x2"}, "shape=9x2 wants 9 children of a node, and candidates=8"),
        ({"shape": "8x8x8x8"}, "more than 512 nodes"),
        ({"shape": "2x0"}, "shape=2x0 has a level without nodes"),
        ({"shape": "two"}, "shape"),
        ({"nodes": "513"}, "nodes"),
        ({"candidates": "0"}, "candidates"),
        ({"path": "x", "shared": "false"}, "shared=false"),
        ({"width": "3"}, "width"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, str], words: str) -> None:
    """B52, B105: by name, and where two numbers disagree, with both."""
    with pytest.raises(UsageError, match=words):
        Registry.discover().build_drafter("recycling", options)


def test_a_vocabulary_smaller_than_the_table_is_wide_leaves_candidates_unknown() -> None:
    drafter = made(vocab=3, candidates=5, shape="5", prompt=False)
    assert drafter.capabilities.top_logits == 3
    admit(drafter, 0, [1])
    observe(drafter, [0], [[1]], [[[2, 0, 1]]])
    assert nodes_of(drafter, [[1]], [0], Budget([1], 9)) == [[(2, ROOT), (0, ROOT), (1, ROOT)]]
