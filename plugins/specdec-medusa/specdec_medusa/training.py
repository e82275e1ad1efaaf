"""Train Medusa-1 heads: the target stays as it is, and each head learns the token it should guess.

Positions are drawn anew for each step from (seed, step) alone, so that a run which was interrupted goes on as
if it had not been.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from specdec_core import UsageError
from specdec_medusa.heads import Heads
from specdec_medusa.states import IGNORED, States

_WARMUP = 20  # steps
_LOGITS = 1 << 25  # most logits at once
_SAVE_EVERY = 60.0  # seconds


@dataclass(frozen=True)
class Recipe:
    """How heads are trained; what a checkpoint must agree on is all but how long."""

    heads: int
    layers: int
    own_projection: bool
    batch: int  # positions a step
    rate: float
    seed: int
    steps: int | None = None
    minutes: float | None = None

    @property
    def fixed(self) -> dict[str, Any]:
        """What may not change when a run is resumed."""
        return {name: value for name, value in asdict(self).items() if name not in ("steps", "minutes")}


class Trainer:
    """Heads, their optimizer, and where the training stands. The target's own head, `shared`, is frozen."""

    def __init__(self, heads: Heads, recipe: Recipe, shared: nn.Module, states: States) -> None:
        shared.requires_grad_(False)
        self.heads, self.recipe, self._shared, self._states = heads, recipe, shared, states
        self.step, self.seconds, self.loss = 0, 0.0, math.nan
        size = heads.vocab_size or int(states.labels.max()) + 1
        self._positions = max(_LOGITS // (heads.count * size), 1)  # of one backward pass
        self._optimizer = torch.optim.AdamW(
            heads.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0
        )

    @property
    def done(self) -> float:
        """The share of the training that is done, 0 to 1."""
        by_steps = self.step / self.recipe.steps if self.recipe.steps else 0.0
        by_time = self.seconds / (60 * self.recipe.minutes) if self.recipe.minutes else 0.0
        return min(max(by_steps, by_time), 1.0)

    def run(self, checkpoint: Path, watch: Callable[[Trainer], object] = lambda trainer: None) -> None:
        """Train to the end; `checkpoint` is written every minute and when the run ends, in whatever way."""
        saved = time.monotonic()
        try:
            while self.done < 1:
                began = time.monotonic()
                self._train_step()
                self.seconds += time.monotonic() - began
                watch(self)
                if time.monotonic() - saved > _SAVE_EVERY:
                    self.save(checkpoint)
                    saved = time.monotonic()
        finally:
            self.save(checkpoint)

    def save(self, file: Path) -> None:
        """Write where the training stands; one that is killed meanwhile leaves the last file whole."""
        state = {
            "recipe": self.recipe.fixed,
            "heads": self.heads.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
        }
        part = file.with_suffix(".part")
        torch.save(state, part)
        part.replace(file)

    def load(self, file: Path) -> None:
        """Go on from a checkpoint.

        Raises:
            UsageError: it cannot be read, or was made with another recipe.
        """
        try:
            state = torch.load(file, map_location=self.heads.weight.device, weights_only=True)
            recipe, self.step, self.seconds = state["recipe"], state["step"], state["seconds"]
        except Exception as error:  # unpickling raises whatever it likes
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise UsageError(
                f"checkpoint {file} cannot be read ({first}); train anew with another --out"
            ) from error
        for name, value in self.recipe.fixed.items():
            if recipe.get(name) != value:
                raise UsageError(f"checkpoint {file} was made with {name}={recipe.get(name)}, not {value}")
        self.heads.load_state_dict(state["heads"])
        self._optimizer.load_state_dict(state["optimizer"])

    def _train_step(self) -> None:
        self._optimizer.param_groups[0]["lr"] = self.recipe.rate * self._schedule()
        self._optimizer.zero_grad(set_to_none=True)
        at = self._drawn()
        labels = self._states.labels[at]
        known = max(int((labels != IGNORED).sum()), 1)
        total = 0.0
        for part in torch.split(at, self._positions):
            loss = self._loss(part) / known
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.heads.parameters(), 1.0)
        self._optimizer.step()
        self.step, self.loss = self.step + 1, total

    def _loss(self, at: Tensor) -> Tensor:
        device = self.heads.weight.device
        logits = self.heads(self._states.hidden[at].to(device), self._shared).float()
        labels = self._states.labels[at].T.to(device)  # [K, N], as the logits' first two axes
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")

    def _drawn(self) -> Tensor:
        # torch's CPU generator reads 32 bits of its seed, so those must depend on both
        mixed = random.Random(f"{self.recipe.seed} {self.step}").getrandbits(32)
        generator = torch.Generator().manual_seed(mixed)
        return torch.randint(len(self._states), (self.recipe.batch,), generator=generator)

    def _schedule(self) -> float:
        """Warm up, then a cosine down to a tenth."""
        return min(1.0, (self.step + 1) / _WARMUP) * (0.55 + 0.45 * math.cos(math.pi * self.done))
