"""Tokens per target call of drafters on requests that resemble each other, one after another in one decoder.

Replayed, without a model: a target that says, greedily, the answers of tasks.py, or those of a file that
`--record` made. Rounds are counted exactly, so the figures are the same on every machine.

    python benchmarks/repeated_tasks.py
    python benchmarks/repeated_tasks.py --replay said.json

With a target: it answers the same prompts in its own words, and time counts too. Drafters take turns on each
prompt, each in a decoder of its own; answers that differ are a failure.

    python benchmarks/repeated_tasks.py --target MODEL --count 8 --tokens 96 --record said.json
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tasks import REPEATED, WORKLOADS, tasks

from specdec_core import (
    Budget,
    Context,
    Draft,
    Drafter,
    Outcome,
    Registry,
    Rows,
    SamplingParams,
    SpecDecoder,
)

DRAFTERS = [
    "prompt_lookup",
    "prompt_lookup:num_tokens=16",
    "suffix",
    "suffix:shared=false",
    "suffix:tree=true",
]
Said = tuple[list[int], list[int]]  # ids of a prompt, and of what was answered


@dataclass
class Count:
    """What one drafter did on one workload."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    seconds: float = 0.0

    @property
    def per_call(self) -> float:
        """Tokens per target call."""
        return self.tokens / self.rounds


# --- without a model ------------------------------------------------------------------------------


class ReplayContext:
    """A `Context` of one row on the host, without randomness."""

    def __init__(self, row: int, tokens: list[int], params: SamplingParams) -> None:
        self.rows, self.places, self.params = (row,), (0,), (params,)
        self.host_lengths, self.device = (len(tokens),), torch.device("cpu")
        self._tokens = tokens

    def row_tokens(self, i: int) -> list[int]:
        return self._tokens

    def legal(self, i: int, tokens: list[int]) -> int:
        return len(tokens)

    def forced(self, i: int, limit: int) -> list[int]:
        return []

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a replay has no {name}: only drafters without a model can be replayed")


def replay(drafter: Drafter, requests: list[Said]) -> Count:
    """Decode each request with a target that says what was said; count rounds as the loop does."""
    largest = max(max(prompt + said) for prompt, said in requests)
    target: Any = SimpleNamespace(vocab_size=largest + 1, tokenizer=None, device=torch.device("cpu"))
    drafter.bind(target)
    done = Count()
    for row, (prompt, said) in enumerate(requests):
        params = SamplingParams(max_new_tokens=len(said))
        tokens = list(prompt)
        drafter.admit(Rows((row,), (0,), (tuple(prompt),), (params,)))
        while left := said[len(tokens) - len(prompt) :]:
            can = drafter.capabilities
            depth = min(can.max_depth, len(left) - 1)
            context: Context = ReplayContext(row, tokens, params)  # type: ignore[assignment]
            began = time.process_time()
            draft = drafter.propose(context, Budget([depth], can.nodes)) if depth else Draft.empty(1)
            done.seconds += time.process_time() - began
            path = accepted(draft, left)
            new = left[: len(path) + 1]
            tokens += new
            began = time.process_time()
            finish: Any = "length" if len(new) == len(left) else None
            drafter.observe(Outcome((row,), (0,), (new,), (path,), (finish,)))
            done.seconds += time.process_time() - began
            done.tokens += len(new)
            done.drafted += int((draft.parents >= -1).sum())
            done.rounds += 1
        drafter.release([row])
    return done


def accepted(draft: Draft, following: list[int]) -> list[int]:
    """The nodes, from the root, that a greedy target which says `following` accepts."""
    path: list[int] = []
    nodes = list(enumerate(zip(draft.parents[0].tolist(), draft.tokens[0].tolist(), strict=True)))
    for token in following:
        here = path[-1] if path else -1
        child = next((node for node, found in nodes if found == (here, token)), None)
        if child is None:
            break
        path.append(child)
    return path


def written(names: list[str], count: int) -> dict[str, list[Said]]:
    """The tasks as ids: pieces of at most five letters, as a tokenizer of few merges has them."""
    ids: dict[str, int] = {}

    def encoded(text: str) -> list[int]:
        return [ids.setdefault(piece, len(ids)) for piece in re.findall(r" ?\w{1,5}|\s+|[^\w\s]+", text)]

    return {name: [(encoded(prompt), encoded(said)) for prompt, said in tasks(name, count)] for name in names}


# --- with a model ---------------------------------------------------------------------------------


def answered(
    options: argparse.Namespace, drafters: list[str]
) -> tuple[dict[str, list[Said]], dict[str, dict[str, Count]]]:
    """Let the target answer, with each drafter in turn."""
    model: Any = None
    tokenizer: Any = None
    decoders: dict[str, SpecDecoder] = {}
    for drafter in drafters:
        if model is None:
            decoder = SpecDecoder.from_pretrained(
                options.target, drafter=drafter, device=options.device, dtype=options.dtype
            )
            model, tokenizer = decoder.target.model, decoder.tokenizer
        else:
            decoder = SpecDecoder(model, tokenizer, drafter=drafter)
        decoders[drafter] = decoder
    params = SamplingParams(max_new_tokens=options.tokens)
    said: dict[str, list[Said]] = {}
    counts = {drafter: {name: Count() for name in options.workloads} for drafter in drafters}
    for name in options.workloads:
        said[name] = []
        for prompt, _ in tasks(name, options.count):
            messages = [{"role": "user", "content": prompt}]
            results: dict[str, Any] = {}
            for drafter, decoder in decoders.items():
                began = time.perf_counter()
                result = results[drafter] = decoder.generate(messages if options.chat else prompt, params)
                count = counts[drafter][name]
                count.seconds += time.perf_counter() - began
                count.tokens += len(result.token_ids)
                count.rounds += result.stats.rounds
                count.drafted += result.stats.drafted_tokens
            first = results[drafters[0]]
            if any(result.token_ids != first.token_ids for result in results.values()):
                raise SystemExit(
                    f"answers differ on a prompt of {name!r}; in half precision that may be a tie"
                )
            said[name].append((list(first.prompt_token_ids), list(first.token_ids)))
    return said, counts


# --- report ---------------------------------------------------------------------------------------


def report(counts: dict[str, dict[str, Count]]) -> dict[str, float]:
    """Print a table; return each drafter's geometric mean on the workloads that repeat."""
    base = next(iter(counts))
    names = list(counts[base])
    repeated = [name for name in names if name in REPEATED]
    print(f"{'tokens per target call':30}" + "".join(f"{name:>10}" for name in names), end="")
    print(f"{'mean':>10}{'ratio':>8}{'drafted/call':>14}{'us/call':>9}")
    means = {}
    for drafter, each in counts.items():
        means[drafter] = prod(each[name].per_call for name in repeated) ** (1 / max(len(repeated), 1))
        rounds = sum(count.rounds for count in each.values())
        drafted, seconds = (
            sum(getattr(c, f) for c in each.values()) / rounds for f in ("drafted", "seconds")
        )
        print(f"{drafter:30}" + "".join(f"{each[name].per_call:10.2f}" for name in names), end="")
        print(f"{means[drafter]:10.2f}{means[drafter] / means[base]:8.2f}{drafted:14.1f}{1e6 * seconds:9.0f}")
    print(f"mean: geometric, over {', '.join(repeated)}; ratio: to {base}")
    return means


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--drafter", action="append", help="repeatable; the first is what others are compared to"
    )
    parser.add_argument("--workloads", type=lambda text: text.split(","), default=list(WORKLOADS))
    parser.add_argument("--count", type=int, default=40, help="requests of each workload")
    parser.add_argument("--replay", type=Path, help="replay what --record wrote")
    parser.add_argument("--target", help="a model that answers, by id or folder")
    parser.add_argument("--tokens", type=int, default=256, help="most tokens of a target's answer")
    parser.add_argument("--chat", action="store_true", help="prompts in the target's chat template")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--record", type=Path, help="write what the target said")
    options = parser.parse_args(argv)
    drafters = options.drafter or DRAFTERS
    if options.target:
        said, counts = answered(options, drafters)
        if options.record:
            record = {"argv": sys.argv, "torch": torch.__version__, "said": said}
            options.record.write_text(json.dumps(record))
        return report(counts)
    said = (
        json.loads(options.replay.read_text())["said"]
        if options.replay
        else written(options.workloads, options.count)
    )
    registry = Registry.discover()
    return report(
        {
            text: {name: replay(built(text, registry), requests) for name, requests in said.items()}
            for text in drafters
        }
    )


def built(text: str, registry: Registry) -> Drafter:
    """A new drafter from `name:option=value,...`."""
    name, _, options = text.partition(":")
    return registry.build_drafter(name, dict(option.split("=", 1) for option in options.split(",") if option))


if __name__ == "__main__":
    main()
