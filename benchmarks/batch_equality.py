"""Do rows of a batch say what they say alone? From the record of a bench with several batch sizes.

    specdec bench --target smollm2 --dtype float32 --batch-size 1,8 -m prompt_lookup --output batches.jsonl
    python benchmarks/batch_equality.py batches.jsonl

Greedy decoding in float32 promises it, and sampling with a seed, but for the second and later copies of a
prompt, which have seeds of their own. Prints a JSON object for each method; exits with 1 where ids differ.
"""

from __future__ import annotations

import json
import sys

from specdec_core.bench.record import Record

Key = tuple[str, float, str]  # method, temperature, prompt


def texts(record: Record) -> dict[Key, dict[tuple[int, int], list[int]]]:
    """Give by batch size and repeat, smallest first, the ids that a method gave for a prompt's first copy."""
    found: dict[Key, dict[tuple[int, int], list[int]]] = {}
    for unit in sorted(record.of("unit"), key=lambda unit: (unit["batch"], unit["repeat"])):
        for method, run in unit["runs"].items():
            for prompt, ids in zip(unit["prompts"], run["token_ids"], strict=True):
                runs = found.setdefault((method, unit["temperature"], prompt), {})
                runs.setdefault((unit["batch"], unit["repeat"]), ids)  # copies come later
    return found


def main(file: str) -> int:
    """Compare all batch sizes with the smallest."""
    different: dict[str, list[str]] = {}
    for (method, temperature, prompt), runs in texts(Record(file)).items():
        expected = next(iter(runs.values()))
        different.setdefault(method, []).extend(
            f"{prompt} at batch {batch}, repeat {repeat}, temperature {temperature:g}"
            for (batch, repeat), ids in runs.items()
            if ids != expected
        )
    for method, names in different.items():
        print(json.dumps({"method": method, "different": names}))
    return 1 if any(different.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
