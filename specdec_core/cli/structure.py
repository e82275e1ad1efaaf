"""`--json-schema` and `--regex`: a constraint that is checked at once, and waits for a tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_core.cli import options
from specdec_core.contract.errors import InvalidParameter, UsageError

if TYPE_CHECKING:
    from specdec_core.contract.constraints import Matcher
    from specdec_core.sampling.grammar import Grammar, Rules


@dataclass(frozen=True)
class Structure:
    """What the text must be."""

    json_schema: options.JsonSchema = None
    regex: options.Regex = None

    def constraint(self) -> Later | None:
        """Read what was given.

        Raises:
            UsageError: both were given, one is wrong, or llguidance is not installed.
        """
        if self.json_schema is None and self.regex is None:
            return None
        if self.json_schema is not None and self.regex is not None:
            raise UsageError("--json-schema and --regex go one at a time; leave one out")
        from specdec_core.sampling.grammar import regex_rules, schema_rules

        if self.regex is not None:
            return Later(regex_rules(self.regex))
        return Later(schema_rules(_text(str(self.json_schema))))


class Later:
    """A constraint of a target that is not loaded yet."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._made: Grammar | None = None

    def __repr__(self) -> str:
        return self._rules.name

    @property
    def text(self) -> str:
        """The whole of it, which `repr` may cut short."""
        return self._rules.text

    def bind(self, tokenizer: Any) -> None:
        """Meet the target's tokenizer."""
        from specdec_core.sampling.grammar import Grammar

        self._made = Grammar(self._rules, tokenizer)

    def matcher(self) -> Matcher:
        """Start at the beginning."""
        assert self._made is not None, "no tokenizer yet"
        return self._made.matcher()


def _text(schema: str) -> str:
    """Give the schema itself, or what the file of that name holds."""
    if schema.lstrip().startswith("{"):
        return schema
    try:
        return Path(schema).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise InvalidParameter(f"--json-schema {schema}: {reason}; name a file, or write {{...}}") from error
