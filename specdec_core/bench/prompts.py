"""From questions to prompts, the same for every method, and to groups of one batch size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specdec_core.bench.questions import Question
from specdec_core.contract.errors import InvalidParameter
from specdec_core.rows.prompts import encode_prompts

Answer = Callable[[str, tuple[int, ...]], str]  # (prompt's name, its ids) -> what the target says to it


@dataclass(frozen=True)
class BenchPrompt:
    """One prompt: a question, or one turn of it."""

    name: str  # the question's id; `id#2` for a second turn
    category: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Group:
    """Prompts of one category that are generated together."""

    name: str
    category: str
    prompts: tuple[BenchPrompt, ...]
    copies: tuple[int, ...]  # how often each was taken before: a batch may be larger than a category


def wants_chat(chat: bool | None, tokenizer: Any) -> bool:
    """Decide on the chat template: where nothing is said, the tokenizer's own if it has one."""
    return bool(getattr(tokenizer, "chat_template", None)) if chat is None else chat


def make_prompts(
    questions: Sequence[Question], tokenizer: Any, *, chat: bool, most: int | None, answer: Answer
) -> list[BenchPrompt]:
    """Encode every turn of every question as a prompt of its own.

    Earlier turns are answered by `answer`, once, so that every method reads the same.

    most: most tokens of a prompt: what the context limit leaves.

    Raises:
        InvalidParameter: the tokenizer has no chat template, or a prompt is too long.
    """
    made = []
    for question in questions:
        said: list[dict[str, str]] = []
        for number, turn in enumerate(question.turns, start=1):
            name = question.question_id if number == 1 else f"{question.question_id}#{number}"
            if isinstance(turn, str):
                said.append({"role": "user", "content": turn})
                ids = _encoded(said, tokenizer, chat)
            else:
                ids = turn
            if most is not None and len(ids) > most:
                raise InvalidParameter(
                    f"question {name} has {len(ids)} tokens, and the context leaves {most}; leave it out, or "
                    "lower --max-new-tokens"
                )
            made.append(BenchPrompt(name, question.category, ids))
            if number < len(question.turns):
                said.append({"role": "assistant", "content": answer(name, ids)})
    return made


def _encoded(said: Sequence[dict[str, str]], tokenizer: Any, chat: bool) -> tuple[int, ...]:
    text: Any = list(said) if chat else "\n\n".join(message["content"] for message in said)
    (ids,), _ = encode_prompts(text, tokenizer)
    return ids


def make_groups(prompts: Sequence[BenchPrompt], batch: int) -> list[Group]:
    """Group the prompts of each category; the last group is filled up from the category's beginning."""
    groups = []
    for category in dict.fromkeys(prompt.category for prompt in prompts):
        own = [prompt for prompt in prompts if prompt.category == category]
        for start in range(0, len(own), batch):
            places = range(start, start + batch)
            members = tuple(own[place % len(own)] for place in places)
            copies = tuple(place // len(own) for place in places)
            name = members[0].name if batch == 1 else f"{category}/{start // batch + 1}"
            groups.append(Group(name, category, members, copies))
    return groups
