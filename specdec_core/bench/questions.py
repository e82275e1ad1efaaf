"""Questions by category: the built-in set, and files in the format of Spec-Bench.

Xia et al. 2024, "Unlocking Efficiency in Large Language Model Inference: A Comprehensive Survey of
Speculative Decoding" (arXiv 2401.07851): one JSON object a line, `{"question_id", "category", "turns"}`.
Where turns hold one list of token ids instead of texts, that is the prompt as it is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from specdec_core.contract.errors import InvalidParameter

BUILT_IN = "built-in"


@dataclass(frozen=True)
class Question:
    """What a user says, turn by turn; or a prompt of given token ids, as the only turn."""

    question_id: str
    category: str
    turns: tuple[str | tuple[int, ...], ...]


def built_in() -> list[Question]:
    """Give the set that ships with specdec: six categories, five prompts each."""
    text = resources.files("specdec_core.bench").joinpath("questions.jsonl").read_text(encoding="utf-8")
    return _parse(text, BUILT_IN)


def read_questions(file: str) -> list[Question]:
    """Read a question file.

    Raises:
        InvalidParameter: it cannot be read, holds nothing, or a line is no question; names the line.
    """
    try:
        text = Path(file).expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InvalidParameter(
            f"--questions {file}: {error.strerror or error}; name a file of JSON lines"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidParameter(
            f"--questions {file}: not UTF-8 text (byte {error.start}); convert it"
        ) from error
    return _parse(text, file)


def select(
    questions: Sequence[Question], categories: Iterable[str] | None = None, limit: int | None = None
) -> list[Question]:
    """Keep these categories, and at most `limit` questions of each, in the order of the file.

    Raises:
        InvalidParameter: a category is not there, or the limit is below 1.
    """
    known = list(dict.fromkeys(question.category for question in questions))
    wanted = known if categories is None else list(categories)
    for name in wanted:
        if name not in known:
            raise InvalidParameter(
                f"--categories {name}: not in these questions; there are {', '.join(known)}"
            )
    if limit is not None and limit < 1:
        raise InvalidParameter(f"--limit {limit}: it must be a whole number of at least 1")
    kept = []
    for name in known:
        if name in wanted:
            kept += [question for question in questions if question.category == name][:limit]
    return kept


def _parse(text: str, name: str) -> list[Question]:
    found: list[Question] = []
    seen: set[str] = set()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        question = _question(line, f"{name} line {number}")
        if question.question_id in seen:
            raise InvalidParameter(
                f"{name} line {number}: question_id {question.question_id} is there twice; number them apart"
            )
        seen.add(question.question_id)
        found.append(question)
    if not found:
        raise InvalidParameter(f"{name} holds no question; give one JSON object a line")
    return found


def _question(line: str, where: str) -> Question:
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise InvalidParameter(f"{where}: no JSON ({error}); give one object a line") from error
    if not isinstance(value, dict):
        raise InvalidParameter(
            f"{where}: {type(value).__name__} is no object; give question_id, category, turns"
        )
    for field in ("question_id", "category", "turns"):
        if field not in value:
            raise InvalidParameter(f"{where}: {field} is missing; give question_id, category and turns")
    turns = _turns(value["turns"])
    if not turns:
        raise InvalidParameter(
            f"{where}: turns must be a list of texts that are not empty, or hold one list of token ids"
        )
    return Question(str(value["question_id"]), str(value["category"]), turns)


def _turns(value: Any) -> tuple[str | tuple[int, ...], ...]:
    """Check the turns of a question; empty if they are none."""
    if not isinstance(value, list):
        return ()
    if all(isinstance(turn, str) and turn for turn in value):
        return tuple(value)
    if len(value) == 1 and isinstance(value[0], list) and value[0] and all(map(_is_id, value[0])):
        return (tuple(value[0]),)
    return ()


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def digest(questions: Sequence[Question]) -> str:
    """Name a list of questions: equal digests, equal questions."""
    return hashlib.sha256(repr(list(questions)).encode()).hexdigest()[:16]
