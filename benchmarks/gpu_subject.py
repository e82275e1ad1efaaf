"""What `gpu_check.py` measures on: a target, its drafts, and the decoders of each mode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from gpu_measure import Decoded, decode
from gpu_models import SHAPES, Synthetic, SyntheticConfig, random_model, truncated

from specdec_core import Capture, Registry, SpecDecoder
from specdec_core.bench.cost import CostCurve
from specdec_core.bench.prompts import make_prompts
from specdec_core.bench.questions import built_in
from specdec_core.bench.stand import Stand
from specdec_core.model.faster.optimize import Optimizations
from specdec_core.model.loading import load_model
from specdec_drafters.small_model import SmallModel, SmallModelConfig

WIDTHS = (1, 2, 3, 4, 5, 7, 8, 16, 64)
DEPTHS = (2, 4, 6)


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    slots: tuple[int, int] = (512, 4096)
    batch: int = 16
    new: int = 64
    new_eager: int = 24
    cycles: int = 7
    repeats: int = 3
    copy_bytes: int = 1 << 30


TINY = Sizes((256, 512), batch=3, new=24, new_eager=12, cycles=2, repeats=1, copy_bytes=1 << 20)


@dataclass(eq=False)
class Subject:
    """A target, its drafts, and what was found out about it."""

    name: str
    stand: Stand
    drafts: dict[str, Callable[[], SmallModelConfig]]
    text: list[int]  # to take prompts from
    sizes: Sizes
    bandwidth: float | None = None  # bytes a second, of the device's own copy
    curves: dict[str, CostCurve] = field(default_factory=dict)  # by mode: batch 1, the fewer slots
    said: list[int] = field(default_factory=list)  # by plain decoding
    _decoders: dict[tuple[str, str], SpecDecoder] = field(default_factory=dict)

    def prompt(self, slots: int) -> list[int]:
        """Take a prompt, so long that all that is measured behind it sees one view of so many slots."""
        rounds = max(len(WIDTHS) * (self.sizes.cycles + 2), self.sizes.new + max(DEPTHS))
        return self.text[: slots - WIDTHS[-1] - rounds - 2]

    def mode(self, mode: str) -> Stand:
        """Give what decoders of a mode are built on."""
        optimize = Optimizations.of("compile" if mode == "compiled" else "none")
        if mode == "compiled":  # models of each size compile the same code anew; dynamo would give up at 8
            torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 64)
        cuda = next(self.stand.fast.parameters()).device.type == "cuda"
        capture = Capture.OFF if mode == "eager" else Capture.GRAPHS if cuda else Capture.FIXED
        options = {**self.stand.options, "optimize": optimize, "capture": capture}
        return replace(self.stand, options=options)

    def new(self, mode: str) -> int:
        """Say how many tokens to generate."""
        return self.sizes.new_eager if mode == "eager" else self.sizes.new

    def replay(self, mode: str, depth: int, chance: float = 1.0) -> SpecDecoder:
        """Give the drafter that knows what plain decoding said; with depth 0 it is plain decoding.

        There is one decoder a mode, and what it has captured serves all depths and chances.
        """
        decoder = self._decoders.get((mode, ""))
        if decoder is None:
            size = self.stand.fast.config.get_text_config(decoder=True).vocab_size
            drafter = Synthetic(SyntheticConfig(num_tokens=max(DEPTHS), vocab_size=size))
            decoder = self.mode(mode).decoder(drafter=drafter, max_batch=1)
            self._decoders[mode, ""] = decoder
        decoder.draft_tokens = depth  # is read at every call
        decoder.drafter.chance = chance  # type: ignore[attr-defined]
        return decoder

    def small(self, mode: str, draft: str, depth: int) -> SpecDecoder:
        """Give the drafter with a model of its own."""
        decoder = self._decoders.get((mode, draft))
        if decoder is None:
            drafter = SmallModel(self.drafts[draft]())
            decoder = self._decoders[mode, draft] = self.mode(mode).decoder(drafter=drafter, max_batch=1)
        decoder.draft_tokens = depth
        return decoder

    def plain(self, mode: str) -> Decoded:
        """Decode plainly, and let the replaying drafter know the text."""
        prompt, decoder = self.prompt(self.sizes.slots[0]), self.replay(mode, 0)
        done = decode(decoder, [prompt], self.new(mode))
        if len(done.said[0]) >= len(self.said):
            self.said = done.said[0]
        decoder.drafter.learn(prompt, self.said)  # type: ignore[attr-defined]
        return done


def random_subject(
    name: str,
    draft: str | None,
    registry: Registry,
    sizes: Sizes,
    device: torch.device,
    dtype: torch.dtype,
    bandwidth: float | None,
) -> Subject:
    """Make a target of random weights; its drafts: its own first layers, and a model of another shape."""
    model = random_model(SHAPES[name], device, dtype)
    stand = Stand.of(model, None, registry)
    drafts = {"truncated": lambda: SmallModelConfig(model=truncated(model), num_tokens=max(DEPTHS))}
    if draft is not None:
        small = random_model(SHAPES[draft], device, dtype, seed=1)
        drafts[draft] = lambda: SmallModelConfig(model=small, num_tokens=max(DEPTHS))
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(SHAPES[name].vocab_size, (sizes.slots[1],), generator=generator).tolist()
    return Subject(name, stand, drafts, text, sizes, bandwidth)


def real_subject(
    target: str,
    draft: str | None,
    registry: Registry,
    sizes: Sizes,
    device: torch.device,
    dtype: torch.dtype,
    bandwidth: float | None,
) -> Subject:
    """Load checkpoints; the text is that of the built-in questions, one after another."""
    name = str(dtype).removeprefix("torch.")
    model, tokenizer = load_model(target, device=str(device), dtype=name, offline=True)
    stand = Stand.of(model, tokenizer, registry, offline=True)
    drafts = {}
    if draft is not None:
        small, own = load_model(draft, device=str(device), dtype=name, offline=True)
        drafts[draft] = lambda: SmallModelConfig(model=small, tokenizer=own, num_tokens=max(DEPTHS))
    prompts = make_prompts(built_in(), tokenizer, chat=False, most=None, answer=lambda *_: "")
    text = [token for prompt in prompts for token in prompt.ids]
    return Subject(target, stand, drafts, text, sizes, bandwidth)
