"""`specdec run`: generate text for one prompt."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from specdec_core.cli import options
from specdec_core.cli.exits import Debug
from specdec_core.cli.loading import discover, load_decoder
from specdec_core.cli.prompt import Messages, read_prompt
from specdec_core.cli.quiet import quiet, silent_transformers
from specdec_core.cli.report import print_json, result_object, statistics_line
from specdec_core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specdec_core.decoder import SpecDecoder
    from specdec_core.results import GenerationResult

TraceOption = Annotated[
    bool,
    typer.Option("--trace", help="Show each round on stderr: what was drafted and kept."),
]


def run(
    target: options.Target = None,
    prompt: options.Prompt = None,
    file: options.File = None,
    chat: options.Chat = None,
    drafter: options.Drafter = "prompt_lookup",
    verifier: options.Verifier = "auto",
    draft_tokens: options.DraftTokens = "auto",
    no_plugin: options.NoPlugin = None,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    revision: options.Revision = None,
    offline: options.Offline = False,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
    trace: TraceOption = False,
    debug: Debug = False,
) -> None:
    """Generate text for one prompt.

    The text goes to stdout as it is committed, one line of statistics to stderr.
    """
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    depth = options.depth_of(draft_tokens)
    target = options.named_target(target)
    wanted = read_prompt(prompt, file, chat)
    with quiet(offline=offline, debug=debug) as out, silent_transformers(debug=debug):
        decoder = load_decoder(
            target,
            drafter,
            verifier,
            params,
            draft_tokens=depth,
            registry=discover(no_plugin or ()),
            strict=debug,
            device=device,
            dtype=dtype,
            revision=revision,
            offline=offline,
            trust_remote_code=trust_remote_code,
        )
        chosen = decoder.verifier_for([params])
        result = _generate(decoder, wanted, params, None if as_json else out, trace=trace)
        if as_json:
            print_json(result_object(target, decoder, chosen, result), out)
        else:
            print(statistics_line(decoder, chosen, result.stats), file=sys.stderr)


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
