"""`specdec run`: generate text for one prompt, or for many."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from specdec_core.cli import options
from specdec_core.cli.batch import run_many
from specdec_core.cli.exits import Debug
from specdec_core.cli.groups import Drafting, Many, Model, Sampling, grouped
from specdec_core.cli.loading import opened
from specdec_core.cli.prompt import Messages, read_prompt
from specdec_core.cli.report import print_json, result_object, statistics_line
from specdec_core.cli.structure import Structure
from specdec_core.contract.errors import UsageError
from specdec_core.contract.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specdec_core.engine.decoder import SpecDecoder
    from specdec_core.rows.results import GenerationResult, Results

TraceOption = Annotated[
    bool,
    typer.Option("--trace", help="Show each round on stderr: what was drafted and kept."),
]


@grouped
def run(
    model: Model,
    prompt: options.Prompt = None,
    file: options.File = None,
    chat: options.Chat = None,
    *,
    many: Many,
    drafting: Drafting,
    sampling: Sampling,
    structure: Structure,
    samples: options.Samples = 1,
    logprobs: options.Logprobs = None,
    as_json: options.Json = False,
    trace: TraceOption = False,
    debug: Debug = False,
) -> None:
    """Generate text for one prompt, or for each line of a file.

    The text goes to stdout as it is committed, one line of statistics to stderr.
    """
    if samples < 1:
        raise UsageError(f"--samples {samples}: give at least 1")
    params = sampling.params(n=samples, logprobs=logprobs, constraint=structure.constraint())
    _check_mode(many, prompt or file, params, as_json=as_json, trace=trace)
    target = options.named_target(model.target)
    if many.input is not None:
        run_many(many, model, drafting, params, chat=chat, debug=debug)
        return
    wanted = read_prompt(prompt, file, chat)
    tokens = params.max_new_tokens * samples
    with opened(model, drafting, params, debug=debug, max_batch=min(samples, 8), tokens=tokens) as opening:
        decoder, out = opening
        chosen = decoder.verifier_for([params])
        results = _results(decoder, wanted, params, None if as_json else out, trace=trace)
        if as_json:
            objects = [result_object(target, decoder, chosen, result) for result in results]
            print_json(objects if samples > 1 else objects[0], out)
        else:
            print(statistics_line(decoder, [chosen], results.stats), file=sys.stderr)


def _check_mode(
    many: Many, prompt: str | None, params: SamplingParams, *, as_json: bool, trace: bool
) -> None:
    """Refuse options that would have no effect."""
    if many.input is None:
        given = [name for name, value in vars(many).items() if value not in (None, False)]
        if given:
            raise UsageError(f"--{given[0].replace('_', '-')} needs --input FILE")
        if params.logprobs is not None and not as_json:
            raise UsageError(f"--logprobs {params.logprobs} shows in --json or --input only; add --json")
        if params.n > 1 and trace:
            raise UsageError("--trace shows one text at a time; leave out --samples")
    elif prompt is not None or as_json or trace:
        raise UsageError("--input goes without --prompt, --file, --json and --trace; leave them out")


def _results(
    decoder: SpecDecoder, prompt: str | Messages, params: SamplingParams, out: TextIO | None, *, trace: bool
) -> Results:
    """Generate one text or several."""
    from specdec_core.rows.results import Results

    if params.n == 1:
        result = _generate(decoder, prompt, params, out, trace=trace)
        return Results([result], result.stats)
    results: Any = decoder.generate(prompt, params)
    with _line(out) as write:
        write("\n---\n".join(str(result.text) for result in results))
    return Results(results, results.stats)


def _generate(
    decoder: SpecDecoder, prompt: str | Messages, params: SamplingParams, out: TextIO | None, *, trace: bool
) -> GenerationResult:
    """Generate, writing text as it comes; give the result."""
    from specdec_core.cli.trace import Trace

    watch = Trace(decoder.tokenizer) if trace else None
    # On one terminal a trace and the text would break each other's lines: there the text comes last.
    held: list[str] | None = [] if out and trace and _are_one(out, sys.stderr) else None
    with _line(out) as write:
        for chunk in decoder.stream(prompt, params, watch=watch):
            (write if held is None else held.append)(chunk.text)
        write("".join(held or ()))
    assert chunk.result is not None
    return chunk.result


def _are_one(out: TextIO, err: TextIO) -> bool:
    """Tell whether two streams end in one place, a terminal mostly."""
    try:
        return os.path.samestat(os.fstat(out.fileno()), os.fstat(err.fileno()))
    except (OSError, ValueError):  # not real files
        return False


@contextmanager
def _line(out: TextIO | None) -> Iterator[Callable[[str], object]]:
    """Give what writes text at once, and end the line, after an error too."""

    def write(text: str) -> None:
        if out and text:
            out.write(text)
            out.flush()

    try:
        yield write
    except BaseException as error:
        if out and out.isatty() and not isinstance(error, BrokenPipeError):
            write("\n")
        raise
    write("\n")
