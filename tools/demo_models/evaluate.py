"""Measure the demo target on held-out rows: bits per byte, distinct 4-grams, exits, copying, samples.

    python -m tools.demo_models.evaluate TARGET train.jsonl heldout.jsonl [--samples FILE.md]

Prints Markdown tables. Bits per byte are compared with a 5-gram model over the same tokens, trained on the
same rows in the same chat format; the markers' bits count, their bytes do not.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec_core import SamplingParams, SpecDecoder
from specdec_core.model.loading import load_model
from tools.demo_models.forward import hidden_states, logits
from tools.demo_models.ngram import KneserNey
from tools.demo_models.rows import BY_RULE, KINDS, WRITTEN, Row, as_text, chat_prompt, read_rows

PROMPTS, TOKENS = 10, 128


def of_kind(rows: Iterable[Row], kinds: Sequence[str], most: int) -> list[Row]:
    """Choose the first rows of some kinds, no prompt twice."""
    return list({row["prompt"]: row for row in rows if row["kind"] in kinds}.values())[:most]


def encoded(rows: Iterable[Row], tokenizer: Any) -> list[list[int]]:
    """Give the ids of rows in chat format."""
    return [tokenizer(as_text(row, 0))["input_ids"] for row in rows]


def model_bits(model: Any, ids: Sequence[int]) -> float:
    """Give the bits of a document behind its first token."""
    whole, last = torch.tensor([ids]), len(model.model.layers)
    with torch.inference_mode():
        states = hidden_states(model, whole[:, :-1], torch.float32, (last,))
        lost = torch.nn.functional.cross_entropy(
            logits(model, states[last])[0], whole[0, 1:], reduction="sum"
        )
    return float(lost / np.log(2))


def bits_table(model: Any, tokenizer: Any, train: list[Row], heldout: list[Row], most: int) -> Iterable[str]:
    """Compare bits per byte, by kind, for kinds written by a model and for those made by rule."""
    ngram = KneserNey(encoded(train, tokenizer), len(tokenizer))
    yield "| kind | rows | bytes | 5-gram | target | ratio |\n|---|---|---|---|---|---|"
    heldout = [row for kind in KINDS for row in of_kind(heldout, (kind,), most)]
    groups = {kind: (kind,) for kind in KINDS} | {
        "all written": WRITTEN,
        "all by rule": BY_RULE,
        "all": KINDS,
    }
    for name, kinds in groups.items():
        rows = of_kind(heldout, kinds, len(heldout))
        documents = encoded(rows, tokenizer)
        size = sum(len((row["prompt"] + row["answer"]).encode()) for row in rows)
        other = sum(float(ngram.bits(ids)[1:].sum()) for ids in documents) / size
        own = sum(model_bits(model, ids) for ids in documents) / size
        yield f"| {name} | {len(rows)} | {size} | {other:.3f} | {own:.3f} | {own / other:.2f} |"


def distinct_share(ids: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that differ from each other; 1 for a text that is too short to have any."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def variety_table(decoder: SpecDecoder, tokenizer: Any, heldout: list[Row], seed: int) -> Iterable[str]:
    """Compare the shares of distinct 4-grams in held-out answers, samples and greedy text."""
    yield "| kind | held-out | temperature 1 | temperature 0.8 | greedy |\n|---|---|---|---|---|"
    sums = np.zeros(4)
    for kind in KINDS:
        rows = of_kind(heldout, (kind,), PROMPTS)
        texts = [[tokenizer(row["answer"])["input_ids"][:TOKENS] for row in rows]]
        texts += [answers(decoder, rows, temperature, seed) for temperature in (1.0, 0.8, 0.0)]
        shares = np.array([np.mean([distinct_share(ids) for ids in part]) for part in texts])
        sums += shares / len(KINDS)
        yield f"| {kind} | " + " | ".join(f"{share:.3f}" for share in shares) + " |"
    yield "| mean | " + " | ".join(f"{share:.3f}" for share in sums) + " |"


def answers(decoder: SpecDecoder, rows: Sequence[Row], temperature: float, seed: int) -> list[list[int]]:
    """Generate for the prompts of rows, in chat format."""
    params = SamplingParams(max_new_tokens=TOKENS, temperature=temperature, seed=seed)
    return [
        result.token_ids for result in decoder.generate([chat_prompt(row["prompt"]) for row in rows], params)
    ]


def exits_table(model: Any, tokenizer: Any, heldout: list[Row]) -> Iterable[str]:
    """Tell how often each exit's likeliest token is the whole target's, over held-out answers."""
    layers = len(model.model.layers)
    yield "| kind | " + " | ".join(f"layer {i}" for i in range(1, layers)) + " |\n" + "|---" * layers + "|"
    for kind in KINDS:
        same, total = np.zeros(layers - 1), 0
        for row in of_kind(heldout, (kind,), PROMPTS):
            first = len(tokenizer(chat_prompt(row["prompt"]))["input_ids"])
            ids = torch.tensor([tokenizer(as_text(row, 0))["input_ids"]])
            with torch.inference_mode():
                states = hidden_states(model, ids, torch.float32, range(1, layers + 1))
                best = [logits(model, states[i])[0, first - 1 :].argmax(-1) for i in range(1, layers + 1)]
            same += [int((part == best[-1]).sum()) for part in best[:-1]]
            total += len(best[-1])
        yield f"| {kind} | " + " | ".join(f"{share:.2f}" for share in same / total) + " |"


def right_table(decoder: SpecDecoder, heldout: list[Row]) -> Iterable[str]:
    """Count the held-out tasks made by rule that the greedy answer gets exactly right."""
    yield "| kind | right | of | mean share right before the first fault |\n|---|---|---|---|"
    for kind in BY_RULE:
        rows = of_kind(heldout, (kind,), 2 * PROMPTS)
        params = SamplingParams(max_new_tokens=256)
        results = decoder.generate([chat_prompt(row["prompt"]) for row in rows], params)
        pairs = [(result.text, row["answer"]) for result, row in zip(results, rows, strict=True)]
        prefix = np.mean([_common(text, answer) / len(answer) for text, answer in pairs])
        yield f"| {kind} | {sum(a == b for a, b in pairs)} | {len(rows)} | {prefix:.2f} |"


def _common(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def samples(decoder: SpecDecoder, tokenizer: Any, heldout: list[Row], seed: int) -> Iterable[str]:
    """Show the first held-out prompt of each kind with a greedy and a sampled answer, unedited."""
    for kind in KINDS:
        (row,) = of_kind(heldout, (kind,), 1)
        yield f"### {kind}\n\nPrompt:\n\n{_quoted(row['prompt'])}"
        for name, temperature in (("Greedy", 0.0), ("Temperature 0.8", 0.8)):
            (ids,) = answers(decoder, [row], temperature, seed)
            yield f"{name}:\n\n{_quoted(tokenizer.decode(ids, skip_special_tokens=True))}"


def _quoted(text: str) -> str:
    return f"~~~text\n{text}\n~~~\n"


def main() -> None:
    """Print every table; write the samples where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("train", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--rows", type=int, default=1000, help="most rows of a kind for bits per byte")
    parser.add_argument("--samples", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.target, device="cpu", dtype="float32")
    decoder = SpecDecoder(model, tokenizer, drafter="none", max_batch=PROMPTS)
    train, heldout = read_rows(args.train), read_rows(args.heldout)
    tables = (
        ("Greedy answers that are exactly right", right_table(decoder, heldout)),
        ("Exits that agree with the target", exits_table(model, tokenizer, heldout)),
        ("Bits per byte", bits_table(model, tokenizer, train, heldout, args.rows)),
        ("Distinct 4-grams", variety_table(decoder, tokenizer, heldout, args.seed)),
    )
    for title, lines in tables:
        print(f"\n### {title}\n")
        for line in lines:
            print(line, flush=True)
    if args.samples:
        args.samples.write_text("\n".join(samples(decoder, tokenizer, heldout, args.seed)), encoding="utf-8")


if __name__ == "__main__":
    main()
