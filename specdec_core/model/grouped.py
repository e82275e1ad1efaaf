"""Attention over grouped key-value heads without expanding them, registered with transformers.

`sdpa` under a mask repeats every key-value head for each query head that shares it: a copy of the whole
cache, in every layer of every forward. Here the query heads of one key-value head are folded into the query
axis instead, [B, kv_heads, group * T, D], with the mask repeated: no copy but of the queries, and the same
kernels. The mask comes folded, and additive in the model's dtype, once a forward; a boolean one would be
turned into such a one by every layer.

A config names this attention only while one of our forwards runs. Whatever it does not treat goes to `sdpa`.
Blocks without padding are attended to here, too: the model feeds their tokens in one row; see `ragged`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specdec_core.model.ragged import Ragged, fold

NAME = "specdec_grouped"
_FIELD = "_attn_implementation_internal"  # of a config, where it keeps the name
_UNTREATED = ("softcap", "s_aux", "position_bias", "output_attentions")  # arguments that change the result
_thread = threading.local()  # `ragged`: of the forward that this thread runs
_lock = threading.Lock()
_users: dict[int, tuple[int, str]] = {}  # config -> forwards that run, and what it named before


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
def named(configs: Sequence[Any], ragged: Ragged | None = None) -> Iterator[None]:
    """Let configs name this attention for a while; ragged: the block this thread feeds without padding."""
    with _lock:
        for config in configs:
            users, found = _users.get(id(config), (0, config._attn_implementation))
            if not users:
                _name(config, NAME)
            _users[id(config)] = users + 1, found
    _thread.ragged = ragged
    try:
        yield
    finally:
        _thread.ragged = None
        with _lock:  # the last of the threads that are in the midst of the same names it back
            for config in configs:
                users, found = _users.pop(id(config))
                if users > 1:
                    _users[id(config)] = users - 1, found
                else:
                    _name(config, found)


def _name(config: Any, attention: str) -> None:
    """Let a config name an attention, past its checks where that is all there is to do: they take 9 us."""
    fields = vars(config)
    if _FIELD in fields and not config.sub_configs:
        fields[_FIELD] = attention
    else:
        config._attn_implementation = attention


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
