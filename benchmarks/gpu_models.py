"""What `gpu_check.py` measures on: Qwen3 shapes with random weights, or checkpoints; drafters for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field
from transformers import Qwen3Config, Qwen3ForCausalLM

from specdec_core import Registry, RowDrafter, RowDrafterConfig, Rows, hookimpl
from specdec_core.bench.prompts import make_prompts
from specdec_core.bench.questions import built_in
from specdec_core.model.layers import first_layers
from specdec_core.model.loading import load_model
from specdec_drafters.small_model import SmallModel, SmallModelConfig

_EMBEDDING_SPREAD = 4.0


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a published Qwen3 configuration."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    tie_word_embeddings: bool
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151936
    max_position_embeddings: int = 40960

    def config(self) -> Qwen3Config:
        """Make the configuration."""
        sizes = {name: value for name, value in vars(self).items() if name != "name"}
        rope = {"rope_type": "default", "rope_theta": 1e6}
        return Qwen3Config(**sizes, rope_parameters=rope, rms_norm_eps=1e-6, use_cache=True)

    @property
    def bytes(self) -> int:
        """About the size of the weights in bfloat16."""
        attention = (
            2 * self.hidden_size * self.head_dim * (self.num_attention_heads + self.num_key_value_heads)
        )
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        ends = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return 2 * (self.num_hidden_layers * layer + ends)


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape("0.6B", 1024, 3072, 28, 16, True),
        ModelShape("1.7B", 2048, 6144, 28, 16, True),
        ModelShape("8B", 4096, 12288, 36, 32, False),
        ModelShape("tiny", 64, 128, 3, 4, True, 2, 16, 512, 8192),
        ModelShape("tiny-draft", 32, 64, 2, 2, True, 1, 16, 512, 8192),
    )
}


@torch.no_grad()
def random_model(shape: ModelShape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Any:
    """Make a model of random weights on the device itself.

    Embeddings are wide enough to be what the last layer mostly sees, and the head is the embedding: the model
    says its last token again, by a margin that no rounding bridges. So its text does not depend on the width
    of blocks, and drafts of the same make agree with it. What a forward costs does not depend on weights.
    """
    before = torch.get_default_dtype()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(device):
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            model = Qwen3ForCausalLM(shape.config())
        finally:
            torch.set_default_dtype(before)
        embedding = model.get_input_embeddings().weight
        embedding.normal_(0, _EMBEDDING_SPREAD)
        if not shape.tie_word_embeddings:
            model.lm_head.weight.copy_(embedding)
    model.generation_config.eos_token_id = None
    return model.eval()


def truncated(model: Any) -> Any:
    """Cut a draft from a target: a seventh of its layers, which it shares, and the same head."""
    return first_layers(model, max(model.config.num_hidden_layers // 7, 1))


def bytes_read(model: Any) -> int:
    """Count the bytes of weights that a forward over one token reads: all but an embedding alone."""
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    total = sum(weight.nbytes for weight in model.parameters())
    return total if tied else total - embedding.nbytes


class SyntheticConfig(RowDrafterConfig):
    """Options of the synthetic drafter."""

    num_tokens: int = Field(default=8, ge=0, description="most tokens to draft a round")
    chance: float = Field(default=1.0, description="of each token to be the right one")
    seed: int = 0


class Synthetic(RowDrafter):
    """Replay what plain decoding said, with the right token at each depth with a given chance.

    A draft is a function of the row's length alone (ONE_HOT), so runs of one seed are alike. Beyond the known
    text the last token is repeated.
    """

    name = "synthetic"
    Config = SyntheticConfig
    texts: ClassVar[dict[tuple[int, ...], list[int]]] = {}  # of all of them: prompt -> prompt and text

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__(config)
        self._rows: dict[int, list[int]] = {}

    @classmethod
    def learn(cls, prompt: Sequence[int], said: Sequence[int]) -> None:
        """Note what plain decoding said after a prompt."""
        cls.texts[tuple(prompt)] = [*prompt, *said]

    def admit(self, rows: Rows) -> None:
        """Find each row's text by its prompt."""
        for row, prompt in zip(rows.ids, rows.prompts, strict=True):
            self._rows[row] = self.texts.get(tuple(prompt), [])

    def release(self, rows: Sequence[int]) -> None:
        """Forget the rows."""
        for row in rows:
            self._rows.pop(row, None)

    def propose_for(self, row: int, tokens: Sequence[int], budget: int) -> list[int]:
        """Draft the known continuation, spoilt here and there."""
        start = len(tokens)
        known = self._rows[row][start : start + budget]
        chain = [*known, *[tokens[-1]] * (budget - len(known))]
        draw = random.Random(self.config.seed * 1_000_003 + start)
        return [token if draw.random() < self.config.chance else abs(token - 1) for token in chain]


def drafting_with(model: Any, name: str, tokenizer: Any = None) -> type[SmallModel]:
    """Make `small_model` over a model in memory a drafter of its own name: one model serves all decoders."""

    class InMemory(SmallModel):
        def __init__(self, config: SmallModelConfig) -> None:
            super().__init__(config.model_copy(update={"model": model, "tokenizer": tokenizer}))

    InMemory.name = name
    return InMemory


class _Plugin:
    def __init__(self, drafters: Sequence[type]) -> None:
        self._drafters = drafters

    @hookimpl
    def specdec_register_drafters(self, register: Callable[[type], None]) -> None:
        for drafter in self._drafters:
            register(drafter)


@dataclass(frozen=True)
class Subject:
    """A target, the names of what drafts for it, and a text to take prompts from."""

    name: str
    model: Any
    tokenizer: Any
    text: list[int]
    drafts: tuple[str, ...]
    registry: Registry

    @classmethod
    def of(
        cls, name: str, model: Any, tokenizer: Any, text: list[int], drafters: Sequence[type[SmallModel]]
    ) -> Subject:
        """Let drafters be found by their names."""
        registry = Registry.discover()
        registry.register(_Plugin([Synthetic, *drafters]), name="gpu-check")
        return cls(name, model, tokenizer, text, tuple(one.name for one in drafters), registry)


def random_subject(
    name: str, draft: str | None, length: int, device: torch.device, dtype: torch.dtype
) -> Subject:
    """Make a target of random weights; its drafts: its own first layers, and a model of another shape."""
    model = random_model(SHAPES[name], device, dtype)
    drafters = [drafting_with(truncated(model), "truncated")]
    if draft is not None:
        drafters.append(drafting_with(random_model(SHAPES[draft], device, dtype, seed=1), "another_shape"))
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(SHAPES[name].vocab_size, (length,), generator=generator).tolist()
    return Subject.of(name, model, None, text, drafters)


def real_subject(target: str, draft: str | None, device: torch.device, dtype: torch.dtype) -> Subject:
    """Load checkpoints; the text is that of the built-in questions, one after another."""
    how: dict[str, Any] = {"device": str(device), "dtype": str(dtype).removeprefix("torch."), "offline": True}
    model, tokenizer = load_model(target, **how)
    drafters = []
    if draft is not None:
        small, own = load_model(draft, **how)
        drafters.append(drafting_with(small, "checkpoint", own))
    prompts = make_prompts(built_in(), tokenizer, chat=False, most=None, answer=lambda *_: "")
    return Subject.of(target, model, tokenizer, [token for one in prompts for token in one.ids], drafters)
