"""Compare plain decoding, a drafter and transformers' own generation on the same prompts.

Every way runs each prompt in turn (interleaved), after one warm-up that is not counted; printed are the
medians over repeats, and their ratio to transformers' greedy generation of the same prompt. A failed or a
differing prompt is a failure.

    python benchmarks/against_transformers.py MODEL_FOLDER --tokens 64 --repeats 3
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from specdec_core import SamplingParams, SpecDecoder
from specdec_core.model.loading import load_model
from specdec_core.prompts import encode_prompts

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "real_model"))
from prompts import PROMPTS

Way = Callable[[tuple[int, ...], int], list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--drafter", action="append", default=None, help="repeatable; default: prompt_lookup")
    parser.add_argument(
        "--prompts", default="copy-harbour,copy-letter,code-raw,code-fibonacci,chat-story,chat-list"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model, tokenizer = load_model(options.model, dtype=options.dtype, device=options.device)
    ways = _ways(model, options.drafter or ["prompt_lookup"])
    prompts = {name: encode_prompts(PROMPTS[name], tokenizer)[0][0] for name in options.prompts.split(",")}
    seconds, output = _measure(ways, prompts, options.tokens, options.repeats)
    _report(seconds, output)
    if options.json:
        record = {"argv": sys.argv, "versions": _versions(), "seconds": seconds, "output": output}
        options.json.write_text(json.dumps(record, indent=1))


def _ways(model: Any, drafters: list[str]) -> dict[str, Way]:
    def ours(drafter: str) -> Way:
        decoder = SpecDecoder(model, drafter=drafter, reuse_prefixes=False)  # transformers feeds prompts anew
        eos = model.generation_config.eos_token_id

        def way(ids: tuple[int, ...], tokens: int) -> list[int]:
            params = SamplingParams(max_new_tokens=tokens, eos_token_id=eos)
            result: list[int] = decoder.generate(ids, params).token_ids
            return result

        return way

    def theirs(**options: Any) -> Way:
        def way(ids: tuple[int, ...], tokens: int) -> list[int]:
            x = torch.tensor([ids], device=model.device)
            y = model.generate(
                x,
                attention_mask=torch.ones_like(x),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
                **options,
            )
            new: list[int] = y[0, len(ids) :].tolist()
            return new

        return way

    return {
        "transformers": theirs(),
        "transformers:prompt_lookup=10": theirs(prompt_lookup_num_tokens=10),
        "transformers:prompt_lookup=4": theirs(prompt_lookup_num_tokens=4),
        "none": ours("none"),
        **{drafter: ours(drafter) for drafter in drafters},
    }


def _measure(
    ways: dict[str, Way], prompts: dict[str, tuple[int, ...]], tokens: int, repeats: int
) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, list[int]]]]:
    seconds: dict[str, dict[str, list[float]]] = {way: {name: [] for name in prompts} for way in ways}
    output: dict[str, dict[str, list[int]]] = {way: {} for way in ways}
    for repeat in range(repeats + 1):
        for name, ids in prompts.items():
            for way, run in ways.items():
                start = time.perf_counter()
                output[way][name] = run(ids, tokens)
                if repeat:
                    seconds[way][name].append(time.perf_counter() - start)
    return seconds, output


def _report(seconds: dict[str, dict[str, list[float]]], output: dict[str, dict[str, list[int]]]) -> None:
    base = output["transformers"]
    for name, expected in base.items():
        print(f"\n{name}: {len(expected)} tokens")
        for way, times in seconds.items():
            took = statistics.median(times[name])
            ratios = [a / b for a, b in zip(seconds["transformers"][name], times[name], strict=True)]
            same = "same ids" if output[way][name] == expected else "DIFFERENT IDS"
            rate = len(output[way][name]) / took
            print(f"  {way:34} {rate:7.1f} tok/s  {statistics.median(ratios):5.2f}x  {same}")
    print()
    for way in seconds:
        rates = [sum(seconds["transformers"][n]) / sum(seconds[way][n]) for n in base]
        print(f"{way:36} geometric mean {statistics.geometric_mean(rates):.2f}x")
    if any(output[way] != base for way in output):
        print("ids differ: in half precision look at the first divergence, in float32 it is a bug")
        raise SystemExit(1)


def _versions() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    device = (
        torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else platform.processor() or platform.machine()
    )
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": device,
        "commit": commit,
    }


if __name__ == "__main__":
    main()
