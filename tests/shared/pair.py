"""What the tests on the demo pair share: the trained models, prompts of several kinds, decoders."""

from __future__ import annotations

import functools
from typing import Any

from specdec_core import Drafter, SpecDecoder
from specdec_core.demo import TARGET
from specdec_core.model.loading import load_model
from specdec_core.rows.prompts import encode_chat

QUOTE = "dance violin ribbon coral ticket tiger teach rabbit wait castle frozen iron letter button paper"
ASKED = {
    "copy": f"Copy the following text word for word:\n\n{QUOTE}",
    "story": "Write a short story about twin sisters who find a map on a ship.",
    "code": "Write Python code with a docstring that implements bubble sort.",
    "count": "Number these words: wagon, ghost, glove, violin",
}


@functools.cache
def pair() -> tuple[Any, Any]:
    """The target, in float32, and its tokenizer: not to be changed."""
    return load_model(str(TARGET), device="cpu")


@functools.cache
def prompts() -> list[list[int]]:
    """The four prompts in the chat template, of lengths that differ."""
    asked = [[{"role": "user", "content": text}] for text in ASKED.values()]
    return [list(encode_chat(messages, pair()[1])) for messages in asked]


def decoder(drafter: str | Drafter, **options: Any) -> SpecDecoder:
    """A strict decoder of the target."""
    model, tokenizer = pair()
    return SpecDecoder(model, tokenizer, drafter=drafter, **{"strict": True, **options})
