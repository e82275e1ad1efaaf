"""`specdec bench`: how fast drafters are, against plain decoding and transformers' own generation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_core.cli import options
from specdec_core.cli.bench_table import print_report
from specdec_core.cli.exits import Debug
from specdec_core.cli.groups import Model, grouped
from specdec_core.cli.loading import discover, say_if_demo
from specdec_core.cli.quiet import quiet, silent_transformers
from specdec_core.cli.report import print_json
from specdec_core.contract.errors import InvalidParameter, UsageError
from specdec_core.contract.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specdec_core.bench.questions import Question

REFERENCES = "hf, hf:prompt_lookup[:num_tokens=N] or hf:assistant:model=ID_OR_PATH"


def _what(*names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel="What is measured", **settings)


Methods = Annotated[
    list[str] | None,
    _what(
        "--method",
        "-m",
        metavar="METHOD",
        help="A drafter, as in prompt_lookup:max_ngram=3, with @K for its draft length and @VERIFIER as "
        f"wanted (prompt_lookup@4); what transformers does: {REFERENCES}; or a program that generates: "
        "process:NAME=COMMAND. May be repeated; plain decoding, none, is always measured. Unset: "
        "prompt_lookup and hf.",
        show_default=False,
    ),
]
Questions = Annotated[
    str | None,
    _what(
        metavar="FILE",
        help='JSON lines {"question_id", "category", "turns"}, as Spec-Bench has them; unset: a built-in '
        "set of six categories.",
        show_default=False,
    ),
]
Categories = Annotated[
    str | None, _what(metavar="NAME,NAME,...", help="Only these categories.", show_default=False)
]
Limit = Annotated[
    int | None,
    _what(metavar="N", parser=options.whole_number, help="Most questions of a category.", show_default=False),
]
Batches = Annotated[str, _what("--batch-size", metavar="N,N,...", help="Prompts generated together.")]
Temperatures = Annotated[
    str, _what("--temperature", metavar="T,T,...", help="0 is greedy; above 0 is sampled.")
]
Repeats = Annotated[
    int,
    _what(metavar="N", parser=options.whole_number, help="How often each prompt is measured; at least 3."),
]
Widths = Annotated[
    str | None,
    _what(
        metavar="N,N,...",
        help="Tokens of the blocks whose cost is timed; unset: up to the widest draft.",
        show_default=False,
    ),
]
Baseline = Annotated[
    str, _what(metavar="METHOD", help="The method that speed-ups and ids are compared with.")
]
ChatOrRaw = Annotated[
    bool | None,
    _what(
        "--chat/--raw",
        help="Put questions into the target's chat template, or take them as they are. Unset: chat, if the "
        "target has a template.",
        show_default=False,
    ),
]
Output = Annotated[
    str | None,
    _what(
        metavar="FILE",
        help="File of JSON lines for the measurements. The same command goes on where it was interrupted.",
        show_default=False,
    ),
]
Html = Annotated[
    str | None,
    _what("--html", metavar="FILE", help="Write a report with charts, in one file.", show_default=False),
]


@dataclass(frozen=True)
class BenchSampling:
    """What is generated; batch size and temperature may be several."""

    max_new_tokens: options.MaxNewTokens = 64
    top_k: options.TopK = 0
    top_p: options.TopP = 1.0
    min_p: options.MinP = 0.0
    repetition_penalty: options.RepetitionPenalty = 1.0
    no_repeat_ngram_size: options.NoRepeatNgramSize = 0
    seed: options.Seed = None
    ignore_eos: options.IgnoreEos = False

    def params(self) -> SamplingParams:
        """Check them."""
        return SamplingParams(**vars(self))


@grouped
def bench(
    model: Model,
    method: Methods = None,
    baseline: Baseline = "none",
    draft_tokens: options.DraftTokens = "auto",
    verifier: options.Verifier = "auto",
    questions: Questions = None,
    categories: Categories = None,
    limit: Limit = None,
    chat: ChatOrRaw = None,
    batch_size: Batches = "1",
    temperature: Temperatures = "0",
    repeats: Repeats = 3,
    block_widths: Widths = None,
    *,
    sampling: BenchSampling,
    output: Output = None,
    overwrite: options.Overwrite = False,
    html: Html = None,
    no_plugin: options.NoPlugin = None,
    as_json: options.Json = False,
    debug: Debug = False,
) -> None:
    """Measure how fast drafters are, against plain decoding and transformers' own generation.

    The methods follow each other on every prompt, after a warm-up. Speed-ups are medians of the repeats with
    95% intervals; beside them stands what the formula predicts. docs/benchmarking.md tells the method.
    """
    from specdec_core.bench.methods import parse_methods

    target = options.named_target(model.target)
    depth = options.depth_of(draft_tokens)
    specs = parse_methods(method or ["prompt_lookup", "hf"], depth, verifier)
    wanted = chosen_questions(questions, categories, limit)
    batches = [_whole("--batch-size", part) for part in batch_size.split(",")]
    temperatures = [_number("--temperature", part) for part in temperature.split(",")]
    widths = [_whole("--block-widths", part) for part in block_widths.split(",")] if block_widths else []
    params = sampling.params()
    _check_html(html)
    with quiet(offline=model.offline, debug=debug) as out, silent_transformers(debug=debug):
        from specdec_core.bench.record import Record
        from specdec_core.bench.session import BenchOptions, run_bench
        from specdec_core.model.loading import load_model

        asked = BenchOptions(
            target=target,
            questions=wanted,
            source=questions or "built-in",
            methods=specs,
            params=params,
            baseline=baseline,
            batches=batches,
            temperatures=temperatures,
            repeats=repeats,
            chat=chat,
            revision=model.revision,
            optimize=model.optimize,
            widths=widths,
        )
        registry = discover(no_plugin or ())
        asked.check(registry)
        record = Record(output, overwrite=overwrite)
        loaded, tokenizer = load_model(target, **model.loading)
        say_if_demo(model)
        with _kept(output):
            report = run_bench(
                loaded, tokenizer, asked, record, registry=registry, watch=_progress, **model.loading
            )
        if html is not None:
            _write_page(html, report)
        if as_json:
            print_json(report, out)
    if not as_json:
        print_report(report)


def chosen_questions(file: str | None, categories: str | None, limit: int | None) -> list[Question]:
    """Read the questions that are wanted."""
    from specdec_core.bench.questions import built_in, read_questions, select

    found = built_in() if file is None else read_questions(file)
    names = None if categories is None else [name.strip() for name in categories.split(",")]
    return select(found, names, limit)


def _whole(name: str, text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise InvalidParameter(f"{name} {text}: it must be whole numbers of at least 1, with commas between")
    return int(text)


def _number(name: str, text: str) -> float:
    try:
        return SamplingParams(temperature=float(text)).temperature
    except ValueError:
        raise InvalidParameter(
            f"{name} {text}: it must be numbers of at least 0, with commas between"
        ) from None


def _check_html(file: str | None) -> None:
    """Find out before hours of measuring that a page cannot be drawn, or its file not be written."""
    if file is not None:
        if find_spec("matplotlib") is None:
            raise UsageError("--html needs matplotlib: pip install 'specdec-core[bench]'")
        folder = Path(file).expanduser().parent
        if not folder.is_dir() or Path(file).expanduser().is_dir():
            raise InvalidParameter(
                f"--html {file}: no file can be written there; name one in a folder that is"
            )


def _write_page(file: str, report: dict[str, Any]) -> None:
    from specdec_core.bench.page import make_page

    try:
        Path(file).expanduser().write_text(make_page(report), encoding="utf-8")
    except OSError as error:
        raise InvalidParameter(f"--html {file}: {error.strerror or error}; name another file") from error


@contextmanager
def _kept(output: str | None) -> Iterator[None]:
    """Say what an interruption leaves."""
    try:
        yield
    except KeyboardInterrupt:
        more = f"; {output} keeps what was measured, the same command goes on" if output else ""
        print(f"specdec: stopped{more}", file=sys.stderr)
        raise


def _progress(units: int) -> Callable[[str], object]:
    """Draw a line that moves on a terminal; nothing elsewhere."""
    if not units or not sys.stderr.isatty():
        return lambda _: None
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("warm-up", total=units)
    bar.start()

    def advance(what: str) -> None:
        bar.update(task, advance=1, description=what)
        if bar.finished:
            bar.stop()

    return advance
