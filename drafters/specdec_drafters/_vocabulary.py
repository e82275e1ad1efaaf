"""One vocabulary for two models: refuse others, and bring logits to the target's width."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_core import UsageError

_PADDING = 512  # embeddings are padded to multiples of at most this


def check_vocabulary(
    label: str, tokenizer: Any | None, size: int, target_tokenizer: Any | None, target_size: int
) -> None:
    """Refuse a draft model whose ids mean other tokens than the target's.

    Sizes are those of the logits, which may be padded. They only count where a tokenizer is missing.

    Raises:
        UsageError: names one id that differs, and what it means on both sides.
    """
    if hasattr(tokenizer, "get_vocab") and hasattr(target_tokenizer, "get_vocab"):
        difference = _difference(tokenizer, target_tokenizer)
    else:
        known = target_tokenizer if tokenizer is None else tokenizer
        difference = _size_difference(known, size, target_size)
    if difference:
        raise UsageError(
            f"model={label} has another vocabulary than the target: {difference}; use a draft of its family"
        )


def aligned(logits: Tensor, vocab_size: int) -> Tensor:
    """Bring logits [..., any] to [..., V]: ids that only one side has are never drafted."""
    width = logits.shape[-1]
    if width > vocab_size:
        return logits[..., :vocab_size]
    if width < vocab_size:
        return torch.nn.functional.pad(logits, (0, vocab_size - width), value=-torch.inf)
    return logits


def _difference(tokenizer: Any, target_tokenizer: Any) -> str:
    mine, theirs = _by_id(tokenizer), _by_id(target_tokenizer)
    if mine == theirs:
        return ""
    token = min(i for i in mine.keys() | theirs.keys() if mine.get(i) != theirs.get(i))
    return f"id {token} is {_shown(mine, token)} there and {_shown(theirs, token)} in the target"


def _by_id(tokenizer: Any) -> dict[int, str]:
    return {i: text for text, i in tokenizer.get_vocab().items()}


def _shown(texts: dict[int, str], token: int) -> str:
    return repr(texts[token]) if token in texts else "nothing"


def _size_difference(tokenizer: Any | None, size: int, target_size: int) -> str:
    if size == target_size:
        return ""
    tokens = None if tokenizer is None else len(tokenizer)
    padded = tokens is not None and tokens <= min(size, target_size)
    if padded and abs(size - target_size) < _PADDING:
        return ""
    return f"{size} ids there and {target_size} in the target, without tokenizers that say they agree"
