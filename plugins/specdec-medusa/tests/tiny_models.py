"""Tiny random models, and what they say by themselves."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 61
PROMPTS = [[3], [5, 9, 2, 5, 9], [7, 1, 7, 1, 7, 1, 7], list(range(20, 41))]


@functools.cache
def tiny(architecture: str = "qwen3", seed: int = 0) -> Any:
    """A random model with wide weights, so that a wrong mask shows; shared, not to be changed."""
    config = AutoConfig.for_model(
        architecture,
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **({"head_dim": 8} if architecture in ("qwen3", "gemma2") else {}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@torch.no_grad()
def plain(model: Any, prompt: list[int], n: int) -> list[int]:
    """Greedy ids, one whole pass a token."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


class Waits(TorchDispatchMode):
    """Counts what would make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        mask = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if mask or name in ("_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def waits(drafter: Any) -> Iterator[list[str]]:
    """Give what a drafter's own calls wait for."""
    counter = Waits()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("tolist", "item", "cpu", "numpy"):
            method = getattr(torch.Tensor, name)

            def counted(tensor: Any, *args: Any, method: Any = method, name: str = name) -> Any:
                if torch.utils._python_dispatch._get_current_dispatch_mode() is counter:
                    counter.names.append(name)
                return method(tensor, *args)

            patch.setattr(torch.Tensor, name, counted)
        for call in ("propose", "observe"):
            inner = getattr(drafter, call)

            def watched(*args: Any, inner: Any = inner) -> Any:
                with counter:
                    return inner(*args)

            patch.setattr(drafter, call, watched)
        yield counter.names
