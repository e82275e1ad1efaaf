"""From the text of `--drafter` and `--verifier` to names, options and checked configs.

The grammar: segments separated by commas. A segment without `=`, or with `:` before its first `=`, begins
a new one (`name` or `name:option=value`); any other segment is one more `option=value` of the current one.
Values may contain `:` and `=`, not commas. A name may be `distribution/name`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from specdec_core.contract.errors import InvalidSpec

ConfigT = TypeVar("ConfigT", bound=BaseModel)


@dataclass(frozen=True)
class ParsedSpec:
    """One drafter or verifier as the user wrote it: its name and its options, still as text."""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)


def parse_drafters(text: str) -> list[ParsedSpec]:
    """Read `name:option=value,option=value,name,...`, at least one drafter.

    Raises:
        InvalidSpec: an empty name, an option without a value, or an option given twice.
    """
    return _parse(text, "drafter")


def parse_verifier(text: str) -> ParsedSpec:
    """Read `name:option=value,...`, exactly one verifier.

    Raises:
        InvalidSpec: as `parse_drafters`, or more than one verifier.
    """
    first, *others = _parse(text, "verifier")
    if others:
        raise InvalidSpec(f"verifier {text!r}: give one verifier, not {1 + len(others)}")
    return first


def make_config(cls: type[ConfigT], options: Mapping[str, object], culprit: str) -> ConfigT:
    """Make the config of `culprit` (such as "drafter 'small_model'") from its options.

    Options that are all texts are read as the fields' types ("3" is an int, "1.9" is none).

    Raises:
        InvalidSpec: an option is unknown, missing, or has a wrong value; lists the options there are.
    """
    allowed = [info.alias or name for name, info in cls.model_fields.items()]
    for name, value in options.items():
        if name not in allowed:
            raise InvalidSpec(f"{culprit} has no option {name!r} (={value}){_hint(name, allowed)}")
    texts = all(isinstance(value, str) for value in options.values())
    validate = cls.model_validate_strings if texts else cls.model_validate
    try:
        return validate(dict(options))
    except ValidationError as error:
        raise InvalidSpec(f"{culprit}: {_faults(error)}{_hint('', allowed)}") from error


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` most likely is a misspelling of, if any."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1)), None)


def _parse(text: str, kind: str) -> list[ParsedSpec]:
    """Split a spec into its parts."""
    parts: list[tuple[str, dict[str, str]]] = []
    for segment in (piece.strip() for piece in text.split(",")):
        head, equals, _ = segment.partition("=")
        if not equals or ":" in head:
            name, colon, segment = segment.partition(":")
            parts.append((_checked_name(name, text, kind), {}))
            if not colon:
                continue
        elif not parts:
            raise InvalidSpec(f"{kind} {text!r}: {segment!r} comes before any {kind}; begin with a name")
        _add_option(*parts[-1], segment, text, kind)
    return [ParsedSpec(name, options) for name, options in parts]


def _checked_name(name: str, text: str, kind: str) -> str:
    """Strip a name, or refuse it when it, or a side of its slash, is empty."""
    if not all(side.strip() for side in name.split("/")):
        raise InvalidSpec(f"{kind} {text!r}: empty name; write name or name:option=value, commas between")
    return name.strip()


def _add_option(name: str, options: dict[str, str], segment: str, text: str, kind: str) -> None:
    """Put one `option=value` among the options of `name`."""
    option, _, value = (part.strip() for part in segment.partition("="))
    where = f"{kind} {text!r}"
    if not option or not value:
        missing = f"option {option!r} has no value" if option else "an option has no name"
        raise InvalidSpec(f"{where}: {missing}; write {name}:{option or 'option'}={value or 'VALUE'}")
    if option in options:
        raise InvalidSpec(f"{where}: option {option!r} is given twice ({options[option]}, {value}); keep one")
    options[option] = value


def _faults(error: ValidationError) -> str:
    """What is wrong, in one line; the first three faults of a config that has more."""
    return "; ".join(_fault(details) for details in error.errors(include_url=False)[:3])


def _fault(details: ErrorDetails) -> str:
    """One fault in words: the option, its value and what would be right."""
    option = ".".join(map(str, details["loc"]))
    if details["type"] == "missing":
        return f"option {option!r} is required"
    text = details["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return f"{option}={details['input']}: {text[:1].lower()}{text[1:]}" if option else text


def _hint(name: str, allowed: list[str]) -> str:
    """The remedy: the nearest option and all there are."""
    match = nearest(name, allowed)
    meant = f"did you mean {match!r}? " if match else ""
    return f"; {meant}options: {', '.join(allowed)}" if allowed else "; it takes no options"
