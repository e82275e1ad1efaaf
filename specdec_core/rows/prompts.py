"""From what users pass (text, ids, chat messages, one or a list) to token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from torch import Tensor

from specdec_core.contract.errors import InvalidParameter

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Tensor | Sequence[Message]
Prompts: TypeAlias = Prompt | Sequence[Prompt]


def encode_prompts(prompts: Prompts, tokenizer: Any | None) -> tuple[list[tuple[int, ...]], bool]:
    """Encode one prompt or a list of them; return the ids of each and whether it was a list."""
    given = _as_lists(prompts)
    many = _is_list_of_prompts(given)
    each: Sequence[Any] = given if many else [given]
    return [_encode(prompt, tokenizer, i if many else None) for i, prompt in enumerate(each)], many


def encode_chat(messages: Sequence[Message], tokenizer: Any | None) -> tuple[int, ...]:
    """Apply the tokenizer's own chat template, once.

    Raises:
        InvalidParameter: there is no tokenizer, it has no chat template, or that refuses the messages.
    """
    if tokenizer is None:
        raise InvalidParameter("chat messages need a tokenizer, and this decoder has none; pass token ids")
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidParameter("the target's tokenizer has no chat template; pass the prompt as text")
    try:
        # The template writes what begins a text; the tokenizer adds nothing to it.
        ids = tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # whatever a template does with messages it was not made for
        raise InvalidParameter(
            f"the target's chat template refuses these messages: {str(error) or type(error).__name__}"
        ) from error
    return tuple(ids)


def _as_lists(prompt: Any) -> Any:
    """Turn tensors and numpy arrays into lists."""
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt


def _is_list_of_prompts(prompts: Any) -> bool:
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        return False
    return bool(prompts) and not isinstance(prompts[0], Integral | Mapping)


def _encode(prompt: Any, tokenizer: Any | None, index: int | None) -> tuple[int, ...]:
    name = "the prompt" if index is None else f"prompt {index}"
    prompt = _as_lists(prompt)
    if isinstance(prompt, str):
        if tokenizer is None:
            raise InvalidParameter(f"{name} is text, and this decoder has no tokenizer; pass token ids")
        ids = tuple(tokenizer(prompt)["input_ids"]) if prompt else ()
    elif isinstance(prompt, Sequence) and prompt and _is_message(prompt[0]):
        ids = encode_chat(prompt, tokenizer)
    elif _is_ids(prompt):
        ids = tuple(map(int, prompt))
    else:
        raise InvalidParameter(f"{name} {_misfit(prompt)}")
    if not ids:
        several = ", or a list of at least one prompt" if index is None and isinstance(prompt, list) else ""
        raise InvalidParameter(f"{name} is empty; pass at least one token{several}")
    return ids


def _is_message(prompt: Any) -> bool:
    return isinstance(prompt, Mapping) and "input_ids" not in prompt


def _misfit(prompt: Any) -> str:
    """Say what something is that is no prompt, and what to do about it."""
    first = prompt[0] if isinstance(prompt, Sequence) and prompt and not isinstance(prompt, bytes) else prompt
    if isinstance(first, Mapping) and "input_ids" in first:
        return f'is {type(first).__name__}, a tokenizer\'s output; pass its ids alone: ["input_ids"]'
    if isinstance(prompt, Mapping):
        return f"is {type(prompt).__name__}; put chat messages into a list"
    return f"is {type(prompt).__name__}; pass text, token ids or chat messages"


def _is_ids(prompt: Any) -> bool:
    if isinstance(prompt, bytes) or not isinstance(prompt, Sequence):
        return False
    return all(isinstance(token, Integral) and not isinstance(token, bool) for token in prompt)


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
