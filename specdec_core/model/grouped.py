"""Attention over grouped key-value heads without expanding them, registered with transformers.

`sdpa` under a mask repeats every key-value head for each query head that shares it: a copy of the whole
cache, in every layer of every forward. Here the query heads of one key-value head are folded into the query
axis instead, [B, kv_heads, group * T, D], with the mask repeated: no copy but of the queries, and the same
kernels. The mask comes folded, and additive in the model's dtype, once a forward; a boolean one would be
turned into such a one by every layer.

The configs of a replica name this attention for good. Whatever it does not treat goes to `sdpa`.
Blocks without padding are attended to here, too: the model feeds their tokens in one row; see `ragged`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specdec_core.model.layout import fold
from specdec_core.model.ragged import Ragged

NAME = "specdec_grouped"
_UNTREATED = ("softcap", "s_aux", "position_bias", "output_attentions")  # arguments that change the result
_thread = threading.local()  # `ragged`: of the forward that this thread runs


def attention_of(model: PreTrainedModel) -> str | None:
    """Name the attention that a model's layers look up in their configs; None: not all of them the same one.

    A replica's layers may name ours: it is `sdpa` wherever it is not asked for more.
    """
    names = {config._attn_implementation for config in _configs(model)}
    name: str | None = names.pop() if len(names) == 1 else None
    return "sdpa" if name == NAME else name


def can_attend(model: PreTrainedModel) -> bool:
    """Whether our attention may stand for a model's: it asks transformers' interface for its `sdpa`."""
    return bool(getattr(model, "_supports_attention_backend", False)) and attention_of(model) == "sdpa"


def name_attention(model: PreTrainedModel, name: str) -> None:
    """Let the configs of a model's layers name an attention, past their checks."""
    for config in _configs(model):
        vars(config)["_attn_implementation_internal"] = name


def _configs(model: PreTrainedModel) -> list[Any]:
    found: list[Any] = [getattr(module, "config", None) for module in model.get_decoder().modules()]
    named = {id(c): c for c in found if getattr(c, "_attn_implementation", None) is not None}
    return list(named.values())


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
def feeding(ragged: Ragged | None) -> Iterator[None]:
    """Tell this attention of the block without padding that this thread feeds within, if it is one."""
    _thread.ragged = ragged
    try:
        yield
    finally:
        _thread.ragged = None


def grouped_attention(
    module: nn.Module,
    query: Tensor,  # [B, heads, T, D]; of a ragged block [1, heads, N, D]
    key: Tensor,  # [B, kv_heads, S, D]
    value: Tensor,  # [B, kv_heads, S, D']
    attention_mask: Tensor | None,  # additive [B, 1, group * T, S], or as `sdpa` takes it
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' `sdpa` does: [B, T, heads, D'], or [1, N, heads, D']."""

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return _attended(module, query, key, value, mask, dropout, scaling, is_causal, kwargs)

    ragged: Ragged | None = None if torch.compiler.is_compiling() else getattr(_thread, "ragged", None)
    if ragged is None or attention_mask is None:
        return attend(query, key, value, attention_mask), None
    group = query.shape[1] // key.shape[1]
    return ragged.attend(attend, query, key, value, attention_mask, group), None


def _attended(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    kwargs: dict[str, Any],
) -> Tensor:
    rows, heads, columns, width = query.shape
    shared = key.shape[1]
    group = heads // shared
    if mask is None or any(kwargs.get(name) is not None for name in _UNTREATED):
        plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
        unfolded = None if mask is None else mask[:, :, :columns]
        done: Tensor = plain(
            module,
            query,
            key,
            value,
            unfolded,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )[0]
        return done
    if mask.dtype not in (torch.bool, query.dtype):
        mask = mask.to(query.dtype)
    if group > 1:
        query = query.reshape(rows, shared, group * columns, width)
        mask = _folded(mask, group, columns)
    elif mask.shape[2] > columns:
        mask = mask[:, :, :columns]
    out = nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return out.reshape(rows, heads, columns, out.shape[-1]).transpose(1, 2).contiguous()


def _folded(mask: Tensor, group: int, columns: int) -> Tensor:
    """Bring a mask to the queries of one key-value head; some layers may share heads in other groups."""
    if mask.shape[1] > 1:  # of each head
        return mask.reshape(mask.shape[0], -1, group * columns, mask.shape[3])
    if columns == 1 or mask.shape[2] == group * columns:
        return mask
    return fold(mask[:, :, :columns], group)
