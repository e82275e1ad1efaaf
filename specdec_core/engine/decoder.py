"""`SpecDecoder`: a target, a drafter and verifiers, ready to generate."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Sequence
from contextlib import closing
from typing import Any, TypeVar, overload

from torch import nn

from specdec_core.checks.guard import GuardedDrafter
from specdec_core.contract.blame import blaming, described
from specdec_core.contract.draft import DraftLaw
from specdec_core.contract.errors import (
    DrafterError,
    IncompatiblePair,
    InvalidParameter,
    PluginError,
    SpecdecError,
)
from specdec_core.contract.interfaces import Drafter, Verifier
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.drafting.forced import Forcing
from specdec_core.engine.feed import Feed
from specdec_core.engine.handles import Inbox
from specdec_core.engine.loop import Round
from specdec_core.engine.off_thread import off_thread
from specdec_core.engine.requests import Params, RowMaker
from specdec_core.engine.session import Session, plain_mode
from specdec_core.engine.target import Target
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
    check_unclaimed,
    claim,
)
from specdec_core.plugins.registry import Registry
from specdec_core.rows.clock import Clock
from specdec_core.rows.prompts import Prompt, Prompts
from specdec_core.rows.results import GenerationResult, Results, StreamChunk
from specdec_core.rows.row import Row
from specdec_core.rows.stats import Stats
from specdec_core.rows.stopping import model_eos_ids

Key = TypeVar("Key")


class SpecDecoder:
    """Generates with an unmodified Hugging Face causal language model, faster, and says the same.

    Calls from several threads, and several streams, share its rounds: each says what it would say alone.

    Args:
        model: the target.
        tokenizer: the target's; without one the decoder takes and gives ids.
        drafter: a drafter, or its text as on the command line: `name:option=value,...`.
        verifier: a verifier, its text, or "auto": the most preferred one that fits each call.
        draft_tokens: "auto": in each round the depth that promises most tokens a second, none where
            nothing pays (`specdec_core.length.adaptive`); or a fixed depth; None: the drafter's own, fixed.
        max_batch: most rows at once, of all calls; further ones wait for a place.
        memory: most bytes for caches and distributions; rows that do not fit wait. None: what is free.
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
        memory: int | None = None,
        strict: bool = False,
        reuse_prefixes: bool = True,
        prefill_chunk: int = DEFAULT_CHUNK,
        capture: Capture | None = None,
        registry: Registry | None = None,
        offline: bool = False,
        trust_remote_code: bool = False,
        optimize: str | Optimizations = "none",
    ) -> None:
        _check_counts(
            draft_tokens=draft_tokens, max_batch=max_batch, prefill_chunk=prefill_chunk, memory=memory
        )
        registry = registry or installed_plugins()
        self.drafter = build_drafter(drafter, registry)
        self._auto = verifier == "auto"
        self._verifiers = build_verifiers(verifier, registry)
        if not self._auto:
            check_pair(self._verifiers[0], self.drafter.name, self.drafter.capabilities)
        self.tokenizer, self.max_batch, self.draft_tokens = tokenizer, max_batch, draft_tokens
        with plain_mode():
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
        self._rows, self._session = self._ready(strict, memory)

    def _ready(self, strict: bool, memory: int | None) -> tuple[RowMaker, Session]:
        """Make what requests become rows by, and where these are decoded."""
        own, forces = self.drafter.capabilities, all(DraftLaw.ONE_HOT in one.laws for one in self._verifiers)
        forcing = Forcing(self.drafter) if forces else None
        guard = GuardedDrafter(self.drafter, self.target.vocab_size, strict=strict, forcing=forcing)
        clock = Clock(self.target.device)
        length = self._length_policy(clock)
        maker = RowMaker(
            self.target,
            (self.drafter.name, own),
            self._verifiers,
            auto=self._auto,
            forced_depth=forcing.most if forcing else 0,
            eos=model_eos_ids(self.target.model, self.tokenizer),
            learns=own.learns or isinstance(length, AdaptiveLength),
        )
        session = Session(self.target, guard, length, clock, maker, max_batch=self.max_batch, memory=memory)
        return maker, session

    @property
    def session(self) -> Session:
        """Where requests join by hand, as a server does; all calls of this decoder share its rounds."""
        return self._session

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
        """Give the verifier that rows with such params get.

        Raises:
            IncompatiblePair: none fits.
            InvalidParameter: the one that was asked for does not sample, and a row does.
        """
        return self._rows.verifier_for(params)

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
            SpecdecError: a request failed; the others were finished: `error.results` has all results.
        """
        rows, many = self._rows.rows(prompts, params)
        inbox = Inbox()
        with closing(self._session.follow(rows, inbox)) as steps:
            results = {id(event.row): event.result for step in steps for event in step.events if event.last}
        made = [results[id(row)] for row in rows]
        _raise_first([row.error for row in rows], made)
        found = [result for result in made if result is not None]
        return Results(found, Stats.pooled([row.stats for row in rows], inbox.timed)) if many else found[0]

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
        rows, many = self._rows.rows(prompt, params)
        if many:
            raise InvalidParameter("stream takes one prompt and n=1; use generate for several")
        return self._stream(rows, watch)

    def astream(self, prompt: Prompts, params: SamplingParams | None = None) -> AsyncIterator[StreamChunk]:
        """Stream without blocking the event loop: the asynchronous `stream`.

        Cancelling, or `aclose`, ends the generation after the round under way.
        """
        return off_thread(self.stream(prompt, params))

    def rounds(self, prompts: Prompts, params: Params = None) -> Generator[Round, None, None]:
        """Generate, yielding every round as it is: for traces, progress and measurements.

        Closing the iterator early leaves the decoder ready for the next call.
        """
        rows, _ = self._rows.rows(prompts, params)
        return self._rounds(rows)

    def finished(
        self, requests: Iterable[tuple[Key, Prompt, SamplingParams]], like: Sequence[SamplingParams] = ()
    ) -> Generator[tuple[Key, GenerationResult | SpecdecError], None, None]:
        """Generate for any number of requests, which are taken one by one as places become free.

        What gives the requests may take its time: it is asked in a thread of its own, and stops nobody.

        Args:
            requests: a key of the caller's, a prompt, and its params.
            like: params such as the requests', which are checked at once.

        Yields:
            The key, and the result of each sample as soon as it has ended, or the error that refused it.
        """
        for params in like:
            self.verifier_for([params])
        return self._finished(requests)

    def _finished(
        self, requests: Iterable[tuple[Key, Prompt, SamplingParams]]
    ) -> Generator[tuple[Key, GenerationResult | SpecdecError], None, None]:
        inbox = Inbox(open=True)
        keys: dict[int, Key] = {}  # of rows under way

        def enter(request: tuple[Key, Prompt, SamplingParams]) -> tuple[Key, SpecdecError] | None:
            key, prompt, params = request
            try:
                rows, _ = self._rows.rows(prompt, params)
            except SpecdecError as error:
                return key, error
            except Exception as error:  # of a tokenizer
                failure = InvalidParameter(f"this prompt cannot be encoded: {described(error)}")
                failure.__cause__ = error
                return key, failure
            keys.update((row.id, key) for row in rows)
            self._session.enter(rows, inbox=inbox)
            return None

        with closing(Feed(self._session, inbox, requests, enter)) as feed:
            for step in feed.steps():
                if not step.events:
                    yield feed.refused()
                for event in step.events:
                    if event.last:
                        yield keys.pop(event.row.id), _told(event.result, event.error)

    def _rounds(self, rows: list[Row]) -> Generator[Round, None, None]:
        with closing(self._session.follow(rows, Inbox())) as steps:
            for step in steps:
                for event in step.events:
                    if isinstance(event.error, DrafterError):  # of a strict run: it ends at once
                        raise event.error
                if step.round is not None and any(event.error is None for event in step.events):
                    yield step.round
        _raise_first([row.error for row in rows], None)

    def _stream(
        self, rows: list[Row], watch: Callable[[Round], object] | None
    ) -> Generator[StreamChunk, None, None]:
        with closing(self._session.follow(rows, Inbox(), stream=True)) as steps:
            for step in steps:
                if watch is not None and step.round is not None:
                    watch(step.round)
                for event in step.events:
                    if event.error is not None:
                        raise event.error
                    yield StreamChunk(event.text, list(event.token_ids), event.result)

    def _length_policy(self, clock: Clock) -> LengthPolicy:
        """Make what decides how much is drafted."""
        can = self.drafter.capabilities
        if self.draft_tokens != "auto" or not can.max_depth:
            return FixedLength.of(can, None if self.draft_tokens == "auto" else self.draft_tokens)
        target = self.target
        costs = RoundCosts(target.device.type, target.runner.warm_up, ragged=target.runner.ragged)
        # Where a look at a confidence would be a transfer, nobody asks for one.
        asks = can.asks and target.device.type == "cpu"
        return AdaptiveLength(can, costs, clock.read, asks=asks)

    def _bind(self) -> None:
        def fault(error: BaseException) -> PluginError:
            return PluginError(f"drafter {self.drafter.name!r}: bind raised {described(error)}")

        with blaming(fault):
            self.drafter.bind(self.target)

    def _check_trees(self) -> None:
        probed = self.target.probed
        if self.drafter.capabilities.makes_trees and not probed.trees:
            raise IncompatiblePair(
                f"drafter {self.drafter.name!r} drafts trees, and {self.target.config.model_type} can "
                f"check chains only: {probed.reason}"
            )


def _told(result: GenerationResult | None, error: Exception | None) -> GenerationResult | SpecdecError:
    """Give a result, or the error of a request; what no request is to blame for is raised."""
    if result is not None:
        return result
    assert error is not None
    if not isinstance(error, SpecdecError):
        raise error
    return error


def _raise_first(errors: Sequence[Exception | None], results: list[GenerationResult | None] | None) -> None:
    """Raise the first error there is, with what was finished all the same."""
    for error in errors:
        if error is not None:
            error.results = results  # type: ignore[attr-defined]
            raise error


@functools.cache
def installed_plugins() -> Registry:
    """Discover the installed plugins once a process, so that a broken one is reported once."""
    return Registry.discover()


def _check_counts(
    *, draft_tokens: DraftTokens, max_batch: int, prefill_chunk: int, memory: int | None
) -> None:
    for name, value, least in (
        ("draft_tokens", 0 if draft_tokens in ("auto", None) else draft_tokens, 0),
        ("max_batch", max_batch, 1),
        ("prefill_chunk", prefill_chunk, 2),
        ("memory", 1 if memory is None else memory, 1),
    ):
        if type(value) is not int or value < least:
            raise InvalidParameter(
                f"{name}={value!r} is not allowed: it must be a whole number of at least {least}"
            )
