"""What `specdec-medusa train` does: data, states, training, evaluation."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specdec_core import SpecDecoder, UsageError
from specdec_medusa.checkpoint import save_heads
from specdec_medusa.choices import chain_choices
from specdec_medusa.data import Sample, load_samples, read_lines, samples, save_samples
from specdec_medusa.evaluation import Prefixes, accuracies, candidates, prefixes
from specdec_medusa.heads import Heads
from specdec_medusa.measuring import HELD_OUT, TOP_K
from specdec_medusa.states import States, collect
from specdec_medusa.target import open_target, state_width
from specdec_medusa.training import Recipe, Trainer
from specdec_medusa.trees import StaticTree

TRAINED_ON, CHECKPOINT = "sequences.jsonl", "checkpoint.pt"
_OWN_PROJECTION = 1 << 24  # most weights of a vocabulary matrix that `auto` gives each head


@dataclass(frozen=True)
class Training:
    """Those options of `train` that are not part of the recipe."""

    target: str
    out: Path
    data: Path | None
    projection: str
    tokens: int
    new_tokens: int
    temperature: float
    held_out: float
    resume: bool
    max_batch: int
    device: str
    dtype: str


def run_training(options: Training, recipe: Recipe) -> None:
    """Generate, train, evaluate, write.

    Raises:
        UsageError: an option or a file is wrong, or there is already something in the folder.
    """
    checkpoint = options.out / CHECKPOINT
    if options.resume and not checkpoint.is_file():
        raise UsageError(f"--resume: there is no {CHECKPOINT} in {options.out}; leave it out to begin")
    if not options.resume and checkpoint.is_file():
        raise UsageError(f"{options.out} holds a checkpoint; go on with --resume, or choose another --out")
    decoder = open_target(options.target, "prompt_lookup", options.max_batch, options.device, options.dtype)
    recipe = replace(recipe, own_projection=_own_projection(options.projection, decoder))
    options.out.mkdir(parents=True, exist_ok=True)
    with _progress() as progress:
        trained_on, held_out = _data(options, recipe, decoder, progress)
        states = _states(decoder, trained_on, recipe.heads, progress, "states")
        held_out_states = _states(decoder, held_out, recipe.heads, progress, "held-out states")
        heads = _fresh(recipe, decoder).to(decoder.target.device)
        trainer = Trainer(heads, recipe, decoder.target.output_embeddings, states)
        if options.resume:
            trainer.load(checkpoint)
        task = progress.add_task("training", total=1.0)

        def watch(now: Trainer) -> None:
            progress.update(task, completed=now.done, description=f"step {now.step}, loss {now.loss:.3f}")

        trainer.run(checkpoint, watch)
    found = _evaluated(heads, held_out_states, decoder)
    config = {
        "medusa_num_heads": heads.count,
        "medusa_num_layers": heads.layers,
        "hidden_size": heads.hidden_size,
        "vocab_size": decoder.target.vocab_size,
        "projection": "own" if recipe.own_projection else "shared",
        "base_model_name_or_path": options.target,
        **found,
        "training": {**asdict(recipe), "steps": trainer.step, "positions": len(states), "loss": trainer.loss},
    }
    save_heads(heads, options.out, config)
    _report(options.out, trainer, found["held_out"])


def _report(out: Path, trainer: Trainer, held: dict[str, Any]) -> None:
    """Say what the heads are worth."""
    print(
        f"{out}: {trainer.heads.count} heads, {trainer.step} steps; held out: head accuracy "
        f"{_listed(held['head_accuracy'])}, joint prefix accuracy {_listed(held['joint_prefix_accuracy'])}, "
        f"where rounds start {_listed(held['joint_prefix_accuracy_at_round_starts'])}, so a chain gives "
        f"{held['tokens_per_target_call']:.2f} tokens a target call",
        file=sys.stderr,
    )


def _evaluated(heads: Heads, states: States, decoder: SpecDecoder) -> dict[str, Any]:
    ids, probs = candidates(heads, states, decoder.target.output_embeddings, TOP_K, decoder.target.vocab_size)
    chain: Prefixes = prefixes(StaticTree(chain_choices(heads.count)), ids, probs, states, heads.count)
    every = accuracies(ids, states.labels)
    return {
        "medusa_accuracies": every,
        "held_out": {
            "sequences": len(states.lengths),
            "positions": len(states),
            "head_accuracy": [each[0] for each in every],
            "joint_prefix_accuracy": chain.everywhere,
            "joint_prefix_accuracy_at_round_starts": chain.at_round_starts,
            "tokens_per_target_call": chain.tokens_per_target_call,
        },
    }


def _data(
    options: Training, recipe: Recipe, decoder: SpecDecoder, progress: Progress
) -> tuple[list[Sample], list[Sample]]:
    """Generate sequences and split them, or read those of an earlier run."""
    files = options.out / TRAINED_ON, options.out / HELD_OUT
    if options.resume:
        return load_samples(files[0]), load_samples(files[1])
    lines = read_lines(options.data, decoder.tokenizer, recipe.seed)
    task = progress.add_task("tokens of the target", total=options.tokens)
    made = samples(
        decoder,
        lines,
        tokens=options.tokens,
        new_tokens=options.new_tokens,
        temperature=options.temperature,
        seed=recipe.seed,
        progress=lambda done: progress.update(task, completed=done),
    )
    held = max(round(len(made) * options.held_out), 1)
    order = torch.randperm(len(made), generator=torch.Generator().manual_seed(recipe.seed)).tolist()
    parts = [made[i] for i in order[held:]], [made[i] for i in order[:held]]
    for part, file in zip(parts, files, strict=True):
        save_samples(part, file)
    return parts


def _states(
    decoder: SpecDecoder, made: Sequence[Sample], heads: int, progress: Progress, name: str
) -> States:
    task = progress.add_task(name, total=len(made))
    return collect(decoder, made, heads, lambda done: progress.advance(task, done))


def _fresh(recipe: Recipe, decoder: SpecDecoder) -> Heads:
    head: Any = decoder.target.output_embeddings
    width = state_width(decoder.target)
    return Heads.fresh(recipe.heads, recipe.layers, width, head.weight if recipe.own_projection else None)


def _own_projection(wanted: str, decoder: SpecDecoder) -> bool:
    if wanted != "auto":
        return wanted == "own"
    return bool(decoder.target.vocab_size * decoder.target.config.hidden_size <= _OWN_PROJECTION)


@contextmanager
def _progress() -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield progress


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
