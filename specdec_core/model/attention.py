"""What a model's attention layers need of us: masks of which kind, in which form; or why we refuse it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec_core.contract.errors import UnsupportedModel
from specdec_core.model import grouped
from specdec_core.model.layout import fold
from specdec_core.model.replica import Replica

logger = logging.getLogger("specdec")

_MASKED = {"eager", "sdpa", grouped.NAME}  # implementations that take a 4D mask as it is

_RECURRENT = ("mixer", "mamba", "ssm", "rwkv", "recurrent", "delta")


@dataclass(frozen=True)
class AttentionPlan:
    """How to hand masks and the cache to a model's forward."""

    windows: Mapping[str, int | None]  # layer type -> sliding window; one entry where all layers are alike
    additive: bool  # eager attention adds its mask, it does not apply it
    cache_argument: str
    takes_logits_to_keep: bool
    attention: str | None = None  # the model's own; None: not all layers have the same one
    group: int | None = None  # query heads to a key-value head, where `grouped` attends; None: it does not
    takes_ragged: bool = True  # where `grouped` attends, whether blocks may come without padding

    @property
    def distinct(self) -> tuple[int | None, ...]:
        """Each window once."""
        return tuple(dict.fromkeys(self.windows.values()))

    def without_windows(self) -> AttentionPlan:
        """Give the plan of a model that heeds no window."""
        return replace(self, windows=dict.fromkeys(self.windows))

    def as_loaded(self) -> AttentionPlan:
        """Give the plan that leaves the model's attention as it is."""
        return replace(self, group=None)

    @property
    def ragged(self) -> bool:
        """Whether blocks may come without padding: for attention that is ours, and a model that minds not."""
        return self.takes_ragged and self.group is not None

    def padded(self) -> AttentionPlan:
        """Give the plan of a model that takes rectangles only."""
        return replace(self, takes_ragged=False)

    def mask(
        self, masks: dict[int | None, Tensor], dtype: torch.dtype, *, folded: bool = True
    ) -> Tensor | dict[str, Tensor]:
        """Turn boolean masks by window into the model's `attention_mask`; folded: for `grouped`."""
        if self.additive or self.group is not None:
            floor = torch.finfo(dtype).min if self.additive else -torch.inf
            masks = {w: torch.zeros_like(m, dtype=dtype).masked_fill_(~m, floor) for w, m in masks.items()}
        if self.group is not None and folded:
            masks = {w: fold(m, self.group) for w, m in masks.items()}
        if len(self.windows) == 1:
            return masks[self.distinct[0]]
        return {kind: masks[window] for kind, window in self.windows.items()}


def context_limit(config: Any) -> int | None:
    """Give the most positions of a row; None: no limit is known.

    Long-range rotary embeddings ("longrope") end at their original length: beyond it they turn every position
    of a forward by other angles, those of shorter rows and of earlier tokens in the block too.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        original = part.get("original_max_position_embeddings")
        if part.get("rope_type") == "longrope" and original is not None:
            limit = original if limit is None else min(limit, original)
    return limit


def unwrap(model: nn.Module) -> PreTrainedModel:
    """Give the Hugging Face model below a PEFT wrapper, its adapters in place.

    Raises:
        UnsupportedModel: the adapter is learned prompt tokens, which live in the wrapper.
    """
    wrapper: Any = model
    if not hasattr(model, "get_base_model"):
        return wrapper  # type: ignore[no-any-return]
    for name, config in wrapper.peft_config.items():
        if getattr(config, "is_prompt_learning", False):
            raise UnsupportedModel(
                f"the PEFT adapter {name!r} ({config.peft_type}) adds virtual tokens, which speculative "
                "decoding does not support; use a LoRA-like adapter, or merge it into the model"
            )
    return wrapper.get_base_model()  # type: ignore[no-any-return]


def cache_argument(model: PreTrainedModel) -> str:
    """Name the argument of a model's forward that takes the cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def plan_attention(replica: Replica) -> AttentionPlan:
    """Read a model's layer types, windows and signature; switch the replica's FlashAttention to sdpa.

    Raises:
        UnsupportedModel: names the layer type that cannot be rolled back, or the attention.
    """
    model: PreTrainedModel = replica.model
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{config.model_type} is an encoder-decoder model; specdec decodes causal ones"
        )
    windows = _windows(model, config)
    _use_masked_attention(replica)
    parameters = inspect.signature(model.forward).parameters
    groups = replica.whole and grouped.can_attend(model)
    if groups:
        grouped.register()
    return AttentionPlan(
        windows=windows,
        additive=config._attn_implementation == "eager",
        cache_argument=cache_argument(model),
        takes_logits_to_keep="logits_to_keep" in parameters,
        attention=grouped.attention_of(model),
        group=grouped.group_size(config) if groups else None,
    )


def _windows(model: PreTrainedModel, config: Any) -> dict[str, int | None]:
    layers = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    known = {"full_attention", "sliding_attention", "attention", "mlp", "moe"}
    unknown = sorted(set(layers or ()) - known)
    if unknown:
        raise UnsupportedModel(
            f"{config.model_type} has layers of type {', '.join(unknown)}, whose state cannot be rolled "
            "back to an accepted prefix; use a model with full or sliding-window attention"
        )
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModel(
            f"{config.model_type} has recurrent layers ({_mixer_name(model)}), whose state cannot be rolled "
            "back to an accepted prefix; use a model with full or sliding-window attention"
        )
    if "local" in (getattr(config, "attention_layers", None) or ()):
        raise UnsupportedModel(
            f"{config.model_type} has local attention layers, which take windows from slots"
        )
    window = getattr(config, "sliding_window", None)
    if not layers:
        return {"full_attention": window if getattr(config, "use_sliding_window", True) else None}
    return {kind: window if kind == "sliding_attention" else None for kind in dict.fromkeys(layers)}


def _mixer_name(model: nn.Module) -> str:
    for module in model.modules():
        name = type(module).__name__
        recurrent = any(word in name.lower() for word in _RECURRENT)
        if recurrent and not name.endswith(("Model", "ForCausalLM")):
            return name
    return type(model).__name__


def name_attention(replica: Replica, plan: AttentionPlan) -> None:
    """Let a replica attend as planned."""
    name = plan.attention if plan.group is None else grouped.NAME
    if replica.whole and name is not None:
        replica.change("attention", lambda: grouped.name_attention(replica.model, name))


def _use_masked_attention(replica: Replica) -> None:
    model: PreTrainedModel = replica.model
    chosen = model.config.get_text_config(decoder=True)._attn_implementation
    if chosen in _MASKED:
        return
    try:
        if not replica.whole:
            raise ValueError("its forward was replaced")
        replica.change("masks", lambda: model.set_attn_implementation("sdpa"))
    except (ValueError, ImportError, AttributeError) as error:
        raise UnsupportedModel(
            f"attention {chosen!r} takes no tree mask and {model.config.model_type} has no sdpa: {error}; "
            "load it with attn_implementation='eager'"
        ) from None
    logger.warning("attention %r takes no tree mask: the decoder uses 'sdpa' in its place", chosen)
