"""Measure the demo pair: every drafter with every verifier that fits, against plain decoding.

    python -m tools.demo_models.table TARGET heldout.jsonl [--each N] [--tokens N] [--kinds copy,fix]

Every prompt is decoded plainly and then with each pair in turn, so that all see the same load of the machine;
weights are packed as `specdec run` packs them. c is the seconds of a drafting step over those of a plain
step, both behind the prompt; predicted is (1 + sum of the acceptance by depth) / (1 + steps a round x c):
Leviathan et al. 2023, theorem 3.8, without taking depths to be alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from specdec_core import SamplingParams, SpecdecError, SpecDecoder, Stats
from specdec_core.length.theory import expected_tokens_by_depth
from specdec_core.model.faster.optimize import Optimizations, optimized
from specdec_core.model.loading import load_model
from tools.demo_models.evaluate import of_kind
from tools.demo_models.rows import KINDS, chat_prompt, read_rows

DRAFTERS = (
    "prompt_lookup",
    "small_model",
    "small_model:draft=sampled",
    "small_model:draft=coupled",
    "early_exit",
    "early_exit:draft=sampled",
    "early_exit:draft=coupled",
    "tree_top2:depth={k}",
)
VERIFIERS = ("greedy", "match", "rejection", "block", "tree_mask")


@dataclass
class Pair:
    """A drafter with a verifier, and what its runs counted."""

    drafter: str
    verifier: str
    decoder: SpecDecoder
    runs: list[Stats] = field(default_factory=list)
    drafting: float = 0.0  # seconds, behind the prompts and the drafts that followed them
    same: int = 0  # runs whose ids are those of plain decoding

    @property
    def steps(self) -> int:
        """Drafting steps of a round, on average: forwards one after another."""
        stats = Stats.pooled(self.runs)
        if self.drafter.startswith("tree"):
            return int(self.drafter.partition("depth=")[2])
        return round(stats.drafted_tokens / stats.rounds)


def pairs(model: Any, tokenizer: Any, k: int, temperature: float) -> list[Pair]:
    """Build every pair that fits."""
    made = []
    for drafter in DRAFTERS:
        name = drafter.format(k=k)
        for verifier in VERIFIERS:
            try:
                decoder = SpecDecoder(
                    model, tokenizer, drafter=name, verifier=verifier, draft_tokens=k, optimize="auto"
                )
                decoder.verifier_for([SamplingParams(temperature=temperature)])
            except SpecdecError:
                continue
            made.append(Pair(name, verifier, decoder))
    return made


def measure(
    plain: SpecDecoder, made: list[Pair], prompts: Iterable[str], params: SamplingParams
) -> list[Stats]:
    """Run every prompt plainly and with each pair, interleaved; give the plain runs."""
    runs = []
    for prompt in prompts:
        wanted = plain.generate(prompt, params)
        runs.append(wanted.stats)
        for pair in made:
            done = None
            for done in pair.decoder.rounds(prompt, params):
                pair.drafting += 0.0 if done.batch.first else done.seconds.get("draft", 0.0)
            assert done is not None
            [row] = done.batch.rows
            pair.runs.append(row.stats)
            pair.same += row.output == wanted.token_ids
    return runs


def table(plain: list[Stats], made: list[Pair]) -> Iterable[str]:
    """Show what was measured."""
    base = Stats.pooled(plain)
    step = base.target_seconds / max(1, base.rounds - len(plain))
    yield (
        "| drafter | verifier | acceptance | tokens a target call | c | wall time, plain = 1 | speed-up "
        "| predicted | same ids |\n|---|---|---|---|---|---|---|---|---|"
    )
    for pair in made:
        stats = Stats.pooled(pair.runs)
        per_round = pair.drafting / max(1, stats.rounds - len(pair.runs)) / step
        wall = (stats.total_seconds / stats.new_tokens) / (base.total_seconds / base.new_tokens)
        predicted = expected_tokens_by_depth(stats.acceptance_by_depth) / (1 + per_round)
        cost = per_round / max(1, pair.steps)
        yield (
            f"| {pair.drafter} | {pair.verifier} | {stats.acceptance_rate:.2f} "
            f"| {stats.tokens_per_target_call:.2f} | {cost:.2f} | {wall:.2f} | {1 / wall:.2f} "
            f"| {predicted:.2f} | {pair.same} of {len(pair.runs)} |"
        )


def main() -> None:
    """Print a table for greedy decoding and one for temperature 0.8."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target")
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--each", type=int, default=2, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.target, device="cpu", dtype="float32")
    rows, kinds = read_rows(args.heldout), args.kinds.split(",")
    prompts = [chat_prompt(row["prompt"]) for kind in kinds for row in of_kind(rows, (kind,), args.each)]
    optimized(model, Optimizations.of("auto"), in_place=True)
    plain = SpecDecoder(model, tokenizer, drafter="none")
    for temperature in map(float, args.temperatures.split(",")):
        params = SamplingParams(max_new_tokens=args.tokens, temperature=temperature, seed=args.seed)
        made = pairs(model, tokenizer, args.draft_tokens, temperature)
        measure(plain, made, prompts[:1], params.replace(max_new_tokens=8))  # warm-up, not counted
        for pair in made:
            pair.runs, pair.drafting, pair.same = [], 0.0, 0
        runs = measure(plain, made, prompts, params)
        title = f"Temperature {temperature:g}, {len(prompts)} prompts ({', '.join(kinds)})"
        print(f"\n{title}, k = {args.draft_tokens}:\n")
        for line in table(runs, made):
            print(line, flush=True)


if __name__ == "__main__":
    main()
