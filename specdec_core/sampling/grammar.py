"""Constraints from JSON schemas and regular expressions, by llguidance (`specdec-core[grammar]`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specdec_core.contract.errors import ConstraintError, InvalidParameter, UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_tokenizers: WeakKeyDictionary[Any, LLTokenizer] = WeakKeyDictionary()


def json_schema(schema: Mapping[str, Any] | str, tokenizer: Any, *, compact: bool = False) -> Grammar:
    """Constrain a text to JSON of a schema.

    Args:
        schema: as a mapping, or its text.
        tokenizer: the target's, a fast one.
        compact: allow no whitespace between JSON's own tokens: shorter texts, of which more is forced.

    Raises:
        InvalidParameter: the schema is no JSON object, or asks for what cannot be done.
        UsageError: llguidance is not installed, or the tokenizer is not a fast one.
    """
    return Grammar(schema_rules(schema, compact=compact), tokenizer)


def regex(pattern: str, tokenizer: Any) -> Grammar:
    """Constrain a text to a regular expression, from its first character to its last.

    The syntax is that of Rust's `regex`: no look-around, no back-references.

    Raises:
        InvalidParameter: the pattern cannot be read.
        UsageError: llguidance is not installed, or the tokenizer is not a fast one.
    """
    return Grammar(regex_rules(pattern), tokenizer)


@dataclass(frozen=True)
class Rules:
    """A grammar that was checked, and knows no vocabulary yet."""

    name: str  # in errors
    text: str  # as `LLMatcher.grammar_from_*` return it

    def __post_init__(self) -> None:
        wrong, messages = _llguidance().LLMatcher.validate_grammar_with_warnings(self.text)
        if wrong:
            raise InvalidParameter(f"{self.name}: {_one_line(messages[0])}")


def schema_rules(schema: Mapping[str, Any] | str, *, compact: bool = False) -> Rules:
    """Read a JSON schema; see `json_schema`."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidParameter(f"the JSON schema {_short(text)} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise InvalidParameter(f"the JSON schema {_short(text)} is no JSON object")
    options: Any = {"whitespace_flexible": False} if compact else {}
    made = _llguidance().LLMatcher.grammar_from_json_schema(text, overrides=options)
    return Rules(f"json_schema({_short(text)})", made)


def regex_rules(pattern: str) -> Rules:
    """Read a regular expression; see `regex`."""
    return Rules(f"regex({_short(pattern)})", _llguidance().LLMatcher.grammar_from_regex(pattern))


class Grammar:
    """A grammar of llguidance as a `Constraint`, compiled once; a row's matcher is a copy.

    Raises:
        InvalidParameter: the tokenizer's vocabulary cannot say it.
        UsageError: the tokenizer is not a fast one.
    """

    def __init__(self, rules: Rules, tokenizer: Any) -> None:
        self._name = rules.name
        self._tokenizer = _tokenizer(tokenizer)
        self._start = _llguidance().LLMatcher(self._tokenizer, rules.text, log_level=0)
        if self._start.is_error():
            raise InvalidParameter(f"{self._name}: {_one_line(self._start.get_error())}")

    def __repr__(self) -> str:
        return self._name

    def matcher(self) -> GrammarMatcher:
        """Start at the beginning."""
        return GrammarMatcher(self._name, self._start.deep_copy(), self._tokenizer.eos_tokens)


class GrammarMatcher:
    """A matcher of llguidance as a `Matcher`."""

    def __init__(self, name: str, matcher: LLMatcher, eos: list[int]) -> None:
        self._name, self._matcher, self._eos = name, matcher, eos

    def consume(self, tokens: list[int]) -> int:
        """Go on with the leading tokens that the grammar takes."""
        taken = self._matcher.try_consume_tokens(tokens)
        self._check()
        return taken

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""
        self._matcher.rollback(count)
        self._check()

    def allowed(self) -> Tensor:
        """Which tokens may come next: bool [V]; never the tokenizer's EOS."""
        bias = self._matcher.compute_logit_bias()
        self._check()
        mask = torch.frombuffer(bytearray(bias), dtype=torch.uint8) > 0
        mask[self._eos] = False
        return mask

    def complete(self) -> bool:
        """Whether the text may end here."""
        return self._matcher.is_accepting()

    def forced(self) -> list[int]:
        """Give the tokens of the text that must follow, as the tokenizer would write it.

        Others may spell the same text; the target decides.
        """
        return [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(f"constraint {self._name} failed: {_one_line(self._matcher.get_error())}")


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise UsageError(
            "JSON schemas and regular expressions need llguidance: pip install 'specdec-core[grammar]'"
        ) from None
    return llguidance


def _tokenizer(tokenizer: Any) -> LLTokenizer:
    """Read a tokenizer's vocabulary, once: it takes about a second."""
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UsageError(
            f"a grammar needs a fast tokenizer, and {type(tokenizer).__name__} is none; use AutoTokenizer's"
        )
    if tokenizer not in _tokenizers:
        _llguidance()
        from llguidance.hf import from_tokenizer

        _tokenizers[tokenizer] = from_tokenizer(tokenizer)
    return _tokenizers[tokenizer]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _short(text: str) -> str:
    text = _one_line(text)
    return text if len(text) <= 60 else f"{text[:57]}..."
