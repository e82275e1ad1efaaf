"""`tree_top2`: trees level by level, and their budgets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafting import Recorded, cousin, nodes_of, plain, says, small, tree
from support import ids, markov_llama, next_logits

from specdec_core import (
    HOLE,
    Budget,
    Context,
    Draft,
    DraftLaw,
    InvalidSpec,
    Registry,
    SamplingParams,
    SpecDecoder,
    UsageError,
)
from specdec_core.model.probe import Probe
from specdec_core.testing.models import tiny_model
from specdec_drafters.tree_top2 import level_sizes


def first_draft(
    drafter: Any, target: Any, prompts: list[list[int]], params: Any, k: int | None = None
) -> Draft:
    """What is proposed in the first round."""
    recorded = Recorded(drafter)
    decoder = SpecDecoder(target, drafter=recorded, draft_tokens=k, verifier="match", strict=True)
    rounds = decoder.rounds(prompts, params)
    next(rounds)
    rounds.close()
    return recorded.raw[0]


def test_the_shape_by_default() -> None:
    drafter = tree(layer=1)
    can = drafter.capabilities
    assert (can.max_depth, can.nodes, can.makes_trees, can.laws) == (3, 14, True, {DraftLaw.ONE_HOT})
    assert tree(layer=1, depth=2, width=3).capabilities.nodes == 12
    assert tree(layer=1, children="sampled").capabilities.laws == {DraftLaw.WITHOUT_REPLACEMENT}


def test_children_are_the_likeliest_tokens_in_order() -> None:
    target = tiny_model("llama")
    draft_model, prompts = cousin(target), [ids(3), ids(4)]
    draft = first_draft(tree(draft_model), target, prompts, SamplingParams(max_new_tokens=20))
    assert draft.parents.tolist() == [[-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]] * 2
    assert (draft.depth, draft.width, draft.probs) == (3, 2, None)
    for row, prompt in enumerate(prompts):
        paths, scores = {-1: prompt}, {-1: 1.0}
        for node, (token, parent) in enumerate(nodes_of(draft, row)):
            q = next_logits(draft_model, paths[parent]).softmax(-1)
            assert token == q.topk(2).indices[node % 2]
            paths[node], scores[node] = [*paths[parent], token], scores[parent] * float(q[token])
            assert draft.scores is not None
            assert float(draft.scores[row, node]) == pytest.approx(scores[node], rel=1e-3)


def test_depth_one_and_width_one_and_others() -> None:
    target, prompt = tiny_model("llama"), ids(5)
    for depth, width in ((1, 1), (1, 4), (4, 1), (2, 3), (4, 2)):
        decoder = SpecDecoder(
            target, drafter=tree(cousin(target), depth=depth, width=width), strict=True, draft_tokens=None
        )
        assert says(decoder, [prompt], 20) == [plain(target, tuple(prompt), 20)]


def test_more_nodes_than_depth_are_drafted_and_counted() -> None:
    target = tiny_model("llama")
    decoder = SpecDecoder(target, drafter=tree(cousin(target)), strict=True, draft_tokens=None)
    counts = []
    for done in decoder.rounds([ids(5)], SamplingParams(max_new_tokens=20)):
        counts.append(int((done.draft.parents != HOLE).sum()))
        stats = done.batch.rows[0].stats
    assert counts[0] == 14
    assert set(counts) <= {0, 2, 6, 14}  # towards the end there is room for less
    assert stats.drafted_tokens == sum(counts) > 3 * stats.rounds


class Asking(Recorded):
    """Asks its drafter with another budget than the loop's."""

    def __init__(self, drafter: Any, budget: Budget) -> None:
        super().__init__(drafter)
        self.budget = budget

    def propose(self, context: Context, budget: Budget) -> Draft:
        self.raw.append(self.drafter.propose(context, self.budget))
        return Draft.empty(len(context.rows))


def asked(drafter: Any, budget: Budget) -> list[list[tuple[int, int]]]:
    """The nodes of two rows in their first round."""
    asking = Asking(drafter, budget)
    decoder = SpecDecoder(tiny_model("llama"), drafter=asking, strict=True, draft_tokens=None)
    rounds = decoder.rounds([ids(3), ids(3, 1)], SamplingParams(max_new_tokens=20, seed=1))
    next(rounds)
    rounds.close()
    return [nodes_of(asking.raw[0], row) for row in range(2)]


@pytest.mark.parametrize("children", ["top", "sampled"])
def test_budgets_of_depth_and_nodes(children: str) -> None:
    draft_model = cousin(tiny_model("llama"))

    def made() -> Any:
        return tree(draft_model, children=children, temperature=1.0)

    whole = asked(made(), Budget([3, 3], 14))
    for depth, most in enumerate((0, 2, 6, 14)):
        for nodes in (1, 2, 5, 7, 14, 20):
            first, second = asked(made(), Budget([depth, 3], nodes))
            assert first == whole[0][: min(most, nodes)]  # cut in draw order, and drawn the same
            assert second == whole[1][:nodes]


def test_where_q_runs_out_there_is_a_hole() -> None:
    log_q = torch.full((5, 5), -torch.inf)
    log_q[0, 1] = log_q[1, 2] = log_q[1, 3] = log_q[2, 0] = log_q[3, 0] = 0.0
    log_q[4] = 0.0
    log_q = log_q.clamp(min=-200)  # exp(-200) is no float32: no support
    target = tiny_model("llama", vocab=5)
    drafter = tree(markov_llama(log_q), children="sampled", temperature=1.0)
    draft = first_draft(drafter, target, [[0]], SamplingParams(max_new_tokens=9))
    assert draft.parents[0, :6].tolist() == [-1, HOLE, 0, 0, HOLE, HOLE]
    assert sorted(draft.tokens[0, 2:4].tolist()) == [2, 3]
    assert draft.probs is not None
    assert bool(draft.probs.isfinite().all())
    real = draft.parents[0] != HOLE
    torch.testing.assert_close(draft.probs[0, real].sum(-1), torch.ones(int(real.sum())))


def test_at_temperature_0_a_sampled_tree_is_a_chain() -> None:
    target = tiny_model("llama")
    drafter = tree(target, children="sampled")
    decoder = SpecDecoder(target, drafter=drafter, verifier="tree_mask", strict=True, draft_tokens=None)
    result = decoder.generate(ids(4), SamplingParams(max_new_tokens=21))
    assert result.token_ids == plain(target, tuple(ids(4)), 21)
    assert result.stats.acceptance_rate == 1.0
    assert result.stats.mean_acceptance_length > 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "a", "layer": "1"}, "not with both"),
        ({"depth": "9", "width": "4"}, "more than 512 nodes"),
        ({"depth": "0"}, "depth=0"),
        ({"children": "all"}, "children=all"),
    ],
)
def test_options_that_cannot_be(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidSpec, match=message):
        Registry.discover().build_drafter("tree_top2", options)


def test_without_a_model_it_says_what_to_write() -> None:
    with pytest.raises(UsageError, match="tree_top2:model=ID_OR_PATH, or tree_top2:layer=E"):
        SpecDecoder(tiny_model("llama"), drafter="tree_top2")
    with pytest.raises(UsageError, match="width=9"):
        SpecDecoder(
            tiny_model("llama", vocab=5),
            drafter=tree(tiny_model("llama", vocab=5), width=9, depth=1),
            draft_tokens=None,
        )


def test_models_that_cannot_follow_trees_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_model("llama")
    monkeypatch.setattr(
        "specdec_core.engine.target.probe", lambda runner: Probe(trees=False, reason="it was told to")
    )
    with pytest.raises(UsageError, match="chains only"):
        SpecDecoder(target, drafter=tree(cousin(target)), draft_tokens=None)
    SpecDecoder(target, drafter=small(cousin(target)), draft_tokens=None)


@pytest.mark.parametrize(
    ("width", "depth", "nodes", "sizes"),
    [
        (2, 3, 14, [2, 4, 8]),
        (2, 3, 7, [2, 4, 1]),
        (2, 3, 2, [2]),
        (3, 2, 99, [3, 9]),
        (1, 4, 9, [1, 1, 1, 1]),
    ],
)
def test_level_sizes(width: int, depth: int, nodes: int, sizes: list[int]) -> None:
    assert level_sizes(width, depth, nodes) == sizes
