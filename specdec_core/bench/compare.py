"""Are two ways of generating the same? Where their texts part: a near-tie of the dtype, or a bug."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from specdec_core.bench.methods import Method, Run, checked
from specdec_core.bench.ours import Ours
from specdec_core.bench.prompts import BenchPrompt
from specdec_core.bench.replay import Replayer, Tie
from specdec_core.contract.sampling_params import SamplingParams


class Outcome(StrEnum):
    """What a comparison found; the later one counts where prompts differ."""

    SAME = "same"
    NEAR_TIE = "near-tie"
    """Ids differ where rounding may decide."""
    DIFFERENT = "different"
    """Ids differ and rounding does not explain it: a bug, or a lossy verifier."""


@dataclass(frozen=True)
class Comparison:
    """One prompt, both ways."""

    prompt: str
    outcome: Outcome
    lengths: tuple[int, int]  # tokens that each generated
    index: int | None = None  # of the first generated token that differs
    tokens: tuple[int | None, int | None] = (None, None)  # None: that way had ended
    texts: tuple[str, str] = ("", "")  # the tokens as text
    tie: Tie | None = None

    def to_dict(self) -> dict[str, Any]:
        """Give all of it by name."""
        return asdict(self)


def compare(
    ways: tuple[Method, Method],
    prompts: Sequence[BenchPrompt],
    params: SamplingParams,
    replayer: Replayer,
    tokenizer: Any,
) -> Iterator[Comparison]:
    """Generate every prompt both ways, greedily and alone, and look where the ids part.

    Raises:
        SpecdecError: a way lost a prompt, or its drafter failed.
    """
    for prompt in prompts:
        first, second = (
            checked(way, [prompt], [prompt.name], way.run([prompt.ids], [params])) for way in ways
        )
        yield _compared(prompt, first, second, replayer, tokenizer)


def worst(found: Sequence[Comparison]) -> Outcome:
    """Give the outcome of all prompts together."""
    return max((one.outcome for one in found), key=list(Outcome).index, default=Outcome.SAME)


def lossy(way: Method, params: SamplingParams) -> str:
    """Name the verifier of a way that does not promise the target's text; empty for all others."""
    if not isinstance(way, Ours):
        return ""
    verifier = way.decoder.verifier_for([params])
    return "" if verifier.lossless else verifier.name


def _compared(prompt: BenchPrompt, first: Run, second: Run, replayer: Replayer, tokenizer: Any) -> Comparison:
    a, b = first.token_ids[0], second.token_ids[0]
    lengths = len(a), len(b)
    if a == b:
        return Comparison(prompt.name, Outcome.SAME, lengths)
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(lengths))
    if at == min(lengths):  # one is the beginning of the other: no rounding ends a text
        tokens = (a[at] if at < len(a) else None, b[at] if at < len(b) else None)
        texts = _texts(tokens, tokenizer)
        return Comparison(prompt.name, Outcome.DIFFERENT, lengths, at, tokens, texts)
    widths = {max(run.widths, default=1) for run in (first, second)} | _commonest(first, second)
    tie = replayer.tie(prompt.ids, a, at, (a[at], b[at]), widths)
    outcome = Outcome.NEAR_TIE if tie.near else Outcome.DIFFERENT
    return Comparison(
        prompt.name, outcome, lengths, at, (a[at], b[at]), _texts((a[at], b[at]), tokenizer), tie
    )


def _commonest(*runs: Run) -> set[int]:
    """Give the commonest width of each run's blocks."""
    return {max(run.widths, key=lambda width: run.widths[width]) for run in runs if run.widths}


def _texts(tokens: tuple[int | None, int | None], tokenizer: Any) -> tuple[str, str]:
    first, second = ("" if token is None else str(tokenizer.decode([token])) for token in tokens)
    return first, second
