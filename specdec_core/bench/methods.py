"""What is measured: a drafter with its verifier and length, one of transformers' own ways, or a program."""

from __future__ import annotations

import re
import shlex
from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from specdec_core.contract.errors import InvalidSpec, SpecdecError
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.plugins.spec_string import parse_drafters

if TYPE_CHECKING:
    from specdec_core.length.policy import DraftTokens

PLAIN = "none"
REFERENCES = "hf, hf:prompt_lookup[:num_tokens=N], hf:assistant:model=ID_OR_PATH"

_DEPTH = re.compile(r"auto|[0-9]+")


@dataclass(frozen=True)
class MethodSpec:
    """A method as the user wrote it.

    `DRAFTER[@K][@VERIFIER]`, a reference, which begins with `hf`, or a program: `process:NAME=COMMAND`.
    """

    text: str  # `process:NAME` of a program
    drafter: str = ""  # of a reference: "hf", "prompt_lookup" or "assistant"
    reference: bool = False
    options: dict[str, str] = field(default_factory=dict)  # of a reference
    command: tuple[str, ...] = ()  # of a program
    draft_tokens: DraftTokens = "auto"
    verifier: str = "auto"

    @property
    def ours(self) -> bool:
        """Whether it is a drafter of specdec."""
        return not self.reference and not self.command


@dataclass
class Run:
    """What one method did with one group of prompts."""

    seconds: float
    token_ids: list[list[int]]  # generated, of each prompt
    forwards: int | None  # of the target; None: not known
    rounds: int = 0  # of all rows, a prompt's first one included
    drafted: int = 0
    accepted: int = 0
    histogram: list[int] | None = None  # rounds by tokens accepted; None: not known
    widths: dict[int, int] = field(default_factory=dict)  # tokens a row of a block -> forwards behind prompts
    block_rows: int = 0  # rows of those forwards, all together
    first_tokens: int | None = None  # generated in the prompts' own rounds; None: not known
    first_histogram: list[int] | None = None  # those rounds by tokens accepted; `histogram` counts them, too
    prefill_seconds: float | None = None  # of those rounds
    draft_seconds: float | None = None  # None: not told apart from other time
    target_seconds: float | None = None

    @property
    def new_tokens(self) -> int:
        """Generated tokens of all rows."""
        return sum(map(len, self.token_ids))

    def to_dict(self) -> dict[str, Any]:
        """Give what a line of JSON holds."""
        return asdict(self)

    @classmethod
    def of(cls, value: dict[str, Any]) -> Run:
        """Read it back."""
        return cls(**{**value, "widths": {int(width): count for width, count in value["widths"].items()}})


class Method(Protocol):
    """Generates for groups of prompts, and tells what it did."""

    name: str

    def unfit(self, batch: int) -> str:
        """Say why it cannot take that many prompts at once; empty if it can."""

    def renew(self) -> None:
        """Forget what earlier runs taught: a repeat must not profit from the one before."""

    def run(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Run:
        """Generate for all prompts at once."""


@runtime_checkable
class Stepping(Protocol):
    """A method that can be stopped between rounds, so that others have theirs in between."""

    name: str

    @property
    def steps_alone(self) -> bool:
        """Whether that costs nothing here."""

    def steps(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> Generator[float, None, Run]:
        """Generate round by round; yield the seconds that were taken so far."""


def parse_method(text: str, draft_tokens: DraftTokens = "auto", verifier: str = "auto") -> MethodSpec:
    """Read a method; `draft_tokens` and `verifier` hold where it names none.

    Raises:
        InvalidSpec: it is no drafter's text, or a reference that there is not.
    """
    if text == "hf" or text.startswith("hf:"):
        return _reference(text)
    if text.startswith("process:"):
        return _program(text)
    drafter, *choices = text.split("@")
    depths = [choice for choice in choices if _DEPTH.fullmatch(choice)]
    verifiers = [choice for choice in choices if not _DEPTH.fullmatch(choice)]
    if len(depths) > 1 or len(verifiers) > 1 or "" in choices:
        raise InvalidSpec(
            f"method {text!r}: write DRAFTER, DRAFTER@K, DRAFTER@VERIFIER or DRAFTER@K@VERIFIER"
        )
    parse_drafters(drafter)
    if depths:
        draft_tokens = "auto" if depths[0] == "auto" else int(depths[0])
    return MethodSpec(
        text, drafter, draft_tokens=draft_tokens, verifier=verifiers[0] if verifiers else verifier
    )


def parse_methods(
    texts: Sequence[str], draft_tokens: DraftTokens = "auto", verifier: str = "auto"
) -> list[MethodSpec]:
    """Read several, and put plain decoding first: the baseline on the same path.

    Raises:
        InvalidSpec: as `parse_method`, or one is there twice.
    """
    specs = [parse_method(text, draft_tokens, verifier) for text in texts]
    names = [spec.text for spec in specs]
    for name in names:
        if names.count(name) > 1:
            raise InvalidSpec(f"method {name!r} is given twice; keep one")
    plain = parse_method(PLAIN, draft_tokens, verifier)
    return [plain, *(spec for spec in specs if spec.text != PLAIN)]


def checked(method: Method, prompts: Sequence[Any], names: Sequence[str], run: Run) -> Run:
    """Insist that a method lost no prompt.

    Raises:
        SpecdecError: it gave too few rows, or nothing for one.
    """
    if len(run.token_ids) != len(prompts):
        raise SpecdecError(f"{method.name} gave {len(run.token_ids)} texts for {len(prompts)} prompts")
    for name, ids in zip(names, run.token_ids, strict=True):
        if not ids:
            raise SpecdecError(f"{method.name} generated nothing for prompt {name}")
    return run


def _program(text: str) -> MethodSpec:
    """Read `process:NAME=COMMAND`."""
    name, _, command = text.removeprefix("process:").partition("=")
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise InvalidSpec(f"method {text!r}: {error} in its command") from error
    if not name or not words:
        raise InvalidSpec(f"method {text!r}: write process:NAME=COMMAND")
    return MethodSpec(f"process:{name}", command=words)


_OPTIONS = {
    "hf": (),
    "prompt_lookup": ("num_tokens", "max_ngram"),
    "assistant": ("model", "num_tokens", "schedule"),
}


def _reference(text: str) -> MethodSpec:
    """Read `hf`, or `hf:WAY` with options; the way stands where a drafter's options would."""
    _, _, rest = text.partition(":")
    if text == "hf":
        return MethodSpec(text, "hf", reference=True)
    specs = parse_drafters(rest)
    name, options = specs[0].name, dict(specs[0].options)
    if len(specs) > 1 or name not in _OPTIONS or name == "hf":
        raise InvalidSpec(f"method {text!r}: no such reference; there are {REFERENCES}")
    for option in options:
        if option not in _OPTIONS[name]:
            raise InvalidSpec(
                f"method {text!r} has no option {option!r}; options: {', '.join(_OPTIONS[name])}"
            )
    for option in ("num_tokens", "max_ngram"):
        if not options.get(option, "1").isdecimal() or options.get(option) == "0":
            raise InvalidSpec(f"method {text!r}: {option} must be a whole number of at least 1")
    if options.get("schedule", "constant") not in ("constant", "heuristic", "heuristic_transient"):
        raise InvalidSpec(f"method {text!r}: schedule is constant, heuristic or heuristic_transient")
    if name == "assistant" and "model" not in options:
        raise InvalidSpec(f"method {text!r}: write hf:assistant:model=ID_OR_PATH")
    return MethodSpec(text, name, reference=True, options=options)
