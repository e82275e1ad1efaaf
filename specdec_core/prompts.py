"""From what users pass (text, ids, chat messages, one or a list) to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from specdec_core.errors import InvalidParameter

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Tensor | Sequence[Message]
Prompts: TypeAlias = Prompt | Sequence[Prompt]


def encode_prompts(prompts: Prompts, tokenizer: Any | None) -> tuple[list[tuple[int, ...]], bool]:
    """Encode one prompt or a list of them; return the ids of each and whether it was a list."""
    if isinstance(prompts, Tensor):
        prompts = prompts.tolist()
    many = _is_list_of_prompts(prompts)
    each: Sequence[Any] = prompts if many else [prompts]
    return [_encode(prompt, tokenizer, i if many else None) for i, prompt in enumerate(each)], many


def encode_chat(messages: Sequence[Message], tokenizer: Any | None) -> tuple[int, ...]:
    """Apply the tokenizer's own chat template, once.

    Raises:
        InvalidParameter: there is no tokenizer, or it has no chat template.
    """
    if tokenizer is None:
        raise InvalidParameter("chat messages need a tokenizer, and this decoder has none; pass token ids")
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidParameter("the target's tokenizer has no chat template; pass the prompt as text")
    ids = tokenizer.apply_chat_template(
        list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
    )
    return tuple(ids)


def _is_list_of_prompts(prompts: Any) -> bool:
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return False
    return bool(prompts) and not isinstance(prompts[0], int | Mapping)


def _encode(prompt: Any, tokenizer: Any | None, index: int | None) -> tuple[int, ...]:
    name = "the prompt" if index is None else f"prompt {index}"
    if isinstance(prompt, Tensor):
        prompt = prompt.tolist()
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidParameter(f"{name} is text, and this decoder has no tokenizer; pass token ids")
        ids = tuple(tokenizer(prompt)["input_ids"]) if prompt else ()
    elif isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
        ids = encode_chat(prompt, tokenizer)
    elif isinstance(prompt, Sequence) and all(isinstance(token, int) for token in prompt):
        ids = tuple(prompt)
    else:
        raise InvalidParameter(f"{name} is {type(prompt).__name__}; pass text, token ids or chat messages")
    if not ids:
        raise InvalidParameter(f"{name} is empty; pass at least one token")
    return ids


def check_ids(ids: Sequence[int], vocab_size: int, context_limit: int | None, index: int | None) -> None:
    """Check that a target can be fed these ids.

    Raises:
        InvalidParameter: an id lies outside the vocabulary, or the prompt fills the context.
    """
    name = "the prompt" if index is None else f"prompt {index}"
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidParameter(
                f"{name} holds the token id {token}; the target's ids are 0 to {vocab_size - 1}"
            )
    if context_limit is not None and len(ids) > context_limit:
        raise InvalidParameter(f"{name} has {len(ids)} tokens; the target's context holds {context_limit}")
