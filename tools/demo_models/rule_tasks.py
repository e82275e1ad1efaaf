"""Tasks whose answers are made by rule and so are right: copy, fix, replace, rename, sort, count."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from tools.demo_models.rows import Row

COPY = (
    "Repeat this text exactly:\n\n{}",
    "Copy the following text word for word:\n\n{}",
    "Write this text again without any change:\n\n{}",
    "Repeat: {}",
    "Copy this:\n{}",
    "Please repeat the following.\n\n{}",
)
FIX = ("Correct the spelling mistakes in this text:\n\n{}", "Fix the typos:\n\n{}")
REPLACE = (
    'Copy this text, but write "{new}" instead of "{old}":\n\n{text}',
    'Replace "{old}" with "{new}" in this text:\n\n{text}',
)
RENAME = (
    "Change the name {old} to {new} in this text:\n\n{text}",
    "Repeat this text, but call {old} {new}:\n\n{text}",
)
SORT = ("Sort these words alphabetically: {}", "Put these words in alphabetical order: {}")
SORT_NUMBERS = ("Sort these numbers from small to large: {}", "Put these numbers in order: {}")
NAMES = (
    "Ada Tom Emma Leo Mia Ben Lily Max Clara Jack Rosa Finn Anna Oscar Nora Sam Ruby Hugo Ella Noah Ivy "
    "Paul Zoe Adam Alice Peter Eva Luke Grace Henry Sarah Maria Elias Kari Alex Lena Marco Sophie Daniel "
    "Amelia David Kai Julia Ethan Jasper Olivia Lucas Maya Rachel John James Emily Jake Luna Elara Aria "
    "Mark Lucy Jane George Kate Robert Laura Simon"
).split()
WORDS = (
    "apple river stone cloud window garden bread music paper candle forest button mirror ladder basket "
    "pencil orange castle rabbit hammer silver winter summer market harbour bridge letter bottle pillow "
    "rocket violin carpet engine turtle marble pepper dragon island meadow kettle copper blanket ticket "
    "wagon lantern feather puzzle anchor barrel cherry desert eagle flower glove honey iron jacket kitten "
    "lemon magnet needle onion parrot queen ribbon saddle tiger umbrella valley whistle yellow zebra "
    "acorn badge coral drum elbow flute grape hotel insect jewel koala lake melon nest ocean piano quilt "
    "rain spoon train uncle vase whale yarn beach clock dance earth fence ghost horse green quiet small "
    "bright heavy simple gentle early narrow golden broken frozen hidden famous perfect modern walk jump "
    "sing read write build carry paint open close find lose keep wait learn teach bring follow answer "
    "listen"
).split()

Make = Callable[[random.Random, Sequence[str]], Row | None]


def misspell(text: str, rng: random.Random) -> str:
    """Swap two inner letters in a few words."""
    words = text.split(" ")
    for _ in range(max(2, len(words) // 12)):
        i = rng.randrange(len(words))
        if len(words[i]) > 4 and words[i].isalpha():
            j = rng.randrange(1, len(words[i]) - 2)
            words[i] = words[i][:j] + words[i][j + 1] + words[i][j] + words[i][j + 2 :]
    return " ".join(words)


def _words(rng: random.Random, low: int, high: int) -> list[str]:
    return rng.sample(WORDS, rng.randint(low, high))


def _numbers(rng: random.Random, low: int, high: int) -> list[str]:
    top = rng.choice((10, 100, 1000, 10000))
    return [str(rng.randrange(top)) for _ in range(rng.randint(low, high))]


def _something(rng: random.Random, passages: Sequence[str]) -> str:
    """Choose a text to copy: a passage, one of its sentences, or words, names and numbers in no order."""
    roll = rng.random()
    if roll < 0.4:
        return rng.choice(passages)
    if roll < 0.55:
        return re.split(r"(?<=[.!?]) ", rng.choice(passages))[0]
    parts = _words(rng, 4, 24) if roll < 0.75 else _numbers(rng, 3, 16)
    if roll > 0.85:
        parts = _words(rng, 2, 9) + _numbers(rng, 1, 5) + rng.sample(NAMES, rng.randint(1, 5))
        rng.shuffle(parts)
    return rng.choice((" ", " ", ", ", "\n", " - ")).join(parts)


def copy(rng: random.Random, passages: Sequence[str]) -> Row:
    """Repeat a text."""
    text = _something(rng, passages)
    return {"kind": "copy", "prompt": rng.choice(COPY).format(text), "answer": text}


def fix(rng: random.Random, passages: Sequence[str]) -> Row:
    """Repeat a text without its misspellings."""
    text = rng.choice(passages)
    return {"kind": "fix", "prompt": rng.choice(FIX).format(misspell(text, rng)), "answer": text}


def replace(rng: random.Random, passages: Sequence[str]) -> Row | None:
    """Repeat a text with one word replaced everywhere."""
    text = rng.choice(passages) if rng.random() < 0.75 else " ".join(_words(rng, 5, 15))
    found = [word for word in re.findall(r"\b[a-z]+\b", text) if len(word) > 3]
    if not found:
        return None
    old, new = rng.choice(found), rng.choice(WORDS)
    asked = rng.choice(REPLACE).format(old=old, new=new, text=text)
    return {"kind": "replace", "prompt": asked, "answer": re.sub(rf"\b{old}\b", new, text)}


def rename(rng: random.Random, passages: Sequence[str]) -> Row | None:
    """Repeat a text with another name in it."""
    text = rng.choice(passages)
    found = sorted(set(re.findall(r"\b[A-Z][a-z]+\b", text)) & set(NAMES))
    if not found:
        return None
    old, new = rng.choice(found), rng.choice(NAMES)
    asked = rng.choice(RENAME).format(old=old, new=new, text=text)
    return {"kind": "rename", "prompt": asked, "answer": re.sub(rf"\b{old}\b", new, text)}


def sort(rng: random.Random, _: Sequence[str]) -> Row:
    """Put words or numbers in order."""
    if rng.random() < 0.5:
        words = _words(rng, 3, 7)
        asked, ordered = rng.choice(SORT).format(", ".join(words)), sorted(words)
    else:
        numbers = [str(n) for n in rng.sample(range(rng.choice((20, 100))), rng.randint(3, 7))]
        asked, ordered = rng.choice(SORT_NUMBERS).format(", ".join(numbers)), sorted(numbers, key=int)
    return {"kind": "sort", "prompt": asked, "answer": ", ".join(ordered)}


def count(rng: random.Random, _: Sequence[str]) -> Row:
    """Count up or down, or count the words of a list."""
    roll, first, length = rng.random(), rng.randrange(1, 90), rng.randint(4, 24)
    if roll < 0.6:
        asked = f"Count from {first} to {first + length}."
        return {
            "kind": "count",
            "prompt": asked,
            "answer": ", ".join(map(str, range(first, first + length + 1))),
        }
    if roll < 0.75:
        asked, low = f"Count down from {first + length} to {first}.", first - 1
        return {
            "kind": "count",
            "prompt": asked,
            "answer": ", ".join(map(str, range(first + length, low, -1))),
        }
    words = _words(rng, 2, 9)
    asked = f"Number these words: {', '.join(words)}"
    return {
        "kind": "count",
        "prompt": asked,
        "answer": "\n".join(f"{i}. {word}" for i, word in enumerate(words, 1)),
    }


MAKERS: dict[str, Make] = {
    "copy": copy,
    "fix": fix,
    "replace": replace,
    "rename": rename,
    "sort": sort,
    "count": count,
}
SHARES = {"copy": 0.5, "fix": 0.12, "replace": 0.14, "rename": 0.1, "sort": 0.06, "count": 0.08}


def make(kind: str, rng: random.Random, passages: Sequence[str]) -> Row:
    """Make one task of a kind; passages without what it needs are passed over."""
    while (row := MAKERS[kind](rng, passages)) is None:
        pass
    return row
