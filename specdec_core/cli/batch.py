"""`specdec run --input`: many prompts, written as they end, and gone on with after an interruption."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from specdec_core.cli.batch_files import Entry, InputFile, OutputFile
from specdec_core.cli.batch_settings import Settings, settings_of
from specdec_core.cli.groups import Drafting, Many, Model
from specdec_core.cli.loading import opened
from specdec_core.cli.report import logprobs_of, print_json, statistics_line
from specdec_core.contract.errors import InvalidParameter, SpecdecError
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.rows.stats import Stats

if TYPE_CHECKING:
    from specdec_core.rows.results import GenerationResult

_FIGURES = (
    "prompt_tokens reused_tokens new_tokens rounds drafted_tokens accepted_tokens acceptance_rate "
    "mean_acceptance_length total_seconds"
).split()


def run_many(
    many: Many, model: Model, drafting: Drafting, params: SamplingParams, *, chat: bool | None, debug: bool
) -> None:
    """Generate for every row of a file that the output does not hold yet.

    Raises:
        UsageError: a file cannot be used.
        SpecdecError: rows failed; all others were generated.
    """
    rows = 8 if many.max_batch is None else many.max_batch
    if rows < 1:
        raise InvalidParameter(f"--max-batch {rows}: it must be a whole number of at least 1")
    source = InputFile(str(many.input), params, chat=chat)
    target = OutputFile(many.output, overwrite=many.overwrite, other_than=source.name)
    settings = settings_of(model, drafting, params, chat)
    done = target.done(settings)
    waiting, held, kinds = _survey(source, done, target.name)
    if held and waiting:
        print(
            f"specdec: {held} rows of {source.name} stand in {target.name}; {waiting} to go", file=sys.stderr
        )
    if not waiting:
        print(f"specdec: nothing to do: all rows of {source.name} stand in {target.name}", file=sys.stderr)
        return
    with opened(model, drafting, params, debug=debug, max_batch=rows) as (decoder, out):
        like = kinds if kinds and drafting.verifier == "auto" else [params]
        chosen = list(dict.fromkeys(decoder.verifier_for([kind]) for kind in like))
        with target.opened(out) as file, _progress(waiting) as advance:
            book = _Book(file, source.name, advance, settings if target.keeps else None)
            _generate(decoder, _requests(source.entries(), done, book), book, target)
    if book.stats.rounds:
        before = f", without the {held} rows that were there" if held else ""
        print(f"{statistics_line(decoder, chosen, book.stats)}{before}", file=sys.stderr)
    if book.failed:
        raise SpecdecError(f"{book.failed} of {waiting} rows failed; {target.name} holds the error of each")


def _survey(source: InputFile, done: dict[str, str], output: str) -> tuple[int, int, list[SamplingParams]]:
    """Count the rows that wait and those that are done; give params of each kind a verifier is chosen by.

    Raises:
        InvalidParameter: a row that is done has changed since.
    """
    waiting = held = 0
    kinds: dict[tuple[bool, ...], SamplingParams] = {}
    for entry in source.entries():
        made = done.get(entry.key)
        waiting, held = waiting + (made is None), held + (made is not None)
        if made and made != entry.digest:
            raise InvalidParameter(
                f"{source.name} line {entry.line} is not what it was when its row in {output} was made; "
                "set it back, name another output, or add --overwrite"
            )
        if entry.params is not None:
            kind = (entry.params.greedy, entry.params.seed is None, entry.params.constraint is None)
            kinds.setdefault(kind, entry.params)
    return waiting, held, list(kinds.values())


def _requests(
    entries: Iterable[Entry], done: dict[str, str], book: _Book
) -> Iterator[tuple[Entry, Any, SamplingParams]]:
    for entry in entries:
        if entry.key in done:
            continue
        if entry.params is None:
            book.refuse(entry, entry.error)
        else:
            yield entry, entry.prompt, entry.params


def _generate(decoder: Any, requests: Iterator[Any], book: _Book, target: OutputFile) -> None:
    try:
        with closing(decoder.finished(requests)) as finished:
            for entry, result in finished:
                if isinstance(result, SpecdecError):
                    book.refuse(entry, str(result))
                else:
                    book.add(entry, result)
    except KeyboardInterrupt:
        more = "; the same command goes on from there" if target.keeps else ""
        print(f"specdec: stopped: {book.rows} rows written{more}", file=sys.stderr)
        raise


class _Book:
    """Writes each row as it ends, and counts."""

    def __init__(
        self, file: TextIO, source: str, advance: Callable[[], object], settings: Settings | None
    ) -> None:
        self._file, self._source, self._advance, self._settings = file, source, advance, settings
        self._lock = threading.Lock()  # what is refused is told by the thread that reads the input
        self._samples: dict[int, list[GenerationResult]] = {}  # of rows whose others are under way
        self._began = time.perf_counter()
        self._stats = Stats()
        self.rows = self.failed = 0

    @property
    def stats(self) -> Stats:
        """Counts of all rows; the time is that of the whole."""
        return Stats.pooled([self._stats], Stats(total_seconds=time.perf_counter() - self._began))

    def refuse(self, entry: Entry, error: str) -> None:
        """Report a row that cannot be generated."""
        print(f"specdec: error: {self._source} line {entry.line}: {error}", file=sys.stderr)
        self.failed += 1
        self._write(entry, {"error": error})

    def add(self, entry: Entry, result: GenerationResult) -> None:
        """Take a sample of a row."""
        assert entry.params is not None
        self._stats = Stats.pooled([self._stats, result.stats])
        samples = self._samples.setdefault(entry.line, [])
        samples.append(result)
        if len(samples) == entry.params.n:
            del self._samples[entry.line]
            shown = [_shown(sample) for sample in sorted(samples, key=lambda sample: sample.sample)]
            made = {} if self._settings is None else {"settings": self._settings, "input": entry.digest}
            self._write(entry, (shown[0] if entry.params.n == 1 else {"samples": shown}) | made)

    def _write(self, entry: Entry, row: dict[str, Any]) -> None:
        identity = {} if entry.id is None else {"id": entry.id}
        with self._lock:
            print_json({"line": entry.line, **identity, **row}, self._file)
            self.rows += 1
            self._advance()


def _shown(result: GenerationResult) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason.value,
        "seed": result.seed,
        **logprobs_of(result),
        "stats": {name: getattr(result.stats, name) for name in _FIGURES},
    }


@contextmanager
def _progress(rows: int) -> Iterator[Callable[[], object]]:
    """Draw a bar on a terminal; give what moves it on by a row."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    shown = sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), disable=not shown, redirect_stdout=False) as bar:
        task = bar.add_task("rows", total=rows)
        yield lambda: bar.advance(task)
