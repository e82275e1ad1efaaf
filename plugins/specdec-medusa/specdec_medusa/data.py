"""What heads are trained on: prompts that the target answers itself, or texts as they are.

A line of a JSON-lines file has `prompt` (a text; a chat message where the target has a chat template) or
`messages`, and is answered by the target; or `text`, which is taken as it is. Other files are prompts, one a
line.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_core import SamplingParams, SpecdecError, SpecDecoder, UsageError

_OTHER_TASKS = 1 << 20  # apart from the seeds of single samples


@dataclass(frozen=True)
class Sample:
    """Token ids, of which those from `start` on are to be guessed."""

    ids: list[int]
    start: int


@dataclass(frozen=True)
class Line:
    """One line of the data: a prompt to answer, or a text."""

    prompt: Any = None
    text: str | None = None


def read_lines(file: Path | None, tokenizer: Any, seed: int) -> list[Line]:
    """Read the data, in a random order; without a file the target talks to itself, from single tokens.

    Raises:
        UsageError: the file is missing, empty, or has a line that says nothing.
    """
    if file is None:
        return []
    if not file.is_file():
        raise UsageError(
            f"data {file} is no file; give JSON lines with prompt, messages or text, or prompts one a line"
        )
    texts = [text for text in file.read_text(encoding="utf-8").splitlines() if text.strip()]
    if not texts:
        raise UsageError(f"data {file} is empty")
    chat = bool(getattr(tokenizer, "chat_template", None))
    as_json = file.suffix in (".json", ".jsonl")
    lines = [_read(text, f"{file}:{i}", chat, as_json) for i, text in enumerate(texts, 1)]
    random.Random(seed).shuffle(lines)
    return lines


def _read(text: str, where: str, chat: bool, as_json: bool) -> Line:
    found: Any = {"prompt": text}
    if as_json:
        try:
            found = json.loads(text)
        except ValueError as error:
            raise UsageError(f"data {where} is no JSON: {str(error).splitlines()[0]}") from error
    if isinstance(found, dict):
        if isinstance(whole := found.get("text"), str) and whole:
            return Line(text=whole)
        if isinstance(messages := found.get("messages"), list) and messages:
            asked = messages[:-1] if messages[-1].get("role") == "assistant" else messages
            return Line(prompt=asked)
        if isinstance(prompt := found.get("prompt"), str) and prompt:
            return Line(prompt=[{"role": "user", "content": prompt}] if chat else prompt)
    raise UsageError(f"data {where} has no `prompt`, `messages` or `text`")


def samples(
    decoder: SpecDecoder,
    lines: Sequence[Line],
    *,
    tokens: int,
    new_tokens: int,
    temperature: float,
    seed: int,
    progress: Callable[[int], object] = lambda done: None,
) -> list[Sample]:
    """Collect sequences until `tokens` tokens are there to be guessed; prompts are answered by the target.

    Raises:
        UsageError: no line gave anything.
    """
    made, done = [], 0
    for sequence in _made(decoder, lines, tokens, new_tokens, temperature, seed):
        if len(sequence.ids) - sequence.start < 3:
            continue  # nothing that a head could guess
        made.append(sequence)
        done += len(sequence.ids) - sequence.start
        progress(done)
        if done >= tokens:
            break
    if len(made) < 2:
        raise UsageError(
            "the data gave less than two sequences of three tokens; give more prompts, or longer ones"
        )
    return made


def _made(
    decoder: SpecDecoder,
    lines: Sequence[Line],
    tokens: int,
    new_tokens: int,
    temperature: float,
    seed: int,
) -> Iterator[Sample]:
    if not lines:
        lines, temperature = _from_single_tokens(decoder, tokens, seed), temperature or 1.0
    limit, tokenizer = decoder.target.context_limit, decoder.tokenizer
    for line in lines:
        if line.text is not None and tokenizer is not None:
            yield Sample(list(tokenizer(line.text)["input_ids"])[:limit], 1)
    requests = (
        (i, s.prompt, SamplingParams(max_new_tokens=new_tokens, temperature=temperature, seed=seed + i))
        for i, s in enumerate(lines)
        if s.prompt is not None
    )
    like = [SamplingParams(max_new_tokens=new_tokens, temperature=temperature, seed=seed)]
    for _, result in decoder.finished(requests, like):
        if isinstance(result, SpecdecError):
            continue  # a prompt that is too long, say
        prompt = list(result.prompt_token_ids)
        yield Sample([*prompt, *result.token_ids], len(prompt))


def _from_single_tokens(decoder: SpecDecoder, tokens: int, seed: int) -> list[Line]:
    draw = random.Random(seed + _OTHER_TASKS)
    return [Line(prompt=[draw.randrange(decoder.target.vocab_size)]) for _ in range(max(64, tokens // 8))]


def save_samples(made: Sequence[Sample], file: Path) -> None:
    """Write sequences as JSON lines."""
    file.write_text(
        "".join(json.dumps({"ids": s.ids, "start": s.start}) + "\n" for s in made), encoding="utf-8"
    )


def load_samples(file: Path) -> list[Sample]:
    """Read what `save_samples` wrote.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        return [Sample(list(row["ids"]), int(row["start"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{file} cannot be read ({str(error).splitlines()[0]}); train anew with another --out"
        ) from error
