"""Questions and prompts: the built-in set, files, turns, groups."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cli_support import byte_tokenizer

from specdec_core import SpecdecError
from specdec_core.bench.prompts import BenchPrompt, make_groups, make_prompts, wants_chat
from specdec_core.bench.questions import Question, built_in, read_questions, select

CATEGORIES = ["writing", "qa", "summarization", "copying", "code", "maths"]


def test_the_built_in_set_has_six_categories_of_five_prompts() -> None:
    questions = built_in()
    assert Counter(question.category for question in questions) == dict.fromkeys(CATEGORIES, 5)
    assert len({question.question_id for question in questions}) == 30
    assert len({question.turns for question in questions}) == 30


def test_what_is_to_be_copied_is_long_and_does_not_repeat_itself() -> None:
    for question in select(built_in(), ["copying"]):
        source = question.turns[0].partition("\n\n")[2]
        words = re.findall(r"\w+|[^\w\s]", source)
        assert len(words) >= 120
        grams = Counter(zip(*(words[i:] for i in range(4)), strict=False))
        assert max(grams.values()) == 1


def test_a_file_of_spec_bench(tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    lines = [
        {"question_id": 81, "category": "writing", "turns": ["Compose.", "Rewrite."], "reference": ["x"]},
        {"question_id": 82, "category": "qa", "turns": ["Who?"]},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read_questions(str(file)) == [
        Question("81", "writing", ("Compose.", "Rewrite.")),
        Question("82", "qa", ("Who?",)),
    ]


def test_a_prompt_of_token_ids_is_taken_as_it_is(tmp_path: Path) -> None:
    """With a template or without a tokenizer; and two lists of ids are two questions."""
    file = tmp_path / "q.jsonl"
    file.write_text('{"question_id": 1, "category": "c", "turns": [[3, 1, 2]]}')
    questions = read_questions(str(file))
    assert questions == [Question("1", "c", ((3, 1, 2),))]
    for tokenizer, chat in ((byte_tokenizer(), True), (None, False)):
        [made] = make_prompts(questions, tokenizer, chat=chat, most=3, answer=lambda *_: "")
        assert made == BenchPrompt("1", "c", (3, 1, 2))
    with pytest.raises(SpecdecError, match="question 1 has 3 tokens, and the context leaves 2"):
        make_prompts(questions, None, chat=False, most=2, answer=lambda *_: "")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "line 2: no JSON"),
        ("[1]", "line 2: list is no object"),
        ('{"question_id": 2, "turns": ["x"]}', "line 2: category is missing"),
        ('{"question_id": 2, "category": "c", "turns": []}', "line 2: turns must be"),
        ('{"question_id": 2, "category": "c", "turns": "x"}', "line 2: turns must be"),
        ('{"question_id": 2, "category": "c", "turns": [[]]}', "line 2: turns must be"),
        ('{"question_id": 2, "category": "c", "turns": [[1], [2]]}', "line 2: turns must be"),
        ('{"question_id": 2, "category": "c", "turns": ["x", [2]]}', "line 2: turns must be"),
        ('{"question_id": 2, "category": "c", "turns": [[1, -1]]}', "line 2: turns must be"),
        ('{"question_id": 2, "category": "c", "turns": [[true]]}', "line 2: turns must be"),
        ('{"question_id": 1, "category": "c", "turns": ["x"]}', "question_id 1 is there twice"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"question_id": 1, "category": "c", "turns": ["x"]}\n' + line)
    with pytest.raises(SpecdecError, match=re.escape(words)):
        read_questions(str(file))


def test_a_file_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(SpecdecError, match="No such file"):
        read_questions(str(tmp_path / "no"))
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(SpecdecError, match="holds no question"):
        read_questions(str(tmp_path / "empty"))


def test_selection() -> None:
    chosen = select(built_in(), ["maths", "qa"], 2)
    assert [question.question_id for question in chosen] == ["qa-1", "qa-2", "maths-1", "maths-2"]
    with pytest.raises(SpecdecError, match="--categories math: not in these questions; there are writing"):
        select(built_in(), ["math"])
    with pytest.raises(SpecdecError, match="--limit 0"):
        select(built_in(), None, 0)


# --- prompts --------------------------------------------------------------------------------------


def prompts_of(*turns: str, tokenizer: Any = None, chat: bool = True, most: int | None = None) -> list[str]:
    tokenizer = tokenizer or byte_tokenizer()
    made = make_prompts(
        [Question("q", "c", turns)],
        tokenizer,
        chat=chat,
        most=most,
        answer=lambda name, ids: f"{name}:{len(ids)}",
    )
    assert [prompt.name for prompt in made] == ["q", "q#2", "q#3"][: len(turns)]
    return [tokenizer.decode(prompt.ids) for prompt in made]


def test_each_turn_is_a_prompt_behind_the_answers_to_earlier_ones() -> None:
    assert prompts_of("ab", "c") == ["<user>ab:", "<user>ab<assistant>q:9<user>c:"]
    assert prompts_of("ab", "c", chat=False) == ["ab", "ab\n\nq:2\n\nc"]


def test_chat_needs_a_template() -> None:
    bare = byte_tokenizer(template=None)
    assert (wants_chat(None, bare), wants_chat(None, byte_tokenizer())) == (False, True)
    with pytest.raises(SpecdecError, match="no chat template"):
        prompts_of("ab", tokenizer=bare)


def test_a_prompt_that_leaves_no_room_is_named() -> None:
    with pytest.raises(SpecdecError, match="question q has 9 tokens, and the context leaves 8"):
        prompts_of("ab", most=8)


def test_groups_are_of_one_category_and_full() -> None:
    prompts = [BenchPrompt(f"{c}{i}", c, (1,)) for c, n in (("x", 3), ("y", 1)) for i in range(n)]
    groups = make_groups(prompts, 2)
    members = [[prompt.name for prompt in group.prompts] for group in groups]
    assert members == [["x0", "x1"], ["x2", "x0"], ["y0", "y0"]]
    assert [group.copies for group in groups] == [(0, 0), (0, 1), (0, 1)]
    assert [group.name for group in make_groups(prompts, 1)] == ["x0", "x1", "x2", "y0"]
