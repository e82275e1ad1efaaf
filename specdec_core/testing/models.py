"""Tiny random models of many architectures, and prompts. Weights are wide, so that a wrong mask shows."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCAB = 97

# What an architecture needs beyond the sizes that all share.
_OPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4, "attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8},
    "jamba": {"num_experts": 2, "mamba_d_state": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "gpt_neo": {"attention_types": [[["global"], 2]], "num_layers": 2},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 4, "n_groups": 1},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mpt": {"d_model": 32, "n_heads": 4, "max_seq_len": 256},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.3},
    "phi": {"partial_rotary_factor": 0.5},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {
        "head_dim": 8,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_value_head_dim": 8,
        "moe_intermediate_size": 16,
        "num_experts": 2,
        "shared_expert_intermediate_size": 16,
    },
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 8, "num_hidden_layers": 3, "head_dim": 8},
    "rwkv": {"attention_hidden_size": 32},
    "stablelm": {"partial_rotary_factor": 0.5},
}

# Windows are given layer by layer, or for all layers alike; the other architectures have none.
_LAYER_TYPES = {"cohere2", "gemma2", "gemma3_text", "gpt_oss", "olmo3", "qwen2", "qwen3"}
_ONE_WINDOW = {"mistral", "mixtral", "phi3", "qwen3_moe", "starcoder2"}


def tiny_model(
    architecture: str = "llama",
    *,
    layers: int = 2,
    vocab: int = VOCAB,
    window: int | None = None,
    context: int = 256,
    attention: str | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str = "cpu",
    fresh: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Make a random causal language model; equal arguments give the same one, unless `fresh`.

    A shared model must not be changed; a decoder does not. Where windows go layer by layer, every other
    layer gets one, beginning with the first.

    Args:
        architecture: its `model_type`.
        window: of the sliding-window layers; None: full attention.
        context: most positions.
        attention: the implementation; None: the architecture's own choice.
        fresh: a model of its own, for a test that changes it.
        options: of the architecture's config.
    """
    if fresh or any(isinstance(value, (list, dict)) for value in options.values()):
        return _made(architecture, layers, vocab, window, context, attention, dtype, seed, device, **options)
    return _shared(architecture, layers, vocab, window, context, attention, dtype, seed, device, **options)


def _made(
    architecture: str,
    layers: int,
    vocab: int,
    window: int | None,
    context: int,
    attention: str | None,
    dtype: torch.dtype,
    seed: int,
    device: str,
    **options: Any,
) -> PreTrainedModel:
    sizes: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": context,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    config = AutoConfig.for_model(
        architecture,
        **{**sizes, **_OPTIONS.get(architecture, {}), **_windows(architecture, layers, window), **options},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, **({} if attention is None else {"attn_implementation": attention})
        )
    model.eval()
    model.to(device)  # type: ignore[arg-type]
    return model


_shared = functools.cache(_made)


def _windows(architecture: str, layers: int, window: int | None) -> dict[str, Any]:
    if architecture in _LAYER_TYPES:
        kinds = ["full_attention"] * layers
        if window is not None:
            kinds[::2] = ["sliding_attention"] * len(kinds[::2])
        return {"layer_types": kinds, "sliding_window": window or 8, "use_sliding_window": window is not None}
    if architecture in _ONE_WINDOW:
        return {"sliding_window": window, "use_sliding_window": window is not None}
    if window is not None:
        raise ValueError(f"{architecture} has no sliding window")
    return {}


def markov_llama(log_p: Tensor, context: int = 512) -> LlamaForCausalLM:
    """A llama whose next token depends on the current one alone: log_p, [current, next]."""
    vocab = log_p.shape[0]
    hidden = -(-vocab // 4) * 4
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config)
    model.eval()
    with torch.no_grad():
        layer: Any = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab, hidden))
        # the final norm makes the one-hot state sqrt(hidden) high
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :vocab] = log_p.T / hidden**0.5
    return model


def copier(follows: Mapping[int, int], vocab: int = VOCAB) -> LlamaForCausalLM:
    """A llama that always says `follows[current]`."""
    log_p = torch.zeros(vocab, vocab)
    for current, following in follows.items():
        log_p[current, following] = 20.0
    return markov_llama(log_p)


def cousin(model: Any, noise: float = 0.15, seed: int = 7) -> Any:
    """A copy with weights a little off: it agrees with the model often, not always."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in other.parameters():
            if weight.dim() > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
    return other


def ids(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """A prompt of random tokens."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return [int(token) for token in torch.randint(vocab, (length,), generator=generator).tolist()]
