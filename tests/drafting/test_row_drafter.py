"""A drafter that takes a few lines, and those that return no chain, or change what they are shown."""

from __future__ import annotations

from typing import Any

import pytest
from caught import warnings_of
from support import (
    base,
    greedy,
    ids,
    tiny_llama,
)

from specdec_core import (
    RowDrafter,
    RowDrafterConfig,
    SpecDecoder,
)

PROMPT = ids(7, 31)


class Parrot(RowDrafter):
    """The drafter of the documentation."""

    name = "parrot"

    def propose_row(self, tokens: Any, budget: int) -> list[int]:
        return [tokens[-1]] * budget


class Greedy(RowDrafter):
    """Returns more than it was asked for."""

    name = "greedy_parrot"

    def propose_row(self, tokens: Any, budget: int) -> list[int]:
        return [tokens[-1]] * (budget + 50)


class Texts(RowDrafter):
    """Returns no ids."""

    name = "texts"

    def propose_row(self, tokens: Any, budget: int) -> Any:
        return ["a", "b"]


class Nothing(RowDrafter):
    """Forgets to return."""

    name = "nothing"

    def propose_row(self, tokens: Any, budget: int) -> Any:
        return None


class Scribbler(RowDrafter):
    """Changes the tokens it is shown."""

    name = "scribbler"

    def propose_row(self, tokens: Any, budget: int) -> list[int]:
        tokens += [1, 2, 3]
        return list(tokens[-budget:])


class Painter(RowDrafter):
    """Changes the tokens it is shown, in place."""

    name = "painter"

    def propose_row(self, tokens: Any, budget: int) -> list[int]:
        tokens[0] = 5
        return list(tokens[-budget:])


def test_a_row_drafter_takes_a_few_lines() -> None:
    """B101: the one of the documentation works."""
    model = tiny_llama()
    drafter = Parrot(RowDrafterConfig(num_tokens=4))
    decoder = SpecDecoder(model, drafter=drafter, strict=True, draft_tokens=None)
    result = decoder.generate([[5], PROMPT], greedy(12))
    assert [one.token_ids for one in result] == [base(model, [5], 12), base(model, PROMPT, 12)]
    assert result[0].stats.drafted_tokens > 0


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (Greedy, "more nodes than the budget"),
        (Texts, "propose raised"),
        (Nothing, "propose raised"),
        (Painter, "propose raised TypeError"),
    ],
)
def test_a_row_drafter_that_is_wrong_is_dropped(
    kind: type[RowDrafter], rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    """B102: what it returns is no chain, or it changes what is committed."""
    model = tiny_llama()
    decoder = SpecDecoder(model, drafter=kind(RowDrafterConfig(num_tokens=4)), draft_tokens=None)
    result = decoder.generate(PROMPT, greedy(20))
    assert result.prompt_token_ids == PROMPT
    assert result.token_ids == base(model, PROMPT, 20)
    [warning] = warnings_of(caplog)
    assert f"'{kind.name}'" in warning
    assert rule in warning


def test_the_committed_tokens_are_a_copy_to_whoever_adds_to_them() -> None:
    """B102: `tokens += ...` in a drafter does not reach the output."""
    model = tiny_llama()
    decoder = SpecDecoder(model, drafter=Scribbler(RowDrafterConfig(num_tokens=4)), strict=True)
    result = decoder.generate(PROMPT, greedy(20))
    assert (result.prompt_token_ids, result.token_ids) == (PROMPT, base(model, PROMPT, 20))
    assert result.stats.drafted_tokens > 0
