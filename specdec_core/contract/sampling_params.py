"""What a caller may ask of one generation: transformers' names where they exist."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from specdec_core.contract.constraints import Constraint
from specdec_core.contract.errors import InvalidParameter

Processor: TypeAlias = Callable[[Any, Any], Any]
"""(input_ids int64 [k, len], scores float32 [k, V]) -> scores [k, V]."""


class FinishReason(StrEnum):
    """Why a row ended."""

    EOS = "eos"
    STOP = "stop"
    """A stop string completed, or a constraint ended where no EOS could say so."""
    LENGTH = "length"
    """`max_new_tokens` were made."""
    CONTEXT = "context"
    """The target's context limit is reached."""
    CANCELLED = "cancelled"
    """Whoever asked for it wants no more of it."""
    ERROR = "error"
    """Something about this row failed: its error says what."""


_NUMBERS = (
    "max_new_tokens min_new_tokens temperature top_k top_p min_p repetition_penalty presence_penalty "
    "frequency_penalty no_repeat_ngram_size bad_words_ids logit_bias eos_token_id logprobs n seed"
).split()


class SamplingParams(BaseModel):
    """Options of one generation; everything is off unless asked for.

    Raises:
        InvalidParameter: names the field, the value and what is allowed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)

    max_new_tokens: int = Field(256, ge=0, strict=True, description="most tokens to generate")
    min_new_tokens: int = Field(0, ge=0, strict=True, description="no EOS before so many tokens")
    temperature: float = Field(0.0, ge=0, description="0 is greedy decoding")
    top_k: int = Field(0, ge=0, strict=True, description="keep the k most likely tokens; 0 is off")
    top_p: float = Field(1.0, gt=0, le=1, description="keep the smallest set with this mass; 1 is off")
    min_p: float = Field(0.0, ge=0, le=1, description="drop tokens below this share of the likeliest one's")
    repetition_penalty: float = Field(1.0, gt=0, description="above 1 makes what was said less likely")
    presence_penalty: float = Field(0.0, description="subtracted from tokens that were generated")
    frequency_penalty: float = Field(0.0, description="subtracted for each time a token was generated")
    no_repeat_ngram_size: int = Field(0, ge=0, strict=True, description="no n-gram twice; 0 is off")
    bad_words_ids: tuple[tuple[int, ...], ...] = Field((), description="sequences never to be said")
    logit_bias: dict[int, float] = Field(default_factory=dict, description="added to the logits of ids")
    logits_processors: tuple[Processor, ...] = Field(
        (), description="transformers' LogitsProcessors, or alike; pure functions of the ids they are given"
    )
    constraint: Constraint | None = Field(
        None, description="what the generated text must be, such as a grammar; it overrides all other options"
    )
    eos_token_id: int | tuple[int, ...] | None = Field(
        None, description="ids that end a row, kept as its last token; None: those of the model"
    )
    stop: tuple[str, ...] = Field((), description="strings that end a row where they complete in its text")
    include_stop: bool = Field(False, description="leave the stop string in the text")
    ignore_eos: bool = Field(False, description="generate past EOS tokens")
    logprobs: int | None = Field(
        None, ge=0, strict=True, description="log-probabilities of each token and of so many likeliest ones"
    )
    n: int = Field(1, ge=1, strict=True, description="samples of each prompt")
    seed: int | None = Field(None, description="seed of the row; None: fresh entropy")

    @field_validator(*_NUMBERS, mode="before")
    @classmethod
    def _no_truth_value(cls, value: Any) -> Any:
        if _holds_bool(value):  # Python counts True as 1
            raise ValueError("should be an integer or a number, not a truth value")
        return value

    @field_validator("bad_words_ids")
    @classmethod
    def _no_empty_word(cls, words: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        if () in words:
            raise ValueError("must not hold an empty sequence")
        return words

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_several(cls, stop: Any) -> Any:
        return (stop,) if isinstance(stop, str) else stop

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("must not hold an empty string")
        return stop

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise InvalidParameter(_first_fault(error)) from None

    @property
    def greedy(self) -> bool:
        """Whether the target is followed at temperature 0."""
        return self.temperature == 0

    def replace(self, **changes: Any) -> SamplingParams:
        """Make a checked copy with some fields changed."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return SamplingParams(**{**given, **changes})


def _first_fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    field = ".".join(str(part) for part in fault["loc"][:1])
    if fault["type"] == "extra_forbidden":
        return f"unknown sampling parameter {field!r}; known: {', '.join(SamplingParams.model_fields)}"
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{field}={fault['input']!r} is not allowed: it {message[:1].lower()}{message[1:]}"


def _holds_bool(value: Any) -> bool:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    return any(map(_holds_bool, value)) if isinstance(value, list | tuple) else isinstance(value, bool)
