"""What `specdec-medusa measure` does: tokens per target call, beside what held-out accuracy predicts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specdec_core import SamplingParams, SpecDecoder, UsageError
from specdec_medusa.checkpoint import load_heads
from specdec_medusa.choices import chain_choices, measured_choices
from specdec_medusa.data import Sample, load_samples
from specdec_medusa.drafter import Medusa, MedusaConfig
from specdec_medusa.evaluation import candidates, prefixes
from specdec_medusa.heads import Heads
from specdec_medusa.states import collect
from specdec_medusa.target import open_target
from specdec_medusa.trees import AdaptiveTree, StaticTree

HELD_OUT = "held_out.jsonl"
TOP_K = 10


@dataclass(frozen=True)
class Measurement:
    """The options of `measure`."""

    target: str
    heads: str
    trees: tuple[str, ...]
    nodes: int
    rows: int
    max_batch: int
    as_json: bool
    device: str
    dtype: str


def run_measurement(options: Measurement) -> None:
    """Predict and decode, tree by tree.

    Raises:
        UsageError: the heads or their held-out sequences are not there, or a tree is unknown.
    """
    folder = Path(options.heads)
    held_out = load_samples(folder / HELD_OUT)[: options.rows]
    plain = open_target(options.target, "none", options.max_batch, options.device, options.dtype)
    rows: list[dict[str, Any]] = []
    for name in options.trees:
        drafter = Medusa(
            MedusaConfig.model_validate({"heads": options.heads, "tree": name, "nodes": options.nodes})
        )
        decoder = SpecDecoder(
            plain.target.model,
            plain.tokenizer,
            drafter=drafter,
            draft_tokens=None,
            max_batch=options.max_batch,
        )
        predicted = _predicted(name, options, plain, held_out)
        rows.append(_measured(decoder, held_out) | {"tree": name, **predicted})
    if options.as_json:
        print(json.dumps({"rows": len(held_out), "trees": rows}, indent=2))
        return
    table = Table(
        "tree", "predicted", "measured", "ratio", "where a draft stood", "same text", title=options.heads
    )
    for row in rows:
        ratio = row["tokens_per_target_call"] / row["predicted"]
        cells = (row["predicted"], row["tokens_per_target_call"], ratio, row["where_a_draft_stood"])
        table.add_row(
            row["tree"], *(f"{cell:.3f}" for cell in cells), f"{row['same_text']} of {len(held_out)}"
        )
    Console().print(table)


def _measured(decoder: SpecDecoder, held_out: Sequence[Sample]) -> dict[str, Any]:
    """Decode each held-out prompt to the length it has."""
    prompts = [sample.ids[: sample.start] for sample in held_out]
    params = [SamplingParams(max_new_tokens=len(s.ids) - s.start) for s in held_out]
    results = decoder.generate(prompts, params)
    new, rounds = sum(r.stats.new_tokens for r in results), sum(r.stats.rounds for r in results)
    return {
        "tokens_per_target_call": new / rounds,
        "where_a_draft_stood": (new - len(results)) / max(rounds - len(results), 1),  # but for first rounds
        "same_text": sum(r.token_ids == s.ids[s.start :] for r, s in zip(results, held_out, strict=True)),
    }


def _predicted(
    name: str, options: Measurement, decoder: SpecDecoder, held_out: Sequence[Sample]
) -> dict[str, Any]:
    heads, config = _ready(options.heads, decoder)
    states = collect(decoder, held_out, heads.count)
    ids, probs = candidates(heads, states, decoder.target.output_embeddings, TOP_K, decoder.target.vocab_size)
    tree: StaticTree | AdaptiveTree
    if name == "adaptive":
        tree = AdaptiveTree(heads.count)
    elif name == "measured":
        tree = StaticTree(measured_choices(config["medusa_accuracies"], options.nodes))
    elif name == "chain":
        tree = StaticTree(chain_choices(heads.count))
    else:
        raise UsageError(f"tree={name} has no prediction; use chain, measured or adaptive")
    found = prefixes(tree, ids, probs, states, options.nodes)
    return {
        "predicted": found.tokens_per_target_call,
        "joint_prefix_accuracy": found.everywhere,
        "joint_prefix_accuracy_at_round_starts": found.at_round_starts,
    }


def _ready(where: str, decoder: SpecDecoder) -> tuple[Heads, dict[str, Any]]:
    heads, config = load_heads(where, decoder.target.vocab_size)
    return heads.requires_grad_(False).to(device=decoder.target.device, dtype=decoder.target.dtype), config
