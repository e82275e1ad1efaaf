"""What both trainings share: packed batches, single-threaded workers, a schedule by the clock, checkpoints.

Two processes with one thread each make better use of two busy cores than one process with two threads, which
wait for each other at every operation. Their gradients are averaged once a step.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from transformers import AutoTokenizer

from tools.demo_models.rows import WRITTEN, Row, as_text, read_rows

Loss = Callable[[Tensor, int], Tensor]  # (ids [B, T + 1], step) -> scalar
EARLY = 0.3  # by then copying is learned


@dataclass(frozen=True)
class Plan:
    """How to train."""

    minutes: float
    batch: int  # sequences a worker and step
    length: int  # tokens a sequence
    workers: int
    seed: int
    matrix_rate: float  # learning rate of Muon, in units of AdamW's
    rate: float  # learning rate of AdamW: embeddings and norms
    rule_share: tuple[float, float]  # share of rows made by rule, in the first EARLY of the time and later
    drill_share: tuple[float, float]  # chance of a drill before a row, likewise
    port: int
    checkpoint_seconds: float = 150
    warmup: float = 0.02
    decay: float = 0.5  # share of the time in which the rate falls to zero


def packed(
    rows: Sequence[Row], tokenizer: Any, plan: Plan, seed: int, done: Callable[[], float]
) -> Iterator[Tensor]:
    """Give batches [B, T + 1] without end; rows follow each other without padding.

    Drills stand between the rows: random tokens and then the same again. Nothing but looking back in the text
    predicts those, so that the model learns to copy early.
    """
    rng = random.Random(seed)
    written = _endless([row for row in rows if row["kind"] in WRITTEN], rng)
    ruled = _endless([row for row in rows if row["kind"] not in WRITTEN], rng)
    need, ids = plan.batch * (plan.length + 1), list[int]()
    while True:
        while len(ids) < need:
            late = done() > EARLY
            if rng.random() < plan.drill_share[late]:
                ids += _drill(len(tokenizer), rng)
            row = next(ruled if rng.random() < plan.rule_share[late] else written)
            ids += tokenizer(as_text(row, rng.random()))["input_ids"]
        yield torch.tensor(ids[:need]).view(plan.batch, plan.length + 1)
        ids = ids[need:]


def _drill(vocabulary: int, rng: random.Random) -> list[int]:
    ids = rng.choices(range(3, vocabulary), k=rng.randint(8, 50))
    return ids + ids * rng.randint(1, 2) + [0]


def _endless(rows: list[Row], rng: random.Random) -> Iterator[Row]:
    while True:
        rng.shuffle(rows)
        yield from rows


def rate_at(done: float, plan: Plan) -> float:
    """Factor of the learning rate when a share `done` of the time has passed: up, level, down to zero."""
    return max(0.0, min(1.0, done / plan.warmup, (1 - done) / plan.decay))


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """List the matrices of the layers."""
    return [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]


def optimizers(model: nn.Module, plan: Plan, rank: int) -> list[torch.optim.Optimizer]:
    """Muon for this worker's share of the layers' matrices, AdamW for embeddings and norms."""
    rest = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(
            matrices(model)[rank :: plan.workers], lr=plan.matrix_rate, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.01),
    ]


class Trainer:
    """One worker of a training; the first also logs and saves."""

    def __init__(self, model: nn.Module, loss: Loss, folder: Path, plan: Plan, rank: int) -> None:
        self.model, self.loss, self.folder, self.plan, self.rank = model, loss, folder, plan, rank
        self.optimizers = optimizers(model, plan, rank)
        self.rates = [opt.param_groups[0]["lr"] for opt in self.optimizers]
        self.step, self.seconds, self.mean, self._logged = 0, 0.0, 0.0, 0
        self._resume()

    def done(self) -> float:
        """Share of the time that has passed."""
        return self.seconds / (self.plan.minutes * 60)

    def run(self, batches: Iterator[Tensor]) -> None:
        """Train until the time is up."""
        saved = self.seconds
        while self.done() < 1:
            start = time.monotonic()
            self._step(next(batches))
            self.seconds += self._shared(time.monotonic() - start)
            if self.seconds - saved > self.plan.checkpoint_seconds:
                self._save()
                saved = self.seconds
        self._save()

    def _step(self, ids: Tensor) -> None:
        factor = rate_at(self.done(), self.plan)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
        loss = self.loss(ids, self.step)
        loss.backward()  # type: ignore[no-untyped-call]
        self._average()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()
        self._exchange()
        self.step += 1
        self._logged += 1
        self.mean += (loss.item() - self.mean) / min(self._logged, 20)
        if self.rank == 0 and self.step % 10 == 0:
            tokens = self.step * self.plan.workers * ids.numel()
            print(
                f"{self.seconds:.0f} s, step {self.step}, {tokens} tokens, loss {self.mean:.3f}", flush=True
            )

    def _average(self) -> None:
        """Average the gradients of the workers; a dropped layer has none."""
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.plan.workers > 1:
            flat = torch.cat([grad.flatten() for grad in grads]) / self.plan.workers
            distributed.all_reduce(flat)
            for grad, mean in zip(grads, torch.split(flat, [g.numel() for g in grads]), strict=True):
                grad.copy_(mean.view_as(grad))

    def _exchange(self) -> None:
        """Give every worker the matrices that another has stepped."""
        if self.plan.workers == 1:
            return
        for i, matrix in enumerate(matrices(self.model)):
            distributed.broadcast(matrix.data, i % self.plan.workers)

    def _shared(self, seconds: float) -> float:
        """Agree on the time that a step took."""
        if self.plan.workers == 1:
            return seconds
        value = torch.tensor(seconds)
        distributed.broadcast(value, 0)
        return float(value)

    def _save(self) -> None:
        """Write the optimizers' state, each worker its own, and the model."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _replace([opt.state_dict() for opt in self.optimizers], self.folder / f"optimizers{self.rank}.pt")
        if self.rank == 0:
            state = {"model": self.model.state_dict(), "step": self.step, "seconds": self.seconds}
            _replace(state, self.folder / "checkpoint.pt")

    def _resume(self) -> None:
        if not (self.folder / "checkpoint.pt").is_file():
            return
        state = torch.load(self.folder / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.step, self.seconds = state["step"], state["seconds"]
        file = self.folder / f"optimizers{self.rank}.pt"
        if not file.is_file():
            return
        states = torch.load(file, weights_only=True)
        for optimizer, saved in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(saved)


def _replace(state: Any, file: Path) -> None:
    torch.save(state, file.with_suffix(".new"))
    os.replace(file.with_suffix(".new"), file)


Build = Callable[[Path], tuple[nn.Module, Loss]]


def worker(rank: int, build: Build, rows: Path, tokenizer: Path, folder: Path, plan: Plan) -> None:
    """Train as one of the workers."""
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    if plan.workers > 1:
        address = f"tcp://127.0.0.1:{plan.port}"
        distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=plan.workers)
    model, loss = build(tokenizer)
    trainer = Trainer(model, loss, folder, plan, rank)
    torch.manual_seed(plan.seed + 1000 * trainer.step + rank)
    seed = plan.seed + 7919 * trainer.step + rank
    encode = AutoTokenizer.from_pretrained(tokenizer)
    trainer.run(packed(read_rows(rows), encode, plan, seed, trainer.done))
    if plan.workers > 1:
        distributed.destroy_process_group()


def train(build: Build, rows: Path, tokenizer: Path, folder: Path, plan: Plan) -> None:
    """Train with all workers; go on from a checkpoint in the folder, if there is one."""
    torch.multiprocessing.spawn(  # type: ignore[attr-defined, no-untyped-call]
        worker, (build, rows, tokenizer, folder, plan), nprocs=plan.workers
    )


def arguments(doc: str | None, source: str, minutes: float) -> argparse.ArgumentParser:
    """Make the command line of a training; `source` is what its model is built from."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("rows", source, "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="sequences a worker and step")
    parser.add_argument("--export", action="store_true", help="only write the checkpoint as a model")
    return parser


def export(build: Build, source: Path, folder: Path) -> None:
    """Write the checkpoint as a model folder."""
    model, _ = build(source)
    model.load_state_dict(torch.load(folder / "checkpoint.pt", weights_only=True)["model"])
    save_half(model, AutoTokenizer.from_pretrained(source), folder)


def save_half(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save a model in float16, with its tokenizer."""
    model.half().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
