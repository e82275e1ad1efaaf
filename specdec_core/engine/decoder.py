"""`SpecDecoder`: a target, a drafter and a verifier, ready to generate."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence, Sized
from contextlib import closing, contextmanager
from itertools import count
from typing import Any, TypeVar, overload

import torch
from torch import nn

from specdec_core.checks.guard import GuardedDrafter
from specdec_core.contract.draft import DraftLaw
from specdec_core.contract.errors import (
    DecoderBusy,
    IncompatiblePair,
    InvalidParameter,
    PluginError,
    SpecdecError,
)
from specdec_core.contract.interfaces import Capabilities, Drafter, Verifier
from specdec_core.contract.rng import row_seed
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.drafting.forced import Forcing
from specdec_core.engine.loop import Round, rounds
from specdec_core.engine.memory import check_room
from specdec_core.engine.off_thread import off_thread
from specdec_core.engine.requests import Params, make_rows
from specdec_core.engine.scheduler import Scheduler
from specdec_core.engine.target import Target, evaluating
from specdec_core.length.adaptive import AdaptiveLength
from specdec_core.length.costs import RoundCosts
from specdec_core.length.policy import DraftTokens, FixedLength, LengthPolicy
from specdec_core.model.faster.optimize import Optimizations, optimized
from specdec_core.model.graphs import Capture
from specdec_core.model.loading import load_model
from specdec_core.model.runner import DEFAULT_CHUNK
from specdec_core.plugins.choice import (
    build_drafter,
    build_verifiers,
    check_pair,
    check_params,
    check_unclaimed,
    choose,
    claim,
)
from specdec_core.plugins.registry import Registry
from specdec_core.rows.clock import Clock
from specdec_core.rows.prompts import Prompt, Prompts
from specdec_core.rows.results import GenerationResult, Results, StreamChunk
from specdec_core.rows.row import Row
from specdec_core.rows.stats import Stats
from specdec_core.rows.stopping import model_eos_ids
from specdec_core.rows.text import RowText

Key = TypeVar("Key")


class SpecDecoder:
    """Generates with an unmodified Hugging Face causal language model, faster, and says the same.

    One decoder serves one thread at a time.

    Args:
        model: the target.
        tokenizer: the target's; without one the decoder takes and gives ids.
        drafter: a drafter, or its text as on the command line: `name:option=value,...`.
        verifier: a verifier, its text, or "auto": the most preferred one that fits each call.
        draft_tokens: "auto": in each round the depth that promises most tokens a second, none where
            nothing pays (`specdec_core.length.adaptive`); or a fixed depth; None: the drafter's own, fixed.
        max_batch: most rows at once; further prompts wait for a place.
        strict: raise when a drafter fails or breaks its contract, instead of going on without it.
        reuse_prefixes: feed what rows or calls have in common at the start only once; off for measurements.
        prefill_chunk: most prompt tokens of one forward.
        capture: how forwards run; None: CUDA graphs on a GPU, eagerly elsewhere.
        registry: where plugins are looked up; None: all installed ones.
        offline, trust_remote_code: for models that a drafter loads, as in `from_pretrained`.
        optimize: "none", or any of "pack" (weights, on the CPU), "fuse" (projections) and "compile" (it takes
            minutes; named alone, it brings the others where they pay) with commas between them, or "auto":
            what pays here at once. The model stays as it is; the decoder has copies of weights.

    Raises:
        UnsupportedModel: the target's state cannot be rolled back, or its attention takes no masks.
        IncompatiblePair: drafter, verifier and target do not fit together.
        UsageError: a name, an option or a value is wrong.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any | None = None,
        *,
        drafter: str | Drafter = "prompt_lookup",
        verifier: str | Verifier = "auto",
        draft_tokens: DraftTokens = "auto",
        max_batch: int = 8,
        strict: bool = False,
        reuse_prefixes: bool = True,
        prefill_chunk: int = DEFAULT_CHUNK,
        capture: Capture | None = None,
        registry: Registry | None = None,
        offline: bool = False,
        trust_remote_code: bool = False,
        optimize: str | Optimizations = "none",
    ) -> None:
        _check_counts(draft_tokens=draft_tokens, max_batch=max_batch, prefill_chunk=prefill_chunk)
        registry = registry or installed_plugins()
        self.drafter = build_drafter(drafter, registry)
        self._auto = verifier == "auto"
        self._verifiers = build_verifiers(verifier, registry)
        if not self._auto:
            check_pair(self._verifiers[0], self.drafter.name, self.drafter.capabilities)
        self.tokenizer, self.max_batch, self.draft_tokens = tokenizer, max_batch, draft_tokens
        with _plain_mode(), evaluating([model]):
            self.target = Target(
                model,
                tokenizer,
                max_rows=max_batch,
                chunk=prefill_chunk,
                reuse_prefixes=reuse_prefixes,
                capture=capture,
                offline=offline,
                trust_remote_code=trust_remote_code,
                optimize=Optimizations.of(optimize),
            )
            check_unclaimed(self.drafter)
            self._bind()
        self._check_trees()
        claim(self.drafter, self)
        self.target.serve(self.drafter.capabilities)
        self._guard = GuardedDrafter(self.drafter, self.target.vocab_size, strict=strict)
        self._forcing = GuardedDrafter(Forcing(self.drafter), self.target.vocab_size, strict=strict)
        self._eos = model_eos_ids(self.target.model, tokenizer)
        self._ids = count(self.drafter.capabilities.next_row)
        self._busy = threading.Lock()
        self._costs: RoundCosts | None = None

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        revision: str | None = None,
        offline: bool = False,
        trust_remote_code: bool = False,
        optimize: str = "auto",
        **options: Any,
    ) -> SpecDecoder:
        """Load a target by hub id or local folder; `options` are those of the constructor.

        The model has no other owner, so `optimize` changes it in place and needs no memory.
        """
        wanted = Optimizations.of(optimize)
        # A wrong name is told before a large model is loaded.
        registry = options["registry"] = options.get("registry") or installed_plugins()
        options["drafter"] = build_drafter(options.get("drafter", "prompt_lookup"), registry)
        build_verifiers(options.get("verifier", "auto"), registry)
        model, tokenizer = load_model(
            target,
            device=device,
            dtype=dtype,
            revision=revision,
            offline=offline,
            trust_remote_code=trust_remote_code,
        )
        optimized(model, wanted, in_place=True)
        options |= {"offline": offline, "trust_remote_code": trust_remote_code, "optimize": wanted.known()}
        return cls(model, tokenizer, **options)

    def verifier_for(self, params: Sequence[SamplingParams]) -> Verifier:
        """Give the verifier that rows with these params get."""
        can = self.drafter.capabilities
        verifier = (
            choose(self._verifiers, self.drafter.name, can, params) if self._auto else self._verifiers[0]
        )
        check_params(verifier, params)
        return verifier

    @overload
    def generate(self, prompts: str, params: SamplingParams | None = None) -> GenerationResult: ...
    @overload
    def generate(self, prompts: Prompts, params: Params = None) -> Any: ...
    def generate(self, prompts: Prompts, params: Params = None) -> Any:
        """Generate for one prompt (text, ids or chat messages) or a list of them.

        Returns:
            GenerationResult for one prompt; `Results`, a list of them, for a list of prompts or for params
            that ask for several samples: all samples of the first prompt, then of the second, and so on.

        Raises:
            UsageError: a prompt is empty, too long or holds unknown ids, or a parameter is wrong.
            DrafterError: with `strict`, the drafter failed.
        """
        rows, many = make_rows(prompts, params, self.target, self._eos, self._ids)
        verifier = self.verifier_for([row.params for row in rows])
        run = Stats()
        with self._exclusive():
            for _ in self._run(rows, verifier, run, _constrained(rows)):
                pass
        results = [self._result(row, verifier) for row in rows]
        return Results(results, Stats.pooled([row.stats for row in rows], run)) if many else results[0]

    def stream(
        self,
        prompt: Prompts,
        params: SamplingParams | None = None,
        *,
        watch: Callable[[Round], object] | None = None,
    ) -> Generator[StreamChunk, None, None]:
        """Generate for one prompt, yielding what each round commits; the last chunk holds the result.

        Chunks are whole characters, and what may yet become a stop string is held back. Closing the iterator
        early leaves the decoder ready for the next call.

        watch: is called with every round as it is, before its chunk is given.
        """
        rows, many = make_rows(prompt, params, self.target, self._eos, self._ids)
        if many:
            raise InvalidParameter("stream takes one prompt and n=1; use generate for several")
        return self._stream(rows[0], self.verifier_for([rows[0].params]), watch)

    def astream(self, prompt: Prompts, params: SamplingParams | None = None) -> AsyncIterator[StreamChunk]:
        """Stream without blocking the event loop: the asynchronous `stream`.

        Cancelling, or `aclose`, ends the generation after the round under way.
        """
        return off_thread(self.stream(prompt, params))

    def rounds(self, prompts: Prompts, params: Params = None) -> Generator[Round, None, None]:
        """Generate, yielding every round as it is: for traces, progress and measurements.

        Closing the iterator early leaves the decoder ready for the next call.
        """
        rows, _ = make_rows(prompts, params, self.target, self._eos, self._ids)
        return self._rounds(rows, self.verifier_for([row.params for row in rows]))

    def finished(
        self, requests: Iterable[tuple[Key, Prompt, SamplingParams]], like: Sequence[SamplingParams]
    ) -> Generator[tuple[Key, GenerationResult | SpecdecError], None, None]:
        """Generate for any number of requests, which are taken one by one as places become free.

        Args:
            requests: a key of the caller's, a prompt, and its params.
            like: params such as the requests', which the verifier is chosen for.

        Yields:
            The key, and the result of each sample as soon as it has ended, or the error that refused it.
        """
        verifier, constrained = self.verifier_for(like), any(p.constraint is not None for p in like)
        keys: dict[int, Key] = {}  # of rows under way
        ready: deque[tuple[Key, GenerationResult | SpecdecError]] = deque()

        def rows() -> Iterator[Row]:
            for key, prompt, params in requests:
                try:
                    check_params(verifier, [params])
                    made, _ = make_rows(prompt, params, self.target, self._eos, self._ids)
                except SpecdecError as error:
                    ready.append((key, error))
                    continue
                ready.extend((key, self._result(row, verifier)) for row in made if row.finished)
                keys.update((row.id, key) for row in made if not row.finished)
                yield from made

        with self._exclusive(), closing(self._run(rows(), verifier, Stats(), constrained)) as run:
            for done in run:
                ended = [row for row in done.batch.rows if row.finished]
                ready.extend((keys.pop(row.id), row.error or self._result(row, verifier)) for row in ended)
                while ready:
                    yield ready.popleft()
            yield from ready

    def _rounds(self, rows: list[Row], verifier: Verifier) -> Generator[Round, None, None]:
        with self._exclusive():
            yield from self._run(rows, verifier, Stats(), _constrained(rows))
        for row in rows:
            if row.error is not None:
                raise row.error

    def _stream(
        self, row: Row, verifier: Verifier, watch: Callable[[Round], object] | None
    ) -> Generator[StreamChunk, None, None]:
        if row.text is None and self.tokenizer is not None:
            row.text = RowText(self.tokenizer)
        with self._exclusive(), closing(self._run([row], verifier, Stats(), _constrained([row]))) as run:
            held: list[int] = []  # the last chunk waits for the finished row's statistics
            for done in run:
                if watch is not None:
                    watch(done)
                if row.finished is None:
                    yield StreamChunk(row.text.take() if row.text else "", done.outcome.tokens[0])
                else:
                    held = done.outcome.tokens[0]
            last = row.text.finish() if row.text else ""
            yield StreamChunk(last, held, self._result(row, verifier))

    def _run(
        self, rows: Iterable[Row], verifier: Verifier, timed: Stats, constrained: bool
    ) -> Generator[Round, None, None]:
        clock = Clock(self.target.device)
        forces = constrained and DraftLaw.ONE_HOT in verifier.laws
        drafter = self._forcing if forces else self._guard
        drafter.renew()
        self.target.check_copies()
        most = min(len(rows), self.max_batch) if isinstance(rows, Sized) else self.max_batch
        length = self._length(drafter.capabilities, verifier, clock)
        learns = drafter.capabilities.learns or isinstance(length, AdaptiveLength)
        if learns and not verifier.drafter_invariant:
            rows = [_apart(row) for row in rows] if isinstance(rows, Sized) else map(_apart, rows)
        check_room(most, length.nodes, self.target.vocab_size, drafter.capabilities, self.target.device)
        scheduler = Scheduler(rows, self.target, drafter, self.max_batch, length.nodes, clock)
        run = rounds(scheduler, self.target, drafter, verifier, length, clock)
        with evaluating(self.target.models), closing(run):
            while done := _next_round(run):
                timed.add_seconds(done.seconds)
                yield done
        timed.total_seconds = clock.now

    def _length(self, can: Capabilities, verifier: Verifier, clock: Clock) -> LengthPolicy:
        """Make a call's length policy. What rounds cost is kept: it tells of the machine, not of any text."""
        if self.draft_tokens != "auto" or not can.max_depth:
            return FixedLength.of(can, None if self.draft_tokens == "auto" else self.draft_tokens)
        if self._costs is None:
            runner = self.target.runner
            self._costs = RoundCosts(self.target.device.type, runner.warm_up, ragged=runner.ragged)
        costs = self._costs
        # Where a look at a confidence would be a transfer, nobody asks for one.
        asks = can.asks and self.target.device.type == "cpu"
        return AdaptiveLength(can, costs, lambda: clock.now, asks=asks)

    def _result(self, row: Row, verifier: Verifier) -> GenerationResult:
        assert row.finished is not None
        if row.error is not None:
            raise row.error
        if row.text is None and self.tokenizer is not None:
            row.text = RowText(self.tokenizer)
            row.text.add(row.output)
        if row.text is not None:
            row.text.finish()
        return GenerationResult(
            text=None if row.text is None else row.text.text,
            token_ids=row.output,
            finish_reason=row.finished,
            logprobs=None if row.params.logprobs is None else row.logprobs,
            sample=row.sample,
            prompt_token_ids=list(row.prompt),
            seed=row.seed,
            verifier=verifier.name,
            stats=row.stats,
        )

    def _bind(self) -> None:
        try:
            self.drafter.bind(self.target)
        except SpecdecError:
            raise
        except Exception as error:  # a plugin may raise anything: name it
            raise PluginError(
                f"drafter {self.drafter.name!r}: bind raised {type(error).__name__}: {error}"
            ) from error

    def _check_trees(self) -> None:
        probed = self.target.probed
        if self.drafter.capabilities.makes_trees and not probed.trees:
            raise IncompatiblePair(
                f"drafter {self.drafter.name!r} drafts trees, and {self.target.config.model_type} can "
                f"check chains only: {probed.reason}"
            )

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            raise DecoderBusy(
                "this decoder is in the middle of another call (a stream that was not closed counts); "
                "finish or close that one first, or use one decoder a thread"
            )
        try:
            yield
        finally:
            self._busy.release()


def _apart(row: Row) -> Row:
    """Let a row share no draw with another of its seed: what is learned from it depends on those."""
    row.own_seed = row_seed(row.seed, row.id)
    return row


def _constrained(rows: Iterable[Row]) -> bool:
    return any(row.walk is not None for row in rows)


@contextmanager
def _plain_mode() -> Iterator[None]:
    """Leave a caller's inference mode, whose tensors later calls could not write to; record no gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _next_round(run: Iterator[Round]) -> Round | None:
    with _plain_mode():
        return next(run, None)


@functools.cache
def installed_plugins() -> Registry:
    """Discover the installed plugins once a process, so that a broken one is reported once."""
    return Registry.discover()


def _check_counts(*, draft_tokens: DraftTokens, max_batch: int, prefill_chunk: int) -> None:
    for name, value, least in (
        ("draft_tokens", 0 if draft_tokens in ("auto", None) else draft_tokens, 0),
        ("max_batch", max_batch, 1),
        ("prefill_chunk", prefill_chunk, 2),
    ):
        if type(value) is not int or value < least:
            raise InvalidParameter(
                f"{name}={value!r} is not allowed: it must be a whole number of at least {least}"
            )
