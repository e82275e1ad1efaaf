"""A verifier that breaks the contract ends the run with an error that names it; nothing is committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import ScriptedDrafter, base, following, greedy, ids, tiny_llama, tree_draft
from torch import Tensor

from specdec_core import (
    Draft,
    DraftLaw,
    SpecDecoder,
    TargetDistributions,
    Verdict,
    VerifierConfig,
    VerifierError,
)
from specdec_core.checks.verdicts import broken_verdict, checked_verdict

TREE = [(7, -1), (8, -1), (9, 0), (10, 1), (11, 3)]
NODES = len(TREE)


class Says:
    """A verifier that says what it is told."""

    name = "says"
    Config = VerifierConfig
    laws = frozenset(DraftLaw)
    handles_trees = lossless = samples = drafter_invariant = True
    preference = 0

    def __init__(self, verdict: Callable[[], Any]) -> None:
        self.config = VerifierConfig()
        self._verdict = verdict

    def verify(self, p: TargetDistributions, draft: Draft, rng: Any) -> Any:
        return self._verdict()


def checked(verdict: Any, draft: Draft | None = None) -> Any:
    draft = tree_draft([TREE, TREE[:2]]) if draft is None else draft
    p = TargetDistributions(torch.zeros(draft.rows, 1 + draft.nodes, 20))
    return checked_verdict(Says(lambda: verdict), p, draft, None)  # type: ignore[arg-type]


def path(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


TWO = torch.tensor([3, 4])


@pytest.mark.parametrize(
    "rows",
    [
        ([-1], [-1]),
        ([0, 2], [1, -1]),
        ([1, 3, 4], [0, -1, -1]),
        ([1, 3, 4, -1, -1, -1, -1], [-1] * 7),
        ([], []),
    ],
)
def test_a_path_from_the_root_down_passes(rows: Any) -> None:
    found = checked(Verdict(torch.tensor(rows, dtype=torch.int64).view(2, -1), TWO))
    assert found.flags.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ([2], "not a child of the root"),
        ([0, 3], "a child of another node"),
        ([0, 0], "the same node twice"),
        ([-1, 0], "behind a gap"),
        ([0, -1, 2], "a gap in the middle"),
        ([5], "no such node"),
        ([10**12], "no such node"),
        ([-2], "below -1"),
        ([1, 3, 4, -1, -1, 0], "longer than the draft"),
    ],
)
def test_a_path_that_is_none_is_flagged_in_its_row(row: list[int], why: str) -> None:
    found = checked(Verdict(path([-1] * len(row), row), TWO), tree_draft([TREE, TREE]))
    assert found.flags.tolist() == [0, 1], why
    assert (found.path >= -1).all()
    assert (found.path < NODES).all()
    error = broken_verdict(Says(lambda: None), 1)  # type: ignore[arg-type]
    assert str(error).startswith("verifier 'says' broke the contract: its verdict has a path that")


def test_a_hole_is_no_node() -> None:
    draft = tree_draft([TREE, TREE[:2]])  # the second row's last nodes are holes
    assert checked(Verdict(path([0], [2]), TWO), draft).flags.tolist() == [0, 1]


@pytest.mark.parametrize("token", [-1, 20, 10**12])
def test_a_next_token_lies_in_the_vocabulary(token: int) -> None:
    found = checked(Verdict(path([-1], [-1]), torch.tensor([19, token])))
    assert found.flags.tolist() == [0, 2]
    assert 0 <= int(found.next_token[1]) < 20
    error = broken_verdict(Says(lambda: None), 2)  # type: ignore[arg-type]
    assert "a next token outside the vocabulary" in str(error)


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (None, "verify must return a Verdict, not NoneType"),
        (Verdict(path([-1]), TWO), r"`path` must be int64 \[2, d\], not int64 \[1, 1\]"),
        (Verdict(path([-1], [-1]).int(), TWO), r"`path` must be int64 \[2, d\], not int32 \[2, 1\]"),
        (Verdict(TWO, TWO), r"`path` must be int64 \[2, d\], not int64 \[2\]"),
        (Verdict(path([-1], [-1]), TWO[:, None]), r"`next_token` must be int64 \[2\], not int64 \[2, 1\]"),
        (Verdict(path([-1], [-1]), TWO.float()), r"`next_token` must be int64 \[2\], not float32 \[2\]"),
        (Verdict([[-1], [-1]], TWO), r"`path` must be int64 \[2, d\], not list"),  # type: ignore[arg-type]
        (Verdict(path([-1], [-1]).to("meta"), TWO), "`path` must be on cpu, not on meta"),
    ],
)
def test_what_is_no_verdict_is_refused_at_once(verdict: Any, words: str) -> None:
    with pytest.raises(VerifierError, match=f"verifier 'says' broke the contract: {words}") as caught:
        checked(verdict)
    assert caught.value.verifier == "says"
    assert caught.value.rule


def test_what_a_verifier_raises_is_named() -> None:
    def fails() -> Any:
        raise IndexError("index 9 is out of bounds")

    decoder = SpecDecoder(tiny_llama(), verifier=Says(fails))
    with pytest.raises(VerifierError, match="verifier 'says': verify raised IndexError: index 9"):
        decoder.generate([1, 2, 3], greedy(3))


def test_a_run_ends_before_a_wrong_verdict_is_committed() -> None:
    """And the decoder serves the next call."""
    model, prompt = tiny_llama(), ids(5)
    said = base(model, prompt, 12)
    verdicts = [Verdict(path([0, 1]), torch.tensor([said[2]])), Verdict(path([1]), torch.tensor([0]))]
    told = iter(verdicts)
    drafter = ScriptedDrafter(lambda ask: following([*prompt, *said])(ask.tokens, 2))
    decoder = SpecDecoder(model, drafter=drafter, verifier=Says(lambda: next(told)), draft_tokens=None)
    rounds = decoder.rounds(prompt, greedy(12))
    assert next(rounds).outcome.tokens == (said[:3],)
    with pytest.raises(VerifierError, match="'says' broke the contract"):
        next(rounds)
    assert not drafter.now
    told = iter([Verdict(torch.empty((1, 0), dtype=torch.int64), torch.tensor([said[0]]))])
    assert decoder.generate(prompt, greedy(1)).token_ids == said[:1]
