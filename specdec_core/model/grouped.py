"""Attention over grouped key-value heads without expanding them, registered with transformers.

`sdpa` under a mask repeats every key-value head for each query head that shares it: a copy of the whole
cache, in every layer of every forward. Here the query heads of one key-value head are folded into the query
axis instead, [B, kv_heads, group * T, D], with the mask repeated: no copy but of the queries, and the same
kernels. The mask comes folded, and additive in the model's dtype, once a forward; a boolean one would be
turned into such a one by every layer.

A config names this attention only while one of our forwards runs. Whatever it does not treat goes to `sdpa`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "specdec_grouped"
_FIELD = "_attn_implementation_internal"  # of a config, where it keeps the name
_UNTREATED = ("softcap", "s_aux", "position_bias", "output_attentions")  # arguments that change the result


def configs_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """Find the configs in which a model's layers look up their attention, where that is transformers' `sdpa`.

    None for a model that does not ask transformers' interface for its attention.
    """
    if not getattr(model, "_supports_attention_backend", False):
        return ()
    found: list[Any] = [getattr(module, "config", None) for module in model.get_decoder().modules()]
    named = [config for config in found if getattr(config, "_attn_implementation", None) is not None]
    if any(config._attn_implementation != "sdpa" for config in named):
        return ()
    return tuple({id(config): config for config in named}.values())


def group_size(config: Any) -> int:
    """Query heads that share a key-value head."""
    heads = getattr(config, "num_attention_heads", None)
    shared = getattr(config, "num_key_value_heads", None)
    return heads // shared if isinstance(heads, int) and isinstance(shared, int) and shared else 1


def register() -> None:
    """Make the name known to transformers."""
    if NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(NAME, grouped_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


@contextmanager
def named(configs: Sequence[Any]) -> Iterator[None]:
    """Let configs name this attention for a while."""
    found = [config._attn_implementation for config in configs]
    for config in configs:
        _name(config, NAME)
    try:
        yield
    finally:
        for config, name in zip(configs, found, strict=True):
            # another thread may be in the midst of the same
            _name(config, "sdpa" if name == NAME else name)


def _name(config: Any, attention: str) -> None:
    """Let a config name an attention, past its checks where that is all there is to do: they take 9 us."""
    fields = vars(config)
    if _FIELD in fields and not config.sub_configs:
        fields[_FIELD] = attention
    else:
        config._attn_implementation = attention


def grouped_attention(
    module: nn.Module,
    query: Tensor,  # [B, heads, T, D]
    key: Tensor,  # [B, kv_heads, S, D]
    value: Tensor,  # [B, kv_heads, S, D']
    attention_mask: Tensor | None,  # additive [B, 1, group * T, S], or as `sdpa` takes it
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' `sdpa` does: [B, T, heads, D']."""
    rows, heads, columns, width = query.shape
    shared = key.shape[1]
    group = heads // shared
    if attention_mask is None or any(kwargs.get(name) is not None for name in _UNTREATED):
        if attention_mask is not None:
            attention_mask = attention_mask[:, :, :columns]  # unfolded
        plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
        done: tuple[Tensor, None] = plain(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
        return done
    if attention_mask.dtype not in (torch.bool, query.dtype):
        attention_mask = attention_mask.to(query.dtype)
    if group > 1:
        query = query.reshape(rows, shared, group * columns, width)
        attention_mask = _folded(attention_mask, group, columns)
    elif attention_mask.shape[2] > columns:
        attention_mask = attention_mask[:, :, :columns]
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling
    )
    out = out.reshape(rows, heads, columns, out.shape[-1]).transpose(1, 2).contiguous()
    return out, None


def fold(mask: Tensor, group: int) -> Tensor:
    """Repeat a mask [B, 1, T, S] for the query heads of a group; one row stands for all of them."""
    return mask if group == 1 or mask.shape[2] == 1 else mask.repeat(1, 1, group, 1)


def _folded(mask: Tensor, group: int, columns: int) -> Tensor:
    """Bring a mask to the queries of one key-value head; some layers may share heads in other groups."""
    if mask.shape[1] > 1:  # of each head
        return mask.reshape(mask.shape[0], -1, group * columns, mask.shape[3])
    if columns == 1 or mask.shape[2] == group * columns:
        return mask
    return fold(mask[:, :, :columns], group)
