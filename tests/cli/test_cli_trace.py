"""`--trace`: rounds as they read without colours."""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from types import SimpleNamespace
from typing import Any

import cli_support
import torch
from cli_support import byte_tokenizer, cli
from rich.console import Console

from specdec_core import HOLE, ROOT, Draft, DraftLaw
from specdec_core.cli.trace import Trace, token_text

model = cli_support.model
TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text)["input_ids"]
    return found


def a_round(tokens: str, parents: Sequence[int], path: Sequence[int], committed: str) -> Any:
    """A round of one row, as the trace sees it."""
    drafted = torch.tensor([ids(tokens)], dtype=torch.int64).reshape(1, -1)
    draft = Draft.of(drafted, torch.tensor([list(parents)]), DraftLaw.ONE_HOT, depth=3, width=2)
    return SimpleNamespace(
        draft=draft, outcome=SimpleNamespace(paths=(list(path),), tokens=(ids(committed),))
    )


def traced(*rounds: Any, width: int = 80, colours: bool = False) -> list[str]:
    """The lines of a trace, the legend left out."""
    out = StringIO()
    colour = "standard" if colours else None
    console = Console(file=out, width=width, force_terminal=colours, color_system=colour, highlight=False)  # type: ignore[arg-type]
    trace = Trace(TOKENIZER, console)
    for done in rounds:
        trace(done)
    return out.getvalue().splitlines()[1:]


def test_a_rejected_token_and_the_one_that_replaced_it() -> None:
    lines = traced(a_round("abcd", [ROOT, 0, 1, 2], [0, 1], "abx"))
    assert lines == ["    1   2/4  +'a' +'b' -'c' -'d' >'x'"]


def test_a_bonus_where_all_was_accepted_and_where_nothing_was_drafted() -> None:
    lines = traced(a_round("ab", [ROOT, 0], [0, 1], "ab "), a_round("", [], [], "\n"))
    assert lines == ["    1   2/2  +'a' +'b' *' '", "    2   0/0  *'\\n'"]


def test_padding_is_no_node() -> None:
    assert traced(a_round("ab.", [ROOT, 0, HOLE], [0], "ax")) == ["    1   1/2  +'a' -'b' >'x'"]


def test_a_path_cut_at_an_eos_adds_nothing() -> None:
    assert traced(a_round("abc", [ROOT, 0, 1], [0, 1], "ab")) == ["    1   2/3  +'a' +'b' -'c'"]


def test_branches_of_a_tree_are_lines() -> None:
    tree = [ROOT, ROOT, 0, 0, 2, 3, 1]
    assert traced(a_round("abcdefg", tree, [0, 2], "acx")) == [
        "    1   2/7  +'a'",
        "               +'c'",
        "                 -'e'",
        "                 >'x'",
        "               -'d' -'f'",
        "             -'b' -'g'",
    ]


def test_a_tree_whose_trunk_is_a_chain() -> None:
    assert traced(a_round("abcd", [ROOT, 0, 1, 1], [0, 1, 3], "abdx")) == [
        "    1   3/4  +'a' +'b'",
        "               -'c'",
        "               +'d' *'x'",
    ]


def test_a_tree_of_which_nothing_was_accepted() -> None:
    assert traced(a_round("ab", [ROOT, ROOT], [], "x")) == [
        "    1   0/2  -'a'",
        "             -'b'",
        "             >'x'",
    ]


def test_a_long_chain_goes_on_below() -> None:
    lines = traced(a_round("a" * 30, range(ROOT, 29), range(30), "a" * 30 + "b"), width=80)
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith(" " * 15 + "+'a'")
    assert lines[-1].endswith("*'b'")
    assert sum(line.count("+'a'") for line in lines) == 30


def test_colours_say_the_same() -> None:
    [line] = traced(a_round("ab", [ROOT, 0], [0], "ax"), colours=True)
    assert "\x1b[32m+'a'" in line
    assert "\x1b[31m-'b'" in line
    assert "\x1b[1;33m>'x'" in line


def test_tokens_that_are_no_text_are_shown_by_id() -> None:
    part = ids("\u00e9")[0]
    assert token_text(TOKENIZER, part) == f"#{part}"
    assert token_text(TOKENIZER, 99_999) == "#99999"
    assert token_text(TOKENIZER, TOKENIZER.eos_token_id) == "'<end>'"
    assert token_text(TOKENIZER, ids("'")[0]) == '"\'"'


def test_the_space_that_a_sentencepiece_token_begins_with_is_shown() -> None:
    class Pieces:
        def __len__(self) -> int:
            return 1

        def decode(self, *_: Any, **__: Any) -> str:
            return "the"

        def convert_ids_to_tokens(self, token: int) -> str:
            return "\u2581the"

    assert token_text(Pieces(), 0) == "' the'"


def test_a_run_with_a_trace(model: str) -> None:
    done = cli("run", "--target", model, "-p", "abcdefabc", "-n", "5", "--trace")
    assert done.stderr.splitlines()[:3] == [
        "specdec: trace: round, accepted/drafted, + accepted  - rejected  > recovered  * bonus",
        "    1   3/4  +'d' +'e' +'f' -'a' >'g'",
        "    2   0/0  *'h'",
    ]
    assert done.stderr.count("\n") == 4
    assert done.stdout == "defgh\n"
