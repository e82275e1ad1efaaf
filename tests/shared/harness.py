"""A runner driven by hand: rows at places, trees behind them, and plain passes to compare with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdec_core import HOLE, ROOT, Outcome, Rows, SamplingParams
from specdec_core.model.runner import Runner

ROUNDING = 1e-4  # allowed in float32, relative to the spread of the logits
CPU = torch.device("cpu")

FULL = [
    *("cohere", "gpt2", "gpt_neox", "granite", "llama", "mixtral", "olmo2", "opt", "phi", "qwen2", "qwen3"),
    *("qwen3_moe", "stablelm"),
]
WINDOWED = [
    *("cohere2", "gemma2", "gemma3_text", "gpt_oss", "mistral", "mixtral", "olmo3", "phi3", "qwen2", "qwen3"),
    *("qwen3_moe", "starcoder2"),
]
NO_SDPA = {"gemma2", "gpt_oss"}  # so they take additive masks only
MODELS = [
    pytest.param((name, window, attention), id=f"{name}-{window or 'full'}-{attention}")
    for names, window in ((FULL, None), (WINDOWED, 8))
    for name in names
    for attention in ("sdpa", "eager")
    if not (name in NO_SDPA and attention == "sdpa")
]
ONCE_EACH = [param for param in MODELS if "sdpa" in str(param.id) or str(param.id).startswith(tuple(NO_SDPA))]


@contextmanager
def counted(model: nn.Module) -> Iterator[list[nn.Module]]:
    """List an entry for each forward of a model."""
    seen: list[nn.Module] = []
    hook = model.register_forward_hook(lambda module, *_: seen.append(module))
    try:
        yield seen
    finally:
        hook.remove()


class View:
    """What a runner reads of a `Context`: committed tokens by place."""

    def __init__(self, texts: Mapping[int, list[int]], device: torch.device = CPU) -> None:
        self.places = tuple(sorted(texts))
        self.device = device
        self._texts = [texts[place] for place in self.places]

    @property
    def host_lengths(self) -> tuple[int, ...]:
        return tuple(map(len, self._texts))

    def row_tokens(self, i: int) -> list[int]:
        return self._texts[i]


def admit(runner: Runner, texts: Mapping[int, list[int]], *, nodes: int = 8, new: int = 24) -> None:
    """Begin rows at these places."""
    places = tuple(sorted(texts))
    prompts = tuple(tuple(texts[place]) for place in places)
    runner.admit(Rows(places, places, prompts, (SamplingParams(max_new_tokens=new),) * len(places)), nodes)


def outcome(paths: Mapping[int, list[int]]) -> Outcome:
    """What a verdict leads to, as far as a runner reads it: accepted nodes by place."""
    places = tuple(sorted(paths))
    tokens, finished = tuple([] for _ in places), (None,) * len(places)
    return Outcome(places, places, tokens, tuple(paths[place] for place in places), finished)


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root to this one."""
    path: list[int] = []
    while node != ROOT:
        path.insert(0, node)
        node = parents[node]
    return path


@torch.no_grad()
def plain(model: Any, tokens: Sequence[int]) -> Tensor:
    """Logits of a plain causal pass without a cache, [T, V]."""
    ids = torch.tensor([list(tokens)], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits


def plain_tree(model: Any, text: list[int], tokens: list[int], parents: list[int]) -> dict[int, Tensor]:
    """Logits after the text (-1) and after every node, each from a plain pass over its root path."""
    expected = {ROOT: plain(model, text)[-1]}
    for node in reversed(range(len(parents))):
        if parents[node] != HOLE and node not in expected:
            path = path_to(parents, node)
            logits = plain(model, text + [tokens[at] for at in path])
            for depth, at in enumerate(path):
                expected[at] = logits[len(text) + depth]
    return expected


def distance(got: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the spread of what is expected."""
    assert got.shape == expected.shape
    return float(((got - expected).abs().max() / expected.std()).detach())


def check_tree(
    model: Any, got: Tensor, text: list[int], tokens: list[int], parents: list[int], limit: float = ROUNDING
) -> None:
    """Compare a row's logits, [1 + n, V], with plain passes; those of holes need only be finite."""
    assert torch.isfinite(got).all()
    for node, expected in plain_tree(model, text, tokens, parents).items():
        assert distance(got[1 + node], expected) < limit, (
            f"after {len(text)} tokens, node {node} of {parents}"
        )


def check_cache(runner: Runner, texts: dict[int, list[int]]) -> None:
    """Compare what each row holds with a cold prefill of the same tokens."""
    for place, text in texts.items():
        held = runner.held(place)
        if not held:
            continue
        cold = Runner(runner.model)
        cold.plan = runner.plan
        admit(cold, {0: text[:held]})
        cold.extend(View({0: text[:held]}))
        for mine, theirs in zip(
            runner.cache.keys + runner.cache.values, cold.cache.keys + cold.cache.values, strict=True
        ):
            [index] = runner.places.at([place])
            assert distance(mine[index, :, :held], theirs[0, :, :held]) < ROUNDING


def random_parents(rng: random.Random, n: int) -> list[int]:
    """A random forest with holes, or one of the shapes at the edge."""
    if n == 0:
        return []
    kind = rng.choice(["chain", "star", "second children", "short chain", "any", "any", "any", "nothing"])
    if kind == "chain":
        return list(range(-1, n - 1))
    if kind == "short chain":
        return [-1, *[HOLE] * (n - 1)]
    if kind == "star":
        return [ROOT] * n
    if kind == "nothing":
        return [HOLE] * n
    if kind == "second children":  # every level has two, and the second one goes on
        return [ROOT if i < 2 else i - 1 - i % 2 for i in range(n)]
    parents: list[int] = []
    for i in range(n):
        parent = rng.choice([ROOT, *range(i), HOLE])
        parents.append(HOLE if parent >= 0 and parents[parent] == HOLE else parent)
    return parents


def random_path(rng: random.Random, parents: list[int]) -> list[int]:
    """Accepted nodes: a random root path, often a long one."""
    real = [node for node, parent in enumerate(parents) if parent != HOLE]
    ends = [ROOT, *real, *real[-2:]]
    return path_to(parents, rng.choice(ends))


def random_tokens(rng: random.Random, n: int, vocab: int = 97) -> list[int]:
    """Any ids."""
    return [rng.randrange(vocab) for _ in range(n)]


def known(*texts: Sequence[int]) -> Callable[[list[int], int], list[int]]:
    """Know what comes next in these texts, prompt and output together: (tokens, k) -> k ids."""

    def ahead(tokens: list[int], k: int) -> list[int]:
        found = [list(text[len(tokens) :][:k]) for text in texts if list(text[: len(tokens)]) == tokens]
        return found[0] if found else []

    return ahead
