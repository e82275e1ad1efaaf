"""A drafter under test: builds it for a target, and runs it while it is watched."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch

from specdec_core.contract.errors import DrafterError, SpecdecError
from specdec_core.contract.interfaces import Capabilities, Drafter, Verifier
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.drafting.combination import Combination
from specdec_core.engine.decoder import SpecDecoder
from specdec_core.plugins.registry import Registry
from specdec_core.plugins.spec_string import parse_drafters
from specdec_core.testing.contracts import Broken, Untried, must
from specdec_core.testing.faults import contract_of
from specdec_core.testing.models import ids
from specdec_core.testing.reference import greedy_fault
from specdec_core.testing.targets import KitTarget, loaded_target, tiny_target
from specdec_core.testing.watching import Node, Proposal, Sight, Text, Watched, muted

Prompts: TypeAlias = Sequence[Sequence[int]]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams]
Options: TypeAlias = Callable[[str, Any], Mapping[str, object] | None]
"""(drafter, model of a target) -> further options of the drafter"""
LENGTHS = (1, 3, 9, 20)
GREEDY = SamplingParams(max_new_tokens=16, seed=5)
SAMPLED = GREEDY.replace(temperature=0.9)
EARLY = ("works", "shape", "budget", "stateless")
"""Contracts whose runs go on past what a later one will name."""


@dataclass(eq=False)
class Run:
    """What came of a call."""

    drafter: Watched
    results: list[Any]
    error: DrafterError | None = None

    @property
    def proposals(self) -> list[Proposal]:
        """Every draft, in order."""
        return self.drafter.proposals

    @property
    def fault(self) -> str:
        """The contract that ended the run; empty if none did."""
        if self.error is None:
            return ""
        return contract_of(self.error, self.proposals[-1] if self.proposals else None)


class DrafterKit:
    """A drafter as `--drafter` names it, on the kit's targets.

    Args:
        spec: `name:option=value,...`; `{target}` and `{draft}` in a value stand for the folders of the target
            and of a small model of its vocabulary.
        options: gives further options that depend on the target, such as weights that fit it.
        target: a folder, in place of the tiny model that most contracts run on.
    """

    def __init__(
        self, spec: str, registry: Registry, *, options: Options | None = None, target: str | None = None
    ) -> None:
        self.spec, self.registry = spec, registry
        self._options, self._own = options, target
        self._made: dict[Callable[[DrafterKit], Run], Run] = {}

    def once(self, make: Callable[[DrafterKit], Run]) -> Run:
        """A run that several contracts look at."""
        if make not in self._made:
            self._made[make] = make(self)
        return self._made[make]

    @property
    def own_target(self) -> bool:
        """Whether the target is the author's."""
        return self._own is not None

    @cached_property
    def target(self) -> KitTarget:
        """The target that most contracts run on."""
        return loaded_target(self._own) if self._own else tiny_target()

    def build(self, target: KitTarget) -> Drafter:
        """Make a drafter for a target, as from the command line.

        Raises:
            SpecdecError: a name, an option or a value is wrong.
        """
        members = []
        for parsed in parse_drafters(self.spec):
            options: dict[str, object] = dict(parsed.options)
            for name, value in parsed.options.items():
                options[name] = value.replace("{target}", str(target.folder)).replace("{draft}", target.draft)
            more = self._options(parsed.name, target.model) if self._options else None
            members.append(self.registry.build_drafter(parsed.name, _merged(options, more)))
        return members[0] if len(members) == 1 else Combination(members)

    @cached_property
    def refusal(self) -> str:
        """Why the drafter cannot serve the kit's target; empty if it can."""
        try:
            self.decoder(Watched(self.build(self.target)))
        except SpecdecError as error:
            return str(error)
        return ""

    @cached_property
    def capabilities(self) -> Capabilities:
        """As configured for the kit's target."""
        if self.refusal:
            raise Untried(f"it does not serve {self.target.label}; see `works`")
        return self.build(self.target).capabilities

    def decoder(
        self,
        drafter: Drafter,
        target: KitTarget | None = None,
        verifier: str | Verifier = "auto",
        **options: Any,
    ) -> SpecDecoder:
        """Make a strict decoder, of fixed draft lengths unless asked otherwise."""
        target = target or self.target
        return SpecDecoder(
            target.model,
            target.tokenizer,
            drafter=drafter,
            verifier=verifier,
            registry=self.registry,
            **{"strict": True, "max_batch": 4, "draft_tokens": None, **options},
        )

    def run(
        self,
        prompts: Prompts,
        params: Params,
        *,
        see: Sight | None = None,
        contract: str = "",
        target: KitTarget | None = None,
        **options: Any,
    ) -> Run:
        """Generate with a new drafter.

        contract: the early contract that asks, of which faults of others are no business.

        Raises:
            Broken: the drafter failed, or broke a rule of `contract`; without one, any rule.
            SpecdecError: the drafter refuses `target`.
        """
        decoder, watched = self._pair(see, target, options)
        return self.call(decoder, watched, prompts, params, contract)

    def begin(self, prompts: Prompts, params: Params, rounds: int, **options: Any) -> Run:
        """Generate the first rounds only; raises as `run`."""
        decoder, watched = self._pair(None, None, options)
        with closing(decoder.rounds([list(prompt) for prompt in prompts], params)) as run:
            try:
                for _ in islice(run, rounds):
                    pass
            except DrafterError as error:
                raise Broken(str(error), see=Run(watched, [], error).fault) from error
        return Run(watched, [])

    def call(
        self, decoder: SpecDecoder, watched: Watched, prompts: Prompts, params: Params, contract: str = ""
    ) -> Run:
        """Generate with a decoder that was used before; raises as `run`."""
        try:
            run = Run(watched, list(decoder.generate([list(prompt) for prompt in prompts], params)))
        except DrafterError as error:
            run = Run(watched, [], error)
        if run.error is not None and (run.fault == contract or contract not in EARLY):
            raise Broken(str(run.error), see=run.fault) from run.error
        return run

    def _pair(
        self, see: Sight | None, target: KitTarget | None, options: dict[str, Any]
    ) -> tuple[SpecDecoder, Watched]:
        if self.refusal and (target is None or target is self.target):
            raise Untried(f"it does not serve {self.target.label}; see `works`")
        watched = Watched(self.build(target or self.target), see)
        return self.decoder(watched, target, **options), watched

    def fresh_draft(
        self, text: Text, left: int, params: SamplingParams, verifier: str | Verifier
    ) -> list[Node]:
        """What a new drafter proposes after a text that it has seen nothing of, round by round.

        The target says the last token itself, in a first round without a draft: some drafters need its
        states.
        """
        watched = Watched(self.build(self.target), muted(1))
        decoder = self.decoder(watched, verifier=verifier, max_batch=1)
        rounds = decoder.rounds([list(text[:-1])], params.replace(max_new_tokens=left + 1))
        next(rounds)
        next(rounds)
        rounds.close()
        must(watched.proposals, f"after {len(text)} tokens a new drafter was not asked")
        [last] = watched.proposals[-1:]
        if last.texts[0] != text:
            raise Untried("the target itself says another token there: a near-tie")
        return last.nodes(0)


def _merged(options: Mapping[str, object], more: Mapping[str, object] | None) -> dict[str, object]:
    """Options of the spec go before those of the author's hook."""
    return {**(more or {}), **options}


def check_said(target: KitTarget, prompt: Sequence[int], said: Sequence[int], where: str) -> None:
    """Raise `Broken` unless this is what the target says greedily."""
    fault = greedy_fault(target.model, prompt, said)
    must(not fault, f"{where}: {fault}")


def prompts_of(target: KitTarget, *lengths: int, seed: int = 1) -> list[list[int]]:
    """Prompts of these lengths; every second half repeats the first, so that a lookup has something."""
    prompts = []
    for length in lengths:
        half = ids((length + 1) // 2, seed, target.vocab)
        prompts.append((half + half)[:length])
    return prompts


@contextmanager
def global_seeds(seed: int) -> Iterator[None]:
    """Set the generators that no drafter may use, for a while: one that does must not look forgetful."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
