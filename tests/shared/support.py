"""What the tests of the loop share: tiny models, reference decoding, a drafter that does as it is told."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import LlamaForCausalLM, PreTrainedModel

from specdec_core import Drafter, Registry, SamplingParams, SpecdecError, SpecDecoder
from specdec_core.testing.models import VOCAB, copier, ids, markov_llama, tiny_model
from specdec_core.testing.reference import base, next_logits, sampled, warped
from specdec_core.testing.scripted import (
    Ahead,
    Ask,
    Node,
    Script,
    ScriptedConfig,
    ScriptedDrafter,
    accepting,
    depth_of,
    following,
    nodes_of,
    oracle,
    planted,
    pruned,
    tree_draft,
    wrong,
)

__all__ = [
    "VOCAB",
    "Ahead",
    "Ask",
    "ByteTokenizer",
    "Node",
    "Script",
    "ScriptedConfig",
    "ScriptedDrafter",
    "accepting",
    "base",
    "copier",
    "decoder_for",
    "depth_of",
    "following",
    "greedy",
    "ids",
    "markov_llama",
    "needs_options",
    "next_logits",
    "nodes_of",
    "oracle",
    "planted",
    "plugins",
    "pruned",
    "registered_drafters",
    "sampled",
    "tiny_llama",
    "tree_draft",
    "varied_prompt",
    "warped",
    "writer",
    "wrong",
]

# --- models ---------------------------------------------------------------------------------------


def tiny_llama(context: int = 512, device: str = "cpu") -> PreTrainedModel:
    """The tiny llama with room for longer texts, shared: not to be changed."""
    return tiny_model("llama", context=context, device=device)


# --- reference decoding ---------------------------------------------------------------------------


@functools.cache
def varied_prompt(length: int, n: int) -> list[int]:
    """A prompt after which `tiny_llama()` says n different tokens, so that each of them can be an EOS."""
    tries = (ids(length, seed) for seed in range(1000))
    return next(prompt for prompt in tries if len(set(base(tiny_llama(), prompt, n))) == n)


# --- drafters and decoders ------------------------------------------------------------------------


@functools.cache
def plugins() -> Registry:
    """All that is installed."""
    return Registry.discover()


def registered_drafters() -> list[str]:
    """Names of all registered drafters, as `--drafter` takes them."""
    return sorted({entry.name for entry in plugins().drafters()})


def needs_options(name: str) -> str:
    """Why a drafter cannot be built from its bare name; empty if it can."""
    try:
        plugins().build_drafter(name)
    except SpecdecError as error:
        return str(error)
    return ""


def decoder_for(model: Any, drafter: str | Drafter = "prompt_lookup", **options: Any) -> SpecDecoder:
    """Build a decoder; a drafter that refuses to be built or bound without options skips the test.

    A drafter given as an object drafts to its own depth unless `draft_tokens` says otherwise: most of these
    follow a script, and rounds in which `auto` asks for less or nothing would leave it unheard.
    """
    fixed = {} if isinstance(drafter, str) else {"draft_tokens": None}
    if isinstance(drafter, str):
        reason = needs_options(drafter)
        if reason:
            pytest.skip(f"drafter {drafter!r} needs options: {reason}")
    try:
        return SpecDecoder(model, drafter=drafter, **{"strict": True, **fixed, **options})
    except SpecdecError as error:
        if not isinstance(drafter, str):
            raise
        pytest.skip(f"drafter {drafter!r} does not fit: {error}")


def greedy(n: int, **options: Any) -> SamplingParams:
    """Greedy params."""
    return SamplingParams(max_new_tokens=n, **options)


# --- text -----------------------------------------------------------------------------------------


class ByteTokenizer:
    """One token a byte, 256 of them; a special token of id 256 prints as nothing."""

    eos_token_id: int | None = None
    chat_template = None
    vocab_size = 257

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def __len__(self) -> int:
        return self.vocab_size

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = True,
    ) -> str:
        text = bytes(token for token in token_ids if token < 256).decode(errors="replace")
        return text if skip_special_tokens else text + "<end>" * list(token_ids).count(256)


def writer(text: str) -> LlamaForCausalLM:
    """A byte-level llama that goes round in `text`, whose bytes must all differ."""
    raw = text.encode()
    assert len(set(raw)) == len(raw)
    return copier({byte: raw[(i + 1) % len(raw)] for i, byte in enumerate(raw)}, ByteTokenizer.vocab_size)
