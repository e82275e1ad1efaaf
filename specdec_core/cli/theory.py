"""`specdec theory`: what a draft length is expected to give."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from specdec_core.cli.exits import Debug
from specdec_core.cli.options import Json, number, whole_number
from specdec_core.cli.report import print_json
from specdec_core.cli.tables import print_table, print_text
from specdec_core.contract.errors import InvalidParameter, UsageError
from specdec_core.length import theory as law

_LONGER = {False: "A larger --draft-tokens shows more.", True: "Give the shares of more depths."}
_SHOWN = 8  # draft lengths in the table, unless a longer one is asked for

Acceptance = Annotated[
    float | None,
    typer.Option(
        metavar="A",
        parser=number,
        help="Chance that a drafted token is accepted, 0 to 1.",
        show_default=False,
    ),
]
ByDepth = Annotated[
    str | None,
    typer.Option(
        metavar="S,S,...",
        help="Instead: the share of rounds that accept a token at depth 1, 2, ..., as acceptance_by_depth in "
        "`specdec run --json`.",
        show_default=False,
    ),
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        metavar="K",
        parser=whole_number,
        help="Draft length to forecast; without it, the best one up to 8.",
        show_default=False,
    ),
]
Cost = Annotated[
    float,
    typer.Option(metavar="C", parser=number, help="Cost of one drafting step, in forwards of the target."),
]


def theory(
    acceptance: Acceptance = None,
    by_depth: ByDepth = None,
    draft_tokens: DraftTokens = None,
    cost: Cost = 0.05,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Forecast tokens a round and speed-up for each draft length (Leviathan et al. 2023)."""
    table = _table(acceptance, by_depth, cost, draft_tokens)
    best = law.best(table)
    chosen = best if draft_tokens is None else table[draft_tokens]
    if as_json:
        print_json(
            {
                **asdict(chosen),
                "acceptance": acceptance,
                "by_depth": _shares(by_depth) if by_depth else None,
                "cost": cost,
                "best_draft_tokens": best.draft_tokens,
                "longer_may_be_better": best is table[-1],
                "table": [asdict(row) for row in table],
            }
        )
        return
    _print(table, chosen, best, cost, by_depth=by_depth is not None)


def _table(
    acceptance: float | None, by_depth: str | None, cost: float, draft_tokens: int | None
) -> list[law.Forecast]:
    if (acceptance is None) == (by_depth is None):
        raise UsageError("give one of --acceptance A and --by-depth S,S,...")
    if draft_tokens is not None and draft_tokens < 0:
        raise InvalidParameter(f"--draft-tokens {draft_tokens}: it must be at least 0")
    if acceptance is not None:
        return law.forecasts(acceptance, cost, max(_SHOWN, draft_tokens or 0))
    table = law.forecasts_by_depth(_shares(by_depth or ""), cost)
    if draft_tokens is not None and draft_tokens >= len(table):
        raise InvalidParameter(
            f"--draft-tokens {draft_tokens}: --by-depth has shares for {len(table) - 1} depths; give more"
        )
    return table


def _shares(by_depth: str) -> list[float]:
    try:
        return [float(share) for share in by_depth.split(",")]
    except ValueError:
        raise InvalidParameter(f"--by-depth {by_depth}: it must be numbers with commas between") from None


def _print(
    table: list[law.Forecast], chosen: law.Forecast, best: law.Forecast, cost: float, *, by_depth: bool
) -> None:
    """Print the forecast in a sentence, and the table."""
    print_text(
        f"k={chosen.draft_tokens}: {chosen.expected_tokens:.2f} tokens a round, {chosen.speedup:.2f}x the "
        f"speed of plain decoding, if a drafting step costs {cost:g} target forwards"
    )
    mark = "best"
    if best is table[-1]:
        mark = "best here"
        print_text(f"The longest draft here is the best: longer ones may be better. {_LONGER[by_depth]}")
    print()
    columns = ("k", "tokens a round", "speed-up", "")
    rows: list[list[Any]] = [
        [
            str(row.draft_tokens),
            f"{row.expected_tokens:.2f}",
            f"{row.speedup:.2f}x",
            mark if row is best else "",
        ]
        for row in table
    ]
    print_table(columns, rows, right=columns[:3])
