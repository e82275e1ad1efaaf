"""What is drafted, compared with the rule as it is written down, over texts in plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core import Budget, Constraint, Draft, Rows, SamplingParams
from specdec_suffix import Suffix, SuffixConfig
from specdec_suffix.index import DEPTH


class HostContext:
    """The part of a `Context` that drafters on the host read."""

    def __init__(
        self, rows: Sequence[int], texts: Sequence[list[int]], params: SamplingParams | None = None
    ) -> None:
        self.rows, self.device, self._texts = tuple(rows), "cpu", texts
        self.params = (params or SamplingParams(),) * len(self.rows)

    def row_tokens(self, i: int) -> list[int]:
        return self._texts[i]

    def legal(self, i: int, tokens: Sequence[int]) -> int:
        return next((n for n, token in enumerate(tokens) if token == 9), len(tokens))  # 9 is forbidden

    def forced(self, i: int, limit: int) -> list[int]:
        return []


def made(**options: Any) -> Suffix:
    return Suffix(SuffixConfig(**options))


def admit(drafter: Suffix, row: int, prompt: Sequence[int]) -> None:
    drafter.admit(Rows((row,), (0,), (tuple(prompt),), (SamplingParams(),)))


def learned(drafter: Suffix, row: int, prompt: Sequence[int], said: Sequence[int]) -> None:
    """Let a row say something and end, as the loop does."""
    admit(drafter, row, prompt)
    drafter._rows[row].extend(said)
    drafter.release([row])


def propose(drafter: Suffix, text: list[int], depth: int = 8, nodes: int = 64, row: int = 99) -> list[Any]:
    """Draft for one row: (token, parent, score) of each node."""
    if row not in drafter._rows:
        admit(drafter, row, text)
    draft = drafter.propose(HostContext([row], [text]), Budget([depth], nodes))  # type: ignore[arg-type]
    return nodes_of(draft)


def nodes_of(draft: Draft) -> list[Any]:
    if not draft.nodes:
        return []
    assert draft.scores is not None
    return list(
        zip(draft.tokens[0].tolist(), draft.parents[0].tolist(), draft.scores[0].tolist(), strict=True)
    )


def chain(drafter: Suffix, text: list[int], depth: int = 8) -> list[int]:
    return [token for token, _, _ in propose(drafter, text, depth)]


# --- the rule, by search --------------------------------------------------------------------------


def occurrences(text: list[int], others: list[tuple[list[int], int]], options: Any) -> list[Any]:
    """(text, where, match) of the latest occurrences in the text itself, then in others, the latest first."""
    found = []
    for pool in ([(text, 0)], others):
        places = [(one, at) for one, first in pool for at in range(first, len(one))]
        lengths = [match_of(one[:at], text, options["max_match"]) for one, at in places]
        nearest = min(max(lengths, default=0), DEPTH)
        latest = [i for i, n in enumerate(lengths) if n >= nearest][-options["window"] :]
        most = max((lengths[i] for i in latest), default=0)
        if nearest < min(DEPTH, options["max_match"]):
            most = nearest
        if most:
            found += [(*places[i], most) for i in reversed(latest) if lengths[i] >= most]
    return found


def match_of(context: list[int], text: list[int], most: int) -> int:
    n = 0
    while n < min(most, len(context), len(text)) and context[-1 - n] == text[-1 - n]:
        n += 1
    return n


def naive(
    text: list[int], others: list[tuple[list[int], int]], depth: int, nodes: int, options: Any
) -> list[Any]:
    """Take the most probable of all candidate nodes, again and again."""
    drafted: list[Any] = []
    groups = {-1: (occurrences(text, others, options), [], 1.0)}
    candidates: dict[tuple[int, int], float] = {}  # (parent, token) -> score, in the order of preference

    def look(node: int) -> None:
        group, path, score = groups[node]
        if not group or len(path) >= min(depth, ceil(options["alpha"] * max(m for _, _, m in group))):
            return
        weights: dict[int, int] = {}
        for one, at, m in group:
            token = (one + path if one is text else one)[at + len(path) :][:1]
            if token:
                weights[token[0]] = weights.get(token[0], 0) + (m + len(path)) ** 2
        total = sum(weights.values()) + max(m for _, _, m in group) + len(path)
        ranked = sorted(weights, key=lambda token: -weights[token])
        for token in ranked if options["tree"] else ranked[:1]:
            if score * weights[token] / total >= options["min_probability"]:
                candidates[node, token] = score * weights[token] / total

    look(-1)
    while candidates and len(drafted) < nodes:
        parent, token = max(candidates, key=lambda key: (candidates[key], -key[0]))
        score = candidates.pop((parent, token))
        group, path, _ = groups[parent]
        follow = [
            g for g in group if (g[0] + path if g[0] is text else g[0])[g[1] + len(path) :][:1] == [token]
        ]
        groups[len(drafted)] = (follow, [*path, token], score)
        drafted.append((token, parent, pytest.approx(score, rel=1e-5)))
        look(len(drafted) - 1)
    return drafted


tokens = st.integers(0, 2)


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.lists(tokens, min_size=1, max_size=20),
    steps=st.lists(st.lists(tokens, min_size=1, max_size=5), max_size=4),
    ended=st.lists(
        st.tuples(st.lists(tokens, min_size=1, max_size=5), st.lists(tokens, max_size=15)), max_size=5
    ),
    tree=st.booleans(),
    alpha=st.sampled_from([0.5, 1.0, 3.0]),
    floor=st.sampled_from([0.0, 0.1, 0.4]),
    window=st.integers(1, 6),
    max_match=st.sampled_from([1, 3, 32]),
    shared=st.booleans(),
)
def test_drafts_are_what_the_rule_says(
    prompt: list[int],
    steps: list[list[int]],
    ended: list[tuple[list[int], list[int]]],
    tree: bool,
    alpha: float,
    floor: float,
    window: int,
    max_match: int,
    shared: bool,
) -> None:
    options = {
        "tree": tree,
        "alpha": alpha,
        "min_probability": floor,
        "window": window,
        "max_match": max_match,
    }
    drafter = made(**options, shared=shared, nodes=12)
    for row, (before, said) in enumerate(ended):
        learned(drafter, row, before, said)
    others = [(before + said, len(before)) for before, said in ended] if shared else []
    text = list(prompt)
    for step in [[], *steps]:
        text += step
        found = propose(drafter, list(text), depth=6)
        assert found == naive(text, others, 6, 12 if tree else 64, options)


# --- by hand --------------------------------------------------------------------------------------


def test_the_longest_match_wins_and_its_length_bounds_the_draft() -> None:
    text = [1, 2, 3, 7, 6, 5, 4, 3, 8, 8, 8, 8, 8, 1, 2, 3]
    assert chain(made(alpha=1.0, min_probability=0.0), text) == [7, 6, 5]
    assert chain(made(alpha=2.0, min_probability=0.0), text) == [7, 6, 5, 4, 3, 8]
    assert chain(made(alpha=0.3, min_probability=0.0), text) == [7]
    assert chain(made(alpha=9.0, min_probability=0.0), text, depth=2) == [7, 6]
    assert chain(made(alpha=1.0, min_probability=0.0, max_match=1), text) == [8]


def test_scores_are_frequencies_with_room_for_the_unseen() -> None:
    """Twice 5 and once 6 followed a match of one token: 2 / (3 + 1), and 2 of those 2 go on with 0."""
    text = [1, 5, 0, 1, 5, 0, 2, 1, 6, 9, 1]
    first, second, *_ = propose(made(min_probability=0.0), text)
    assert first == (5, -1, pytest.approx(2 / 4))
    assert second == (0, 0, pytest.approx(2 / 4 * 2 * 4 / (2 * 4 + 2)))
    assert propose(made(min_probability=0.51), text) == []


def test_an_ended_row_is_learned_from_unless_shared_is_off() -> None:
    for shared in (True, False):
        drafter = made(shared=shared)
        learned(drafter, 0, [1, 2, 3], [4, 5, 6, 7])
        assert chain(drafter, [8, 8, 8, 2, 3], depth=3) == ([4, 5, 6] if shared else [])
        assert drafter.capabilities.learns == shared


def test_prompts_are_context_but_not_learned() -> None:
    drafter = made()
    learned(drafter, 0, [1, 2, 3], [4, 5])
    assert propose(drafter, [7, 1, 2], row=98) == []  # the 3 stood in a prompt
    assert [token for token, _, _ in propose(drafter, [7, 2, 3], row=99)] == [4, 5]


def test_no_draft_runs_from_one_ended_row_into_the_next() -> None:
    drafter = made(min_probability=0.0)
    learned(drafter, 0, [1], [2, 3])
    learned(drafter, 1, [4], [5, 6])
    assert chain(drafter, [1]) == [2, 3]


@pytest.mark.parametrize("text", [[5], [5, 6], [5, 6, 7, 8]])
def test_without_a_match_there_is_no_draft(text: list[int]) -> None:
    """B42: short prompts, all tokens distinct."""
    assert propose(made(), text) == []
    assert propose(made(tree=True), text) == []


def test_a_text_that_runs_out_goes_on_periodically() -> None:
    """B45."""
    assert chain(made(min_probability=0.0), [1, 2, 3, 1, 2, 3]) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert chain(made(min_probability=0.0, alpha=9.0), [6, 7, 7]) == [7] * 8


def test_a_tree_holds_both_ways_the_likelier_first() -> None:
    text = [1, 2, 5, 1, 2, 6, 1, 2, 5, 3, 1, 2]
    found = propose(made(tree=True, min_probability=0.05), text, depth=2)
    assert found[0][:2] == (5, -1)
    assert {(token, parent) for token, parent, _ in found if parent == -1} == {(5, -1), (6, -1)}
    assert [score for *_, score in found] == sorted((score for *_, score in found), reverse=True)
    assert len(propose(made(tree=True, min_probability=0.0, nodes=3), text)) == 3
    assert len(propose(made(tree=True, min_probability=0.0), text, nodes=2)) == 2


def test_rows_of_one_call_are_drafted_apart() -> None:
    """B55: one without a draft, one with four nodes, one that may not draft."""
    drafter = made(alpha=1.0)
    texts = [[1, 2, 3], [4, 5, 6, 7, 4, 5], [1, 1, 1]]
    for row, text in enumerate(texts):
        admit(drafter, row, text)
    draft = drafter.propose(HostContext([0, 1, 2], texts), Budget([5, 5, 0], 5))  # type: ignore[arg-type]
    assert draft.counts == (0, 2, 0)
    assert draft.tokens[1].tolist() == [6, 7]
    assert draft.parents.tolist() == [[-2, -2], [-1, 0], [-2, -2]]


def test_a_constraint_cuts_the_chain_of_its_row() -> None:
    class Never:
        def matcher(self) -> Any:
            raise NotImplementedError

    constraint: Constraint = Never()
    text = [1, 2, 8, 9, 5, 1, 2]
    drafter = made(tree=True)
    admit(drafter, 0, text)
    context: Any = HostContext([0], [text], SamplingParams(constraint=constraint))
    assert nodes_of(drafter.propose(context, Budget([5], 9)))[0][0] == 8
    assert len(nodes_of(drafter.propose(context, Budget([5], 9)))) == 1


def test_what_was_not_observed_is_read_from_the_context() -> None:
    drafter = made()
    admit(drafter, 0, [1, 2, 3])
    assert propose(drafter, [1, 2, 3, 1, 2], row=0)[0][0] == 3


def test_release_forgets_rows_and_ignores_others() -> None:
    """B90."""
    drafter = made()
    admit(drafter, 3, [1, 2])
    drafter.release([3, 4])
    drafter.release([3])
    assert not drafter._rows
    assert drafter.history.size == 0  # it had said nothing
