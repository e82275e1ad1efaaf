"""The measuring itself: units of interleaved runs, after a warm-up that is not counted."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from specdec_core.bench.methods import Method, Run, Stepping, checked
from specdec_core.bench.prompts import BenchPrompt, Group, make_groups
from specdec_core.bench.record import Key, Record
from specdec_core.contract.errors import SpecdecError
from specdec_core.contract.sampling_params import SamplingParams

_T = TypeVar("_T")


@dataclass(frozen=True)
class Plan:
    """What is measured: every method on every group, at every batch size and temperature, so many times."""

    prompts: Sequence[BenchPrompt]
    batches: Sequence[int]
    temperatures: Sequence[float]
    repeats: int
    params: SamplingParams  # of every prompt, but for temperature and seed

    def units(self) -> Iterator[tuple[Key, Group]]:
        """Give every unit, repeats outermost: what drifts in an hour hits all prompts alike."""
        for batch in self.batches:
            groups = make_groups(self.prompts, batch)
            for temperature in self.temperatures:
                for repeat in range(1, self.repeats + 1):
                    for group in groups:
                        yield (batch, temperature, repeat, group.name), group

    def params_of(self, group: Group, temperature: float) -> list[SamplingParams]:
        """Give the params of each prompt; the seed of a prompt is its own, and that of each of its copies."""
        places = {prompt.name: i for i, prompt in enumerate(self.prompts)}
        seed = self.params.seed if temperature else None
        return [
            self.params.replace(
                temperature=temperature,
                seed=None if seed is None else seed + places[prompt.name] + copy * len(places),
            )
            for prompt, copy in zip(group.prompts, group.copies, strict=True)
        ]


def pending(plan: Plan, record: Record) -> list[tuple[Key, Group]]:
    """Give the units that are not measured yet."""
    done = record.units()
    return [(key, group) for key, group in plan.units() if key not in done]


def measure(
    plan: Plan,
    methods: Sequence[Method],
    record: Record,
    *,
    warm_all: bool,
    advance: Callable[[str], object] = lambda _: None,
) -> None:
    """Measure what is pending.

    Within a unit the methods follow each other, each time from another one on, so that none always comes
    first. Those that can be stopped between rounds take turns, the one that has used the least time next: a
    machine that is slow for a second is slow for all of them.

    Args:
        warm_all: warm up on every group and not only on the longest and the shortest: where graphs are
            captured, each length has its own.
        advance: is called after each unit, with what it was.

    Raises:
        SpecdecError: a method failed, or lost a prompt.
    """
    waiting = pending(plan, record)
    settings: tuple[int, float] | None = None
    series: tuple[int, float, int] | None = None
    for number, (key, group) in enumerate(waiting):
        batch, temperature, repeat, name = key
        fit = [method for method in methods if not method.unfit(batch)]
        if settings != (batch, temperature):
            settings = (batch, temperature)
            ahead = {g.name: g for k, g in waiting if k[:2] == settings}
            _warm_up(plan, fit, list(ahead.values()), temperature, warm_all)
        if series != key[:3]:
            series = key[:3]
            for method in fit:
                method.renew()
        start = number % len(fit)
        params = plan.params_of(group, temperature)
        runs = _runs([*fit[start:], *fit[:start]], group, params)
        record.add(
            "unit",
            batch=batch,
            temperature=temperature,
            repeat=repeat,
            group=name,
            category=group.category,
            prompts=[prompt.name for prompt in group.prompts],
            runs={method.name: runs[method.name].to_dict() for method in fit},
        )
        advance(f"batch {batch}, temperature {temperature:g}, repeat {repeat}, {name}")


def _warm_up(
    plan: Plan, methods: Sequence[Method], groups: Sequence[Group], temperature: float, warm_all: bool
) -> None:
    """Let buffers grow, kernels be chosen and graphs be captured."""
    chosen = sorted(groups, key=_longest)
    if not warm_all:
        chosen = [chosen[-1], chosen[0]] if len(chosen) > 1 else chosen
    for group in chosen:
        for method in methods:
            _run(method, group, plan.params_of(group, temperature))


def _longest(group: Group) -> int:
    return max(len(prompt.ids) for prompt in group.prompts)


def _runs(methods: Sequence[Method], group: Group, params: Sequence[SamplingParams]) -> dict[str, Run]:
    """Let each method generate for a group, in turns where they can."""
    stepping = [method for method in methods if isinstance(method, Stepping) and method.steps_alone]
    turns = _turns(stepping, group, params) if len(stepping) > 1 else {}
    return {
        method.name: checked(method, group.prompts, _names(group), turns[method.name])
        if method.name in turns
        else _run(method, group, params)
        for method in methods
    }


def _turns(methods: Sequence[Stepping], group: Group, params: Sequence[SamplingParams]) -> dict[str, Run]:
    """Let methods generate round by round, always the one that has used the least time."""
    prompts, runs = [prompt.ids for prompt in group.prompts], dict[str, Run]()
    steps = {method.name: method.steps(prompts, params) for method in methods}
    used = dict.fromkeys(steps, 0.0)
    try:
        while used:
            name = min(used, key=used.__getitem__)
            done = _attempt(name, group, partial(_step, steps[name]))
            if isinstance(done, Run):
                runs[name] = done
                del used[name]
            else:
                used[name] = done
    finally:
        for generator in steps.values():
            generator.close()
    return runs


def _step(steps: Generator[float, None, Run]) -> float | Run:
    """Go on to the next round: the seconds used so far, or all that was done."""
    try:
        return next(steps)
    except StopIteration as end:
        done: Run = end.value
        return done


def _run(method: Method, group: Group, params: Sequence[SamplingParams]) -> Run:
    run = _attempt(method.name, group, lambda: method.run([prompt.ids for prompt in group.prompts], params))
    return checked(method, group.prompts, _names(group), run)


def _names(group: Group) -> list[str]:
    return [prompt.name for prompt in group.prompts]


def _attempt(method: str, group: Group, run: Callable[[], _T]) -> _T:
    """Say whose failure it was: whatever a method raises, a bench that goes on without it would lie."""
    try:
        return run()
    except Exception as error:  # whatever a method raises
        reason = str(error) or type(error).__name__
        raise SpecdecError(f"{method} failed on {group.name}: {reason}") from error
