"""Trees: static and adaptive ones, and what a true continuation runs through."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from heads_files import PROMPTS, tensors, write
from torch import Tensor

from specdec_core import HOLE, ROOT, SamplingParams, SpecDecoder, UsageError
from specdec_core.testing.models import tiny_model
from specdec_medusa import Medusa
from specdec_medusa.choices import chain_choices, checked, measured_choices, paper_choices
from specdec_medusa.evaluation import prefixes
from specdec_medusa.states import States
from specdec_medusa.trees import AdaptiveTree, Nodes, StaticTree, right_nodes

K, RANKS = 3, 4


def guesses(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Candidates [rows, K, RANKS]: ids that tell head and rank, and falling probabilities."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(rows, K, RANKS + 2, generator=generator).softmax(-1).sort(-1, descending=True).values
    ids = torch.arange(K).unsqueeze(1) * 100 + torch.arange(RANKS)
    return ids.expand(rows, -1, -1), probs[..., :RANKS]


def paths(nodes: Nodes, row: int) -> list[tuple[int, ...]]:
    """Each node's path of tokens, holes left out."""
    found: dict[int, tuple[int, ...]] = {ROOT: ()}
    for node, parent in enumerate(nodes.parents[row].tolist()):
        if parent != HOLE:
            assert parent < node
            found[node] = (*found[parent], int(nodes.tokens[row, node]))
    return [path for node, path in found.items() if node >= 0]


@pytest.mark.parametrize("nodes", [1, 5, 17, 100])
def test_the_adaptive_tree_holds_the_likeliest_paths(nodes: int) -> None:
    ids, probs = guesses(3)
    made = AdaptiveTree(K)(ids, probs, [K, 2, 1], nodes)
    for row, depth in enumerate((K, 2, 1)):
        every = {}
        for d in range(1, depth + 1):
            for ranks in itertools.product(range(RANKS), repeat=d):
                score = torch.stack([probs[row, head, rank] for head, rank in enumerate(ranks)]).prod()
                every[tuple(100 * head + rank for head, rank in enumerate(ranks))] = float(score)
        best = sorted(every, key=lambda path: -every[path])[:nodes]
        found = paths(made, row)
        assert set(found) == set(best)
        for node, path in zip(range(len(found)), found, strict=False):
            assert float(made.scores[row, node]) == pytest.approx(every[path], rel=1e-5)


def test_certain_heads_make_a_chain_with_parents_first() -> None:
    """Where all scores are equal, a child must still not stand before its parent."""
    ids, _ = guesses(1)
    probs = torch.zeros(1, K, RANKS)
    probs[..., 0] = 1.0
    made = AdaptiveTree(K)(ids, probs, [K], 6)
    assert paths(made, 0) == [(0,), (0, 100), (0, 100, 200)]
    assert made.parents[0].tolist()[3:] == [HOLE] * 3


def test_a_static_tree_takes_each_paths_candidate() -> None:
    ids, probs = guesses(2)
    choices = [(0,), (2,), (0, 1), (2, 0), (0, 1, 3)]
    made = StaticTree(choices)(ids, probs, [3, 2], 64)
    wanted = [tuple(100 * head + rank for head, rank in enumerate(path)) for path in choices]
    assert paths(made, 0) == wanted
    assert paths(made, 1) == wanted[:-1]
    assert float(made.scores[0, 4]) == pytest.approx(float(probs[0, 0, 0] * probs[0, 1, 1] * probs[0, 2, 3]))
    assert paths(StaticTree(choices)(ids, probs, [3, 2], 2), 0) == wanted[:2]
    assert made.width == 2


def test_the_papers_tree() -> None:
    choices = paper_choices()
    assert (len(choices), len(set(choices))) == (63, 63)
    assert (max(map(len, choices)), max(map(max, choices))) == (4, 9)
    assert checked(choices, 4, 10) == choices  # whole, and parents come first


def test_the_measured_tree_is_the_best_one() -> None:
    accuracies = [[0.5, 0.2, 0.1], [0.4, 0.3, 0.05]]
    every = {(a,): accuracies[0][a] for a in range(3)}
    every |= {(a, b): accuracies[0][a] * accuracies[1][b] for a in range(3) for b in range(3)}
    for nodes in range(1, 13):
        chosen = measured_choices(accuracies, nodes)
        assert sum(every[path] for path in chosen) == pytest.approx(
            sum(sorted(every.values(), reverse=True)[:nodes])
        )
        assert checked(chosen, 2, 3) == chosen


def test_a_tree_whose_children_come_first_is_put_in_order() -> None:
    assert checked([(0, 0), (0,)], 2, 1) == [(0,), (0, 0)]


# --- trees that heads cannot fill (B52) -----------------------------------------------------------


@pytest.mark.parametrize(
    ("tree", "reason"),
    [
        ([[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], "the tree is 4 deep and there are 3 heads"),
        ("paper", "the tree is 4 deep and there are 3 heads"),
        ([[0], [7]], "candidate 7 of a head and top_k=6 gives 0 to 5"),
        ([[0], [1, 0]], r"the path \[1, 0\] without its parent \[1\]"),
        ([[-1]], "negative rank"),
        ([[0], [0]], "a path twice"),
        ([], "the tree is empty"),
        ("nowhere.json", "tree=nowhere.json is no file"),
        ("measured", "tree=measured needs heads with measured accuracies"),
    ],
)
def test_a_tree_that_does_not_fit_is_refused(tree: object, reason: str, tmp_path: Path) -> None:
    """Both numbers are in the message, and it is a ValueError."""
    config = Medusa.Config(heads=str(write(tmp_path, tensors(heads=3))), tree=tree, top_k=6)
    with pytest.raises(UsageError, match=reason) as caught:
        SpecDecoder(tiny_model("qwen3"), drafter=Medusa(config))
    assert isinstance(caught.value, ValueError)


def test_more_heads_than_were_trained_are_refused(tmp_path: Path) -> None:
    config = Medusa.Config(heads=str(write(tmp_path, tensors(heads=3))), num_heads=4)
    with pytest.raises(UsageError, match="num_heads=4 is more than were trained: 3"):
        SpecDecoder(tiny_model("qwen3"), drafter=Medusa(config))


def test_a_head_has_no_more_candidates_than_tokens(tmp_path: Path) -> None:
    where = str(write(tmp_path, tensors(heads=3)))
    made = SpecDecoder(
        tiny_model("qwen3"), drafter=Medusa(Medusa.Config(heads=where, top_k=110)), draft_tokens=None
    )
    assert len(made.generate(PROMPTS[0], SamplingParams(max_new_tokens=6)).token_ids) == 6
    with pytest.raises(UsageError, match=r"candidate 97 of a head and top_k=97 gives 0 to 96"):
        SpecDecoder(tiny_model("qwen3"), drafter=Medusa(Medusa.Config(heads=where, top_k=110, tree=[[97]])))


def test_a_tree_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_text(json.dumps([[0], [0, 0], [1]]))
    config = Medusa.Config(heads=str(write(tmp_path, tensors(heads=3))), tree=str(file))
    made = SpecDecoder(tiny_model("qwen3"), drafter=Medusa(config))
    assert (made.drafter.capabilities.max_depth, made.drafter.capabilities.nodes) == (2, 3)
    for text, reason in (
        ("[[0]", "is no JSON"),
        ('{"a": 1}', "a list of paths"),
        ("[[]]", "a list of paths"),
    ):
        file.write_text(text)
        with pytest.raises(UsageError, match=reason):
            SpecDecoder(tiny_model("qwen3"), drafter=Medusa(config))


# --- predictions ----------------------------------------------------------------------------------


def test_the_nodes_that_a_continuation_runs_through() -> None:
    ids, probs = guesses(2)
    tree = StaticTree([(0,), (2,), (0, 1), (2, 0), (0, 1, 3)])
    labels = torch.tensor([[0, 101, 203], [1, 101, 203]])
    assert right_nodes(tree(ids, probs, [3, 3], 9), labels).tolist() == [
        [True, False, True, False, True],
        [False] * 5,
    ]


def test_joint_prefix_accuracy_everywhere_and_where_rounds_start() -> None:
    """One sequence of six positions; a chain of two heads is right 2, 0, 1, 1, 0, 0 tokens deep."""
    right = [2, 0, 1, 1, 0, 0]
    labels = torch.tensor([[7, 8]] * 6)
    ids = torch.tensor([[[7 if n > 0 else 0], [8 if n > 1 else 0]] for n in right])
    states = States(torch.zeros(6, 1), labels, (6,))
    found = prefixes(StaticTree(chain_choices(2)), ids, torch.ones(6, 2, 1), states, 2)
    assert found.everywhere == [0.5, pytest.approx(1 / 6, abs=1e-4)]
    assert found.at_round_starts == pytest.approx([2 / 3, 1 / 3], abs=1e-4)  # rounds start at 0, 3 and 5
    assert found.tokens_per_target_call == pytest.approx(2.0, abs=1e-4)
