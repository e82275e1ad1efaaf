"""One bench from a loaded model to a report."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from specdec_core.bench.cost import measure_cost, widths_up_to
from specdec_core.bench.environment import environment
from specdec_core.bench.methods import PLAIN, Method, MethodSpec, parse_method
from specdec_core.bench.ours import Ours
from specdec_core.bench.process import Process
from specdec_core.bench.prompts import BenchPrompt, make_prompts, wants_chat
from specdec_core.bench.questions import Question
from specdec_core.bench.questions import digest as digest_of
from specdec_core.bench.record import Record
from specdec_core.bench.references import Reference
from specdec_core.bench.report import make_report
from specdec_core.bench.runner import Plan, measure, pending
from specdec_core.bench.stand import Stand, device_of
from specdec_core.bench.waits import count_waits, rounds_enough
from specdec_core.contract.errors import InvalidParameter
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.model.attention import context_limit, unwrap
from specdec_core.model.faster.optimize import Optimizations
from specdec_core.model.graphs import Capture
from specdec_core.plugins.choice import build_drafter, build_verifiers
from specdec_core.plugins.registry import Registry


@dataclass(frozen=True)
class BenchOptions:
    """What is asked for."""

    target: str
    questions: Sequence[Question]
    source: str  # of the questions: "built-in", or a file
    methods: Sequence[MethodSpec]  # plain decoding first
    params: SamplingParams
    baseline: str = PLAIN
    batches: Sequence[int] = (1,)
    temperatures: Sequence[float] = (0.0,)
    repeats: int = 3
    chat: bool | None = None
    revision: str | None = None
    optimize: str = "none"
    capture: Capture | None = None  # how our forwards run; None: as they would
    widths: Sequence[int] = ()  # of the blocks that are timed; none: up to the widest that is drafted

    def check(self, registry: Registry) -> None:
        """Refuse what is wrong before a target is loaded.

        Raises:
            UsageError: a drafter, a verifier or a value is wrong.
        """
        names = [spec.text for spec in self.methods]
        if self.baseline not in names:
            raise InvalidParameter(f"--baseline {self.baseline} is no method here; use {', '.join(names)}")
        if self.repeats < 3:
            raise InvalidParameter(f"--repeats {self.repeats}: a median needs at least 3")
        if self.params.max_new_tokens < 1:
            raise InvalidParameter("--max-new-tokens 0: nothing would be generated; give at least 1")
        if self.widths and min(self.widths) != 1:
            raise InvalidParameter("--block-widths: a block of 1 must be among them, the others' measure")
        Optimizations.of(self.optimize)
        for spec in self.methods:
            if spec.ours:
                build_drafter(spec.drafter, registry)
                build_verifiers(spec.verifier, registry)

    def settings(self, facts: dict[str, Any], chat: bool) -> dict[str, Any]:
        """Give what measurements of one file must have in common.

        facts: of the environment, and of those of programs.
        """
        sampling = ("top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size", "ignore_eos")
        return {
            "target": self.target,
            "revision": self.revision,
            "optimize": self.optimize,
            **({} if self.capture is None else {"capture": self.capture.value}),
            **facts,
            "methods": [_described(spec) for spec in self.methods],
            "questions": {
                "source": self.source,
                "count": len(self.questions),
                "digest": digest_of(self.questions),
            },
            "prompts": "chat" if chat else "raw",
            "batches": list(self.batches),
            "temperatures": list(self.temperatures),
            "repeats": self.repeats,
            **({"block_widths": sorted(self.widths)} if self.widths else {}),
            "max_new_tokens": self.params.max_new_tokens,
            "seed": self.params.seed,
            **{name: getattr(self.params, name) for name in sampling},
        }


def run_bench(
    model: Any,
    tokenizer: Any,
    options: BenchOptions,
    record: Record,
    *,
    registry: Registry,
    watch: Callable[[int], Callable[[str], object]] = lambda _: lambda _: None,
    shared: bool = False,
    **loading: Any,
) -> dict[str, Any]:
    """Measure what the record does not hold yet, and report all of it.

    Args:
        watch: takes the number of units to come; what it gives is called after each.
        shared: the model has other uses: its weights stay as they are.
        loading: how drafters' own and assistant models are loaded.

    Returns:
        As `make_report`.

    Raises:
        UsageError: options, prompts and model do not fit, or the record was made under other settings.
        SpecdecError: a method failed.
    """
    inner: Any = unwrap(model)
    facts = environment(device_of(inner), inner.dtype)
    alone = not shared and not any(spec.reference for spec in options.methods)
    stand = Stand.of(
        model,
        tokenizer,
        registry,
        optimize=options.optimize,
        capture=options.capture,
        alone=alone,
        target=options.target,
        **loading,
    )
    with made(options.methods, stand, max(options.batches)) as methods:
        return _run_bench(stand, methods, options, record, facts, watch)


def _run_bench(
    stand: Stand,
    methods: Sequence[Method],
    options: BenchOptions,
    record: Record,
    facts: dict[str, Any],
    watch: Callable[[int], Callable[[str], object]],
) -> dict[str, Any]:
    tokenizer, chat = stand.tokenizer, wants_chat(options.chat, stand.tokenizer)
    facts |= {method.name: method.versions for method in methods if isinstance(method, Process)}
    record.agree(options.settings(facts, chat))
    record.add("start", argv=sys.argv, time=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    prompts = make_prompts(
        options.questions,
        tokenizer,
        chat=chat,
        most=_longest_prompt(unwrap(stand.plain), options.params),
        answer=lambda name, ids: _answer(name, ids, methods[0], tokenizer, options, record),
    )
    plan = Plan(prompts, options.batches, options.temperatures, options.repeats, options.params)
    _measure_costs(stand, methods, prompts, options, record)
    _count_waits(stand, methods, prompts, record)
    measure(plan, methods, record, warm_all=_has_shapes(methods), advance=watch(len(pending(plan, record))))
    skipped = {
        f"{method.name} at batch {batch}": method.unfit(batch)
        for method in methods
        for batch in options.batches
        if method.unfit(batch)
    }
    return make_report(record, options.baseline, skipped)


def _has_shapes(methods: Sequence[Method]) -> bool:
    """Whether forwards run at fixed shapes, which are captured or compiled when they first come up."""
    ours = [method.decoder for method in methods if isinstance(method, Ours)]
    return any(decoder.target.runner.steps.capture is not Capture.OFF for decoder in ours)


@contextmanager
def made(specs: Iterable[MethodSpec], stand: Stand, max_batch: int = 1) -> Iterator[list[Method]]:
    """Build what runs the methods; programs end with the context."""
    methods: list[Method] = []
    with ExitStack() as programs:
        for spec in specs:
            if spec.command:
                methods.append(program := Process(spec, stand))
                programs.callback(program.close)
            elif spec.reference:
                methods.append(Reference(spec, stand))
            else:
                methods.append(Ours(spec, stand, max_batch=max_batch))
        yield methods


def plain_answers(
    stand: Stand, questions: Sequence[Question], chat: bool | None, params: SamplingParams
) -> list[BenchPrompt]:
    """Make the prompts of questions without a record: earlier turns are answered by plain decoding."""
    tokenizer, plain = stand.tokenizer, Ours(parse_method(PLAIN), stand, max_batch=1)
    return make_prompts(
        questions,
        tokenizer,
        chat=wants_chat(chat, tokenizer),
        most=_longest_prompt(unwrap(stand.plain), params),
        answer=lambda _, ids: _said(plain, ids, tokenizer, params.max_new_tokens),
    )


def _longest_prompt(model: Any, params: SamplingParams) -> int | None:
    """Give what the context leaves for a prompt."""
    limit = context_limit(model.config.get_text_config(decoder=True))
    return None if limit is None else limit - params.max_new_tokens


def _answer(
    name: str, ids: tuple[int, ...], plain: Method, tokenizer: Any, options: BenchOptions, record: Record
) -> str:
    """Let plain greedy decoding answer an earlier turn; once, the record keeps it."""
    for line in record.of("answer"):
        if line["prompt"] == name:
            return str(line["text"])
    text = _said(plain, ids, tokenizer, options.params.max_new_tokens)
    record.add("answer", prompt=name, text=text)
    return text


def _said(plain: Method, ids: tuple[int, ...], tokenizer: Any, most: int) -> str:
    run = plain.run([ids], [SamplingParams(max_new_tokens=most)])
    text: str = tokenizer.decode(run.token_ids[0], skip_special_tokens=True)
    return text


def _measure_costs(
    stand: Stand,
    methods: Sequence[Method],
    prompts: Sequence[BenchPrompt],
    options: BenchOptions,
    record: Record,
) -> None:
    """Time blocks behind a prompt of middle length, for each batch size, up to the widest draft."""
    known = {line["batch"] for line in record.of("cost")}
    widest = 1 + max(method.nodes for method in methods if isinstance(method, Ours))
    widths = sorted(set(options.widths)) or widths_up_to(widest)
    for batch in options.batches:
        if batch not in known:
            curve = measure_cost(stand, _middle(prompts), batch=batch, widths=widths)
            record.add("cost", **curve.to_dict())


def _count_waits(
    stand: Stand, methods: Sequence[Method], prompts: Sequence[BenchPrompt], record: Record
) -> None:
    """Count how often a round of each of our methods waits for a CUDA device."""
    if device_of(stand.plain).type != "cuda":
        return
    known = {line["method"] for line in record.of("waits")}
    for method in methods:
        if isinstance(method, Ours) and method.name not in known:
            found = count_waits(method.decoder, _middle(prompts), rounds_enough(method.nodes))
            record.add("waits", method=method.name, **found.to_dict())


def _middle(prompts: Sequence[BenchPrompt]) -> tuple[int, ...]:
    """Give a prompt of middle length."""
    return sorted((prompt.ids for prompt in prompts), key=len)[len(prompts) // 2]


def _described(spec: MethodSpec) -> str:
    """Name a method with what the command line gave for all."""
    if spec.command:
        return f"{spec.text}={shlex.join(spec.command)}"
    if spec.reference:
        return spec.text
    return f"{spec.text} (draft tokens {spec.draft_tokens}, verifier {spec.verifier})"
