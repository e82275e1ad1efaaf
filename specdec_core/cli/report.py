"""What a run says about itself: one line for people, one object for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from pydantic_core import to_jsonable_python

if TYPE_CHECKING:
    from specdec_core.contract.interfaces import Verifier
    from specdec_core.engine.decoder import SpecDecoder
    from specdec_core.rows.results import GenerationResult
    from specdec_core.rows.stats import Stats


def print_json(value: object, out: TextIO | None = None) -> None:
    """Print one line of JSON; in other encodings than UTF-8, in ASCII."""
    out = out or sys.stdout
    utf = (out.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not utf), file=out, flush=True)


def statistics_line(decoder: SpecDecoder, verifiers: Sequence[Verifier], stats: Stats) -> str:
    """Sum a run up: who drafted and verified, what was accepted, and how fast it was."""
    drafted = stats.drafted_tokens
    acceptance = (
        f"acceptance {stats.acceptance_rate:.0%} ({stats.accepted_tokens}/{drafted})"
        if drafted
        else "nothing drafted"
    )
    judges = "+".join(_with_options(one) + ("" if one.lossless else " (lossy)") for one in verifiers)
    parts = [
        f"{_with_options(decoder.drafter)} / {judges} / k={_depth(decoder)}",
        acceptance,
        f"mean acceptance length {stats.mean_acceptance_length:.2f}",
        _counted(stats.new_tokens, "token"),
        f"{stats.tokens_per_second:.1f} tokens/s",
        _counted(stats.rounds, "round"),
    ]
    return f"specdec: {', '.join(parts)}"


def result_object(
    target: str, decoder: SpecDecoder, verifier: Verifier, result: GenerationResult
) -> dict[str, Any]:
    """Give what `--json` prints."""
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason.value,
        "seed": result.seed,
        "target": target,
        "device": str(decoder.target.device),
        "dtype": str(decoder.target.dtype).removeprefix("torch."),
        "drafter": {"name": decoder.drafter.name, "config": _config(decoder.drafter)},
        "verifier": {
            "name": verifier.name,
            "config": _config(verifier),
            "lossless": verifier.lossless,
        },
        **logprobs_of(result),
        "stats": result.stats.to_dict(),
    }


def logprobs_of(result: GenerationResult) -> dict[str, Any]:
    """Give the log-probabilities of a result, where they were asked for."""
    if result.logprobs is None:
        return {}
    tokens = [
        {"token_id": token.token_id, "logprob": token.logprob, "top": [list(pair) for pair in token.top]}
        for token in result.logprobs
    ]
    return {"logprobs": tokens}


def _config(part: Any, **choice: bool) -> dict[str, Any]:
    config: dict[str, Any] = to_jsonable_python(part.config.model_dump(**choice), fallback=str)
    return config


def _with_options(part: Any) -> str:
    """Name a drafter or verifier, or the members of a combination, with options that are not defaults."""
    from specdec_core.drafting.combination import Combination

    if isinstance(part, Combination):
        return ", ".join(map(_with_options, part.members))
    given = _config(part, exclude_defaults=True, exclude_none=True)
    options = ", ".join(f"{name}={value}" for name, value in given.items())
    return f"{part.name}({options})" if options else str(part.name)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _depth(decoder: SpecDecoder) -> str:
    """Give the depth that is drafted: the smaller of the one asked for and the drafter's own, or "auto"."""
    own, asked = decoder.drafter.capabilities.max_depth, decoder.draft_tokens
    if asked == "auto":
        return "auto" if own else "0"
    return str(own if asked is None else min(asked, own))
