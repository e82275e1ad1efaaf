"""Prepare the demo corpus: filter what a model wrote, add tasks made by rule, split off held-out rows.

    python -m tools.demo_models.prepare_data CORPUS.jsonl.xz OUT [--rule-rows N] [--seed S]

Writes OUT/train.jsonl and OUT/heldout.jsonl. The split goes by a hash of the prompt (for rows made from a
passage, of the prompt that the passage answered), so that it is the same in every run and no held-out text
stands in a training prompt.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tools.demo_models import rule_tasks
from tools.demo_models.rows import WRITTEN, Row, number_of, read_rows, write_rows

ODD = re.compile(r"[^\x20-\x7e\né°£€]|https?:|www\.|\S@\S+\.\w|\d{3}[-. ]\d{4}")
PLAIN = str.maketrans(
    {"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-"}
)
BLOCK = re.compile(r"```(?:python)?\n(.*?)```", re.DOTALL)
PASSAGE = re.compile(r"[^.!?]+[.!?]")


def parses(answer: str) -> bool:
    """Tell whether there is code, and all of it is Python."""
    blocks = BLOCK.findall(answer)
    try:
        return bool(blocks) and all(ast.parse(block) for block in blocks)
    except (SyntaxError, ValueError):
        return False


def distinct_share(text: str, n: int = 4) -> float:
    """Share of word n-grams that differ from each other."""
    words = text.split()
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def keeps(row: Row) -> bool:
    """Tell whether a row is fit for training."""
    if ODD.search(row["prompt"]) or ODD.search(row["answer"]):
        return False
    if row["kind"] == "code":
        return parses(row["answer"])
    return distinct_share(row["answer"]) > 0.88


def plain(row: Row) -> Row:
    """Write typographic quotes and dashes plainly."""
    return {
        "kind": row["kind"],
        "prompt": row["prompt"].translate(PLAIN),
        "answer": row["answer"].translate(PLAIN),
    }


def unique(rows: Iterable[Row]) -> list[Row]:
    """Drop rows whose answer was seen before."""
    return list({row["answer"]: row for row in rows}.values())


def owners(rows: Sequence[Row]) -> list[str]:
    """Name, for each row, the prompt that its text goes back to."""
    sources = [row for row in rows if row["kind"] != "edit"]
    ends, text, total = [], "", 0
    for row in sources:
        text += row["answer"].replace("\n", " ") + "\0"
        total = len(text)
        ends.append(total)
    return [_owner(row, sources, ends, text) for row in rows]


def _owner(row: Row, sources: Sequence[Row], ends: Sequence[int], text: str) -> str:
    if row["kind"] != "edit":
        return row["prompt"]
    at = text.find(row["prompt"].split("\n\n", 1)[-1])
    if at < 0:
        return row["prompt"]
    return sources[next(i for i, end in enumerate(ends) if end > at)]["prompt"]


def split(rows: Sequence[Row], share: float) -> tuple[list[Row], list[Row]]:
    """Hold out the prompts with the lowest hashes of a kind, and the edits of what was answered to them."""
    held: set[str] = set()
    for kind in ("story", "qa", "help", "code"):
        prompts = sorted({row["prompt"] for row in rows if row["kind"] == kind}, key=number_of)
        held.update(prompts[: max(12, round(share * len(prompts)))])
    train: list[Row] = []
    heldout: list[Row] = []
    for row, owner in zip(rows, owners(rows), strict=True):
        (heldout if owner in held else train).append(row)
    return train, heldout


def passages(rows: Iterable[Row], rng: random.Random) -> list[str]:
    """Cut passages of one to four sentences out of stories and answers, and short functions out of code."""
    found = []
    for row in rows:
        if row["kind"] == "code":
            found += [block.strip() for block in BLOCK.findall(row["answer"]) if len(block) < 500]
        elif row["kind"] in ("story", "qa"):
            parts = PASSAGE.findall(row["answer"].replace("\n", " "))
            first = rng.randrange(max(1, len(parts) - 2))
            found.append("".join(parts[first : first + rng.randint(1, 4)]).strip())
    return [text for text in found if 40 < len(text) < 500]


def ruled(rows: Iterable[Row], number: int, rng: random.Random) -> list[Row]:
    """Make tasks by rule from the passages of some rows."""
    kinds, weights = list(rule_tasks.SHARES), list(rule_tasks.SHARES.values())
    texts = passages(rows, rng)
    drawn = rng.choices(kinds, weights, k=number)
    return [rule_tasks.make(kind, rng, texts) for kind in drawn]


def main() -> None:
    """Prepare both files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rule-rows", type=int, default=24000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    written = [plain(row) for row in read_rows(args.corpus) if row["kind"] in WRITTEN]
    train, heldout = split(unique(filter(keeps, written)), 0.03)
    train += ruled(train, args.rule_rows, rng)
    asked = {row["prompt"] for row in train}
    heldout += [row for row in ruled(heldout, 400, rng) if row["prompt"] not in asked]
    args.out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("heldout", heldout)):
        rng.shuffle(rows)
        write_rows(args.out / f"{name}.jsonl", rows)
        print(name, sum(len(r["prompt"]) + len(r["answer"]) for r in rows), Counter(r["kind"] for r in rows))


if __name__ == "__main__":
    main()
