"""Which ids end a row."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specdec_core.contract.sampling_params import SamplingParams


def eos_ids(params: SamplingParams, model_ids: frozenset[int]) -> frozenset[int]:
    """Give the ids that end a row: those of its params, or else the model's own."""
    if params.ignore_eos:
        return frozenset()
    if params.eos_token_id is None:
        return model_ids
    return frozenset(as_ids(params.eos_token_id))


def model_eos_ids(model: Any, tokenizer: Any | None) -> frozenset[int]:
    """Collect EOS ids of a model: generation_config's, else config's; and the tokenizer's."""
    generation = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    config = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    own = getattr(tokenizer, "eos_token_id", None)
    return frozenset(as_ids(config if generation is None else generation)) | frozenset(as_ids(own))


def as_ids(value: int | Iterable[int] | None) -> Iterable[int]:
    """Give one id, several or none as ids."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
