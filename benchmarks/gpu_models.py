"""Qwen3 shapes with random weights, drafts for them, and a drafter whose acceptance is known beforehand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from specdec_core import RowDrafter, RowDrafterConfig, Rows
from specdec_core.model.layers import first_layers

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

    seed: int = 0
    vocab_size: int = 512


class Synthetic(RowDrafter):
    """Replay what plain decoding said, with the right token at each depth with a given `chance`.

    A draft is a function of the row's length alone (ONE_HOT), so runs of one seed are alike. Beyond the known
    text the last token is repeated.
    """

    name = "synthetic"
    Config = SyntheticConfig

    def __init__(self, config: SyntheticConfig) -> None:
        super().__init__(config)
        self.chance = 1.0  # may be set between calls
        self._texts: dict[tuple[int, ...], list[int]] = {}
        self._rows: dict[int, list[int]] = {}

    def learn(self, prompt: Sequence[int], said: Sequence[int]) -> None:
        """Note what plain decoding said after a prompt."""
        self._texts[tuple(prompt)] = [*prompt, *said]

    def admit(self, rows: Rows) -> None:
        """Find each row's text by its prompt."""
        for row, prompt in zip(rows.ids, rows.prompts, strict=True):
            self._rows[row] = self._texts.get(tuple(prompt), [])

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
        return [
            token if draw.random() < self.chance else (token + 1) % self.config.vocab_size for token in chain
        ]
