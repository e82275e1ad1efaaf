"""Many prompts through `specdec run --input`: equal to single runs, faster, and gone on with after a kill.

Prompts of four kinds (copying, questions, code, a single token), 8 to 400 tokens, are made from a seed. They
run at once (`--max-batch`) and one at a time, in processes of their own; ids, text and finish reason of every
row must agree. Then the run is killed half way with SIGKILL and started again: what stood there stays as it
was, and each row is there once. Prints a JSON object; exits with 1 where anything differs.

    python benchmarks/batch_equality.py MODEL_FOLDER --rows 200 --max-new-tokens 64 --dtype float32
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WORDS = (
    "the harbour was quiet when a small boat came in with letters for every house on the hill and the keeper "
    "of the light wrote down its name its cargo and the hour before he went back to his lamp"
).split()
QUESTIONS = (
    "What is the capital of {}?",
    "Explain in one sentence what {} is made of.",
    "List three things to know about {}:",
)
COMMAND = "from specdec_core.cli import main; main()"
SAME = ("token_ids", "text", "finish_reason")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drafter", default="prompt_lookup")
    parser.add_argument("--dtype", default="float32", help="rows equal single runs in float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--temperature", default="0", help="above 0 with `match` and the row's seed")
    parser.add_argument(
        "--folder", type=Path, default=None, help="where files stay; default: a scratch folder"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        report = compare(options, folder)
    print(json.dumps(report, indent=1))
    return 0 if report["ok"] else 1


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all three ways and compare."""
    source = folder / "prompts.jsonl"
    rows = prompts(options.model, options.rows, options.seed)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    together, seconds_together = run(options, source, folder / "together.jsonl", options.max_batch)
    alone, seconds_alone = run(options, source, folder / "alone.jsonl", 1)
    killed = kill_and_go_on(options, source, folder / "killed.jsonl", together)
    different = [i for i in alone if any(alone[i][name] != together[i][name] for name in SAME)]
    tokens = sum(len(row["token_ids"]) for row in alone.values())
    rates = {
        name: {"seconds": round(seconds, 2), "tokens_per_second": round(tokens / max(seconds, 1e-9), 2)}
        for name, seconds in (("together", seconds_together), ("one at a time", seconds_alone))
    }
    return {
        "argv": sys.argv,
        "rows": len(rows),
        "prompt_tokens": spread([row["stats"]["prompt_tokens"] for row in alone.values()]),
        "new_tokens": tokens,
        "max_batch": options.max_batch,
        "throughput": rates,
        "speed_up": round(seconds_alone / max(seconds_together, 1e-9), 3),
        "rows_that_differ": different,
        "killed": killed,
        "ok": not different and len(together) == len(alone) == len(rows) and killed["ok"],
    }


def prompts(model: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Make rows of the four kinds in turn, cut to 8 .. 400 tokens of the target's tokenizer (or one)."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=Path(model).is_dir())
    draw = random.Random(seed)
    kinds = (copying, question, code, single)
    rows = []
    for i in range(count):
        make = kinds[i % len(kinds)]
        ids = tokenizer(make(draw))["input_ids"]
        length = 1 if make is single else min(round(8 * 50 ** draw.random()), 400)
        while len(ids) < length:
            ids = [*tokenizer(make(draw))["input_ids"], *ids]
        rows.append({"id": f"{make.__name__}-{i}", "prompt": ids[-length:], "seed": draw.getrandbits(31)})
    return rows


def copying(draw: random.Random) -> str:
    text = " ".join(draw.choices(WORDS, k=draw.randint(6, 30)))
    return f"Copy this text exactly:\n{text}\nCopy:\n{text[: len(text) // 3]}"


def question(draw: random.Random) -> str:
    return draw.choice(QUESTIONS).format(draw.choice(WORDS)) + "\n"


def code(draw: random.Random) -> str:
    names = draw.sample(WORDS, 4)
    body = "".join(f"    total += {name}\n" for name in names)
    return (
        f"def add_{draw.randrange(100)}({', '.join(names)}):\n    total = 0\n{body}    return total\n\n\ndef "
    )


def single(draw: random.Random) -> str:
    return draw.choice(WORDS)


def arguments(options: argparse.Namespace, source: Path, output: Path, max_batch: int) -> list[str]:
    """The command line of one run."""
    given = {
        "--target": options.model,
        "--device": options.device,
        "--dtype": options.dtype,
        "--drafter": options.drafter,
        "--temperature": options.temperature,
        "--max-new-tokens": options.max_new_tokens,
        "--input": source,
        "--output": output,
        "--max-batch": max_batch,
    }
    return [sys.executable, "-c", COMMAND, "run", *(str(part) for pair in given.items() for part in pair)]


def run(
    options: argparse.Namespace, source: Path, output: Path, max_batch: int
) -> tuple[dict[str, Any], float]:
    """Run to the end; give the rows by id, and the seconds they took, from when everything was loaded.

    That is when the output appears.
    """
    output.unlink(missing_ok=True)
    command = arguments(options, source, output, max_batch)
    process = subprocess.Popen(command)
    while process.poll() is None and not output.exists():
        time.sleep(0.01)
    first = time.perf_counter()
    process.wait()
    ended = time.perf_counter()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with {process.returncode}")
    return by_id(output), ended - first


def kill_and_go_on(
    options: argparse.Namespace, source: Path, output: Path, expected: dict[str, Any]
) -> dict[str, Any]:
    """Kill a run once half of the rows stand there, and start it again."""
    output.unlink(missing_ok=True)
    command = arguments(options, source, output, options.max_batch)
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while process.poll() is None and lines(output) < len(expected) // 2:
        time.sleep(0.005)
    ended_before = process.poll() is not None
    if not ended_before:
        process.send_signal(signal.SIGKILL)
    process.wait()
    kept = output.read_bytes()
    kept = kept[: kept.rfind(b"\n") + 1]
    again = subprocess.run(command, check=False).returncode
    after = output.read_bytes()
    found = by_id(output)
    same = found.keys() == expected.keys() and all(
        found[i][name] == expected[i][name] for i in expected for name in SAME
    )
    once = after.count(b"\n") == len(expected)
    return {
        "rows_before": kept.count(b"\n"),
        "killed": not ended_before,
        "kept_as_they_were": after.startswith(kept),
        "each_row_once": once,
        "rows_equal": same,
        "ok": not again and not ended_before and after.startswith(kept) and once and same,
    }


def lines(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


def by_id(output: Path) -> dict[str, Any]:
    return {row["id"]: row for row in map(json.loads, output.read_text(encoding="utf-8").splitlines())}


def spread(values: list[int]) -> dict[str, int]:
    ordered = sorted(values)
    return {"least": ordered[0], "median": ordered[len(ordered) // 2], "most": ordered[-1]}


if __name__ == "__main__":
    sys.exit(main())
