"""Forwards at fixed shapes and addresses: what a CUDA graph needs, tested without a GPU."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import (
    ONCE_EACH,
    View,
    admit,
    check_cache,
    check_tree,
    distance,
    outcome,
    random_parents,
    random_path,
    random_tokens,
)
from support import ScriptedDrafter, base, greedy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_core import Capture, SamplingParams, SpecDecoder
from specdec_core.model.graphs import FixedSteps, Inputs, Outputs
from specdec_core.model.runner import Runner
from specdec_core.model.shapes import Shape
from specdec_core.testing.models import tiny_model
from specdec_drafters.small_model import SmallModel, SmallModelConfig
from specdec_drafters.tree_top2 import TreeTop2, TreeTop2Config

BITS = 1e-5  # paddings change the order of sums, and nothing else


# --- the same logits -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "window"), [("llama", None), ("gemma2", 8), ("gpt2", None), ("mistral", 8)])
def test_fixed_shapes_give_the_logits_of_exact_ones(name: str, window: int | None, seed: int) -> None:
    rng = random.Random(seed)
    model = tiny_model(name, window=window)
    exact, fixed = Runner(model, chunk=8), Runner(model, chunk=8, capture=Capture.FIXED)
    texts = {place: random_tokens(rng, rng.randrange(1, 40)) for place in rng.sample(range(7), 4)}
    for runner in (exact, fixed):
        admit(runner, texts, nodes=8)
    for _ in range(5):
        members = {place: texts[place] for place in rng.sample(sorted(texts), rng.randrange(1, 5))}
        n = rng.randrange(9)
        drafts = {place: (random_tokens(rng, n), random_parents(rng, n)) for place in members}
        both = torch.tensor([drafts[place] for place in sorted(members)]) if n else None
        got = [
            runner.extend(View(members), *((None, None) if both is None else (both[:, 0], both[:, 1])))
            for runner in (exact, fixed)
        ]
        assert distance(got[1], got[0]) < BITS
        paths = {place: random_path(rng, drafts[place][1]) for place in members}
        for row, place in zip(got[1], sorted(members), strict=True):
            check_tree(model, row, texts[place], *drafts[place])
            texts[place] += [*(drafts[place][0][node] for node in paths[place]), rng.randrange(97)]
        for runner in (exact, fixed):
            runner.keep(outcome(paths))
    check_cache(fixed, texts)


def test_levels_of_a_draft_and_hidden_states_at_fixed_shapes() -> None:
    rng = random.Random(5)
    model = tiny_model(layers=3)
    texts = {0: random_tokens(rng, 9), 3: random_tokens(rng, 2)}
    parents = torch.tensor([[-1, -1, -1, 0, 2, 2, 2, 4]] * 2)
    tokens = torch.tensor([random_tokens(rng, 8) for _ in texts])
    got = []
    for capture in (Capture.OFF, Capture.FIXED):
        runner = Runner(model, capture=capture, hidden_layers=(1, 3))
        admit(runner, texts)
        first = runner.extend(View(texts), tokens[:, :3], parents[:, :3])
        second = runner.extend(View(texts), tokens[:, 3:7], parents[:, :7], 3)
        third = runner.extend(View(texts), tokens[:, 7:], parents, 7)
        runner.keep(outcome({0: [2, 4, 7], 3: [0, 3]}))
        longer = {
            0: [*texts[0], *tokens[0, [2, 4, 7]].tolist(), 1, 2],
            3: [*texts[3], *tokens[1, [0, 3]].tolist(), 3],
        }
        last = runner.forward(View(longer), None, None)
        assert last.columns >= 2
        hidden = {layer: torch.cat([states[0, -2:], states[1, -1:]]) for layer, states in last.hidden.items()}
        got.append([first, second, third, last.logits.whole, *hidden.values()])
    for exact, fixed in zip(*got, strict=True):
        assert distance(fixed, exact) < BITS


@pytest.mark.parametrize("drafter", ["prompt_lookup", "none"])
def test_a_decoder_at_fixed_shapes_is_lossless(drafter: str) -> None:
    model = tiny_model()
    decoder = SpecDecoder(
        model, drafter=drafter, capture=Capture.FIXED, max_batch=3, prefill_chunk=8, draft_tokens=None
    )
    prompts = [[10], [3, 4, 5] * 6, [1, 2] * 20, [7, 8, 9, 7, 8]]
    for prompt, result in zip(prompts, decoder.generate(prompts, greedy(24)), strict=True):
        assert result.token_ids == base(model, prompt, 24)


@pytest.mark.parametrize("capture", [Capture.OFF, Capture.FIXED])
@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_a_context_is_filled_to_its_last_position(name: str, capture: Capture) -> None:
    """B60: drafts end where the positions do, and so does padding, also of learned positions."""
    model = tiny_model(name, context=64)
    prompt = random_tokens(random.Random(2), 58)
    said = base(model, prompt, 6)
    chain = ScriptedDrafter(lambda ask: [*said, 1, 2, 3][len(ask.tokens) - 58 :][: ask.depth], depth=8)
    decoder = SpecDecoder(model, drafter=chain, capture=capture, strict=True, draft_tokens=None)
    result = decoder.generate(prompt, greedy(50))
    assert (result.token_ids, result.finish_reason) == (said, "context")


# --- fixed addresses, few shapes -------------------------------------------------------------------


def test_inputs_keep_their_addresses() -> None:
    seen: dict[Shape, list[dict[str, int]]] = {}
    runner = Runner(tiny_model(), capture=Capture.FIXED)
    real = runner._model_forward

    def spy(x: Inputs, first: int, shape: Shape, span: object, compiled: None = None) -> Outputs:
        assert first == 0
        assert span is None  # where a row stands is no part of a graph
        seen.setdefault(shape, []).append({name: tensor.data_ptr() for name, tensor in x.items()})
        return real(x, first, shape, None)

    runner._model_forward = spy  # type: ignore[method-assign]
    rng = random.Random(0)
    texts = {0: random_tokens(rng, 3), 2: random_tokens(rng, 5)}
    admit(runner, texts, new=60)
    buffers = [buffer.data_ptr() for buffer in runner.cache.keys]
    for number in range(12):
        n = (2, 4, 0)[number % 3]
        both = torch.tensor([[random_tokens(rng, n), list(range(-1, n - 1))] for _ in texts])
        runner.extend(View(texts), both[:, 0] if n else None, both[:, 1] if n else None)
        runner.keep(outcome({0: [0][:n], 2: []}))
        texts[0] += [*both[0, 0, :1].tolist(), rng.randrange(97)]
        texts[2] += [rng.randrange(97)]
        buffers = buffers or [buffer.data_ptr() for buffer in runner.cache.keys]
        assert [buffer.data_ptr() for buffer in runner.cache.keys] == buffers
    assert len(seen) >= 3
    assert max(map(len, seen.values())) > 2
    for uses in seen.values():
        assert all(use == uses[0] for use in uses)


def test_steps_are_dropped_when_the_cache_moves() -> None:
    """A graph holds the addresses of the buffers."""
    runner = Runner(tiny_model(), capture=Capture.FIXED)
    texts = {0: [1, 2, 3]}
    admit(runner, texts, new=4)
    runner.extend(View(texts))
    runner.keep(outcome({0: []}))
    before = dict(runner.steps._steps)
    assert len(before) == 1
    admit(runner, {1: [4] * 200}, new=4)
    texts[0] += [4, 5, 6]
    logits = runner.extend(View(texts))
    after = runner.steps._steps
    assert not set(map(id, before.values())) & set(map(id, after.values()))
    assert distance(logits, exact_logits(runner.model, texts)) < BITS


def exact_logits(model: Any, texts: dict[int, list[int]]) -> Tensor:
    runner = Runner(model)
    admit(runner, texts)
    return runner.extend(View(texts))


def test_few_shapes_serve_a_row_of_any_length() -> None:
    """From 1 token to 600, with drafts of 0 to 8 nodes: block sizes and lengths come from short lists."""
    rng = random.Random(0)
    runner = Runner(tiny_model(layers=1, context=700), capture=Capture.FIXED)
    texts = {0: [5]}
    admit(runner, texts, nodes=8, new=620)
    drafts = 0
    while len(texts[0]) < 600:
        n = drafts % 9
        drafts += 1
        both = torch.tensor([random_tokens(rng, n), list(range(-1, n - 1))])
        runner.extend(View(texts), both[None, 0] if n else None, both[None, 1] if n else None)
        kept = rng.randrange(n + 1)
        runner.keep(outcome({0: list(range(kept))}))
        texts[0] += [*both[0, :kept].tolist(), 7]
    shapes: list[Any] = list(runner.steps._steps)
    assert {shape.nodes for shape in shapes} == {0, 1, 2, 3, 4, 6, 8}
    assert {shape.view for shape in shapes} == {256, 512, runner.cache.slots}
    assert len(shapes) <= 7 * 3 < drafts


def test_any_prompt_length_has_few_shapes() -> None:
    shapes = {Shape(1, length, 0, 0, length).bucketed(1 << 20) for length in range(1, 513)}
    assert len({shape.columns for shape in shapes}) == 17  # 14 sizes up to 64, then powers of two
    batches = {Shape(rows, 1, 0, 0, 1).bucketed(1 << 20).rows for rows in range(1, 65)}
    assert len(batches) == 14
    far = {Shape(1, 1, 4, 0, length).bucketed(1 << 20).view for length in range(1, 1 << 17, 97)}
    assert len(far) <= 8 + 6


@pytest.mark.parametrize("size", [1, 5, 7, 64, 65, 100, 255, 256, 257, 600, 2048, 2049, 5000])
def test_a_bucket_holds_what_it_is_for(size: int) -> None:
    shape = Shape(size, size, size, 3, size)
    bucketed = shape.bucketed(1 << 13)
    assert bucketed.fed == 3
    assert bucketed.bucketed(1 << 13) == bucketed
    for field in ("rows", "columns", "nodes", "view"):
        assert size <= getattr(bucketed, field) < 2 * size + 256
    assert shape.bucketed(size).view == size  # never beyond the buffer


# --- no host transfer ------------------------------------------------------------------------------


class NoSync(TorchDispatchMode):
    """Raises on whatever makes the host wait for the device, or copies from its memory."""

    METHODS = ("cpu", "item", "numpy", "tolist")
    BANNED = (
        "_local_scalar_dense",
        "equal",
        "is_nonzero",
        "item",
        "lift_fresh",
        "masked_select",
        "nonzero",
        "repeat_interleave",
        "unique",
    )

    def __enter__(self) -> NoSync:
        def wait(*_: object) -> None:
            raise AssertionError("a Tensor method that copies to the host, in a captured forward")

        self._patch = pytest.MonkeyPatch()
        for name in self.METHODS:
            self._patch.setattr(Tensor, name, wait)
        entered: NoSync = super().__enter__()
        return entered

    def __exit__(self, *raised: Any) -> None:
        self._patch.undo()
        super().__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name == "lift_fresh" and args[0].dim() == 0:
            return func(*args, **(kwargs or {}))  # a number, which a kernel takes by value
        if name.rstrip("_").split(".")[0] in self.BANNED or name.startswith(("_unique", "unique")):
            raise AssertionError(f"{name} in a captured forward")
        indices = args[1] if name in ("index", "index_put", "index_put_", "_index_put_impl_") else ()
        if any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices):
            raise AssertionError(f"{name} with a mask in a captured forward")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model", ONCE_EACH, indirect=True)
def test_a_captured_forward_never_waits(model: Any) -> None:
    rng = random.Random(1)
    runner = Runner(model, capture=Capture.FIXED, chunk=8)
    real = runner._model_forward
    shapes = set()

    def watched(x: Inputs, first: int, shape: Shape, span: None, compiled: None = None) -> Outputs:
        with NoSync():
            shapes.add(shape)
            return real(x, first, shape, span)

    runner._model_forward = watched  # type: ignore[method-assign]
    texts = {0: random_tokens(rng, 20), 2: random_tokens(rng, 3)}
    admit(runner, texts)
    both = torch.tensor([[random_tokens(rng, 5), [-1, -1, 0, 1, 3]] for _ in texts])
    runner.extend(View(texts), both[:, 0, :2], both[:, 1, :2])
    runner.extend(View(texts), both[:, 0, 2:], both[:, 1], 2)
    assert len(shapes) >= 3  # a chunk, pending tokens with nodes, nodes behind nodes


def test_the_watchdog_bites() -> None:
    x = torch.ones(3)
    waits: list[Callable[[], object]] = [
        lambda: x.sum().item(),
        lambda: bool(x[0] > 0),
        lambda: x.nonzero(),
        lambda: x[x > 0],
        lambda: torch.tensor([1, 2]),
        lambda: x.tolist(),
    ]
    for wait in waits:
        with NoSync(), pytest.raises(AssertionError, match="captured forward"):
            wait()


# --- capture, as far as it goes without a GPU --------------------------------------------------------


class FakeCuda:
    """Stands in for `torch.cuda`: a graph that replays by running the forward again, in place."""

    def __init__(self, fail: bool = False) -> None:
        self.captures, self.replays, self.fail = 0, 0, fail
        self.streams: list[Any] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("Stream", "current_stream", "stream", "CUDAGraph", "graph"):
            patch.setattr(torch.cuda, name, getattr(self, name))
        patch.setattr(torch.cuda, "graph_pool_handle", object)

    def Stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None)

    current_stream = Stream

    def stream(self, _: Any) -> Any:
        return nullcontext()

    def CUDAGraph(self) -> Any:
        return SimpleNamespace()

    @contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        assert pool is not None
        self.streams.append(stream)
        self.captures += 1
        if self.fail:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")
        yield


def doubled(x: Inputs) -> Outputs:
    return (x["a"] * 2,)


def test_a_shape_is_captured_at_its_second_use_and_then_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    steps = FixedSteps(Capture.GRAPHS)
    forwards: list[int] = []

    def forward(x: Inputs) -> Outputs:
        forwards.append(x["a"].data_ptr())
        return doubled(x)

    steps.run("key", {"a": torch.ones(2)}, forward)
    step = steps._steps["key"]
    assert (cuda.captures, len(forwards)) == (0, 1)

    def replay() -> None:
        cuda.replays += 1
        step.outputs[0].copy_(step.inputs["a"] * 2)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=replay))
    (second,) = steps.run("key", {"a": torch.full((2,), 3.0)}, forward)
    assert (cuda.captures, cuda.replays) == (1, 1)
    assert second.tolist() == [6, 6]
    runs = len(forwards)  # warm-up and capture
    (third,) = steps.run("key", {"a": torch.full((2,), 4.0)}, forward)
    assert third.tolist() == [8, 8]
    assert third.data_ptr() == second.data_ptr()
    assert (cuda.captures, cuda.replays, len(forwards)) == (1, 2, runs)
    assert len(set(forwards)) == 1  # one address for all
    steps.run("other", {"a": torch.zeros(2)}, forward)
    assert cuda.captures == 1
    steps.drop()
    steps.run("key", {"a": torch.zeros(2)}, forward)
    assert cuda.captures == 1  # a dropped key begins anew


def test_captures_share_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared pool asks for it, and cuBLAS keeps a workspace for every stream."""
    cuda = FakeCuda()
    cuda.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    steps = FixedSteps(Capture.GRAPHS)
    for key in "aabb":
        steps.run(key, {"a": torch.ones(2)}, doubled)
    steps.drop()
    for key in "aa":
        steps.run(key, {"a": torch.ones(2)}, doubled)
    assert len(cuda.streams) == 3
    assert len(set(map(id, cuda.streams))) == 1


def test_captured_outputs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay where they are: those not used for longest are given up."""
    FakeCuda().install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    steps = FixedSteps(Capture.GRAPHS, most_bytes=2 * 8)
    for key in ("a", "a", "b", "b", "a", "once", "c", "c"):
        steps.run(key, {"a": torch.ones(2)}, doubled)
    assert list(steps._steps) == ["a", "once", "c"]
    steps.run("large", {"a": torch.ones(99)}, doubled)
    steps.run("large", {"a": torch.ones(99)}, doubled)
    assert list(steps._steps) == ["once", "large"]


def test_where_capturing_fails_forwards_run_eagerly_and_one_line_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCuda(fail=True)
    cuda.install(monkeypatch)
    steps = FixedSteps(Capture.GRAPHS)
    with caplog.at_level(logging.WARNING, "specdec"):
        for value in (1.0, 2.0, 3.0, 4.0):
            for key in ("one", "two"):
                (got,) = steps.run(key, {"a": torch.full((2,), value)}, doubled)
                assert got.tolist() == [2 * value] * 2
    assert cuda.captures == 1
    assert steps.capture is Capture.FIXED
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("this model's forward cannot be captured in a CUDA graph and runs eagerly: ")
    assert line.endswith("CUDA error: operation not permitted when stream is capturing")


def test_a_failed_capture_is_told_by_what_went_wrong_first(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FakeCuda().install(monkeypatch)

    @contextmanager
    def graph(*_: Any, **__: Any) -> Iterator[None]:
        try:
            yield
        finally:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "graph", graph)
    calls: list[int] = []

    def forward(x: Inputs) -> Outputs:
        calls.append(len(calls))
        if len(calls) == 3:  # the first use, the warm-up, the capture
            raise RuntimeError("a look at the device")
        return doubled(x)

    steps = FixedSteps(Capture.GRAPHS)
    with caplog.at_level(logging.WARNING, "specdec"):
        for _ in range(2):
            (got,) = steps.run("key", {"a": torch.ones(2)}, forward)
            assert got.tolist() == [2, 2]
    assert caplog.records[0].getMessage().endswith("a look at the device")


class Clobbered(FixedSteps):
    """Outputs that are gone at the next run of any key, as they may be in a pool that graphs share."""

    last: Outputs = ()

    def run(self, key: Any, inputs: Inputs, forward: Callable[[Inputs], Outputs]) -> Outputs:
        inputs = {name: tensor.clone() for name, tensor in inputs.items()}  # they are copied first
        for output in self.last:
            output.fill_(float("nan"))
        self.last = super().run(key, inputs, forward)
        return self.last


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    "drafter", ["none", "small", "small:sampled", "early_exit:layer=1", "tree_top2:layer=1", "tree:sampled"]
)
def test_nobody_reads_outputs_after_the_next_run(
    drafter: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs share a pool of memory: what one gave may be overwritten by the next."""
    model, small = tiny_model(layers=2), tiny_model(layers=1)
    made: dict[str, Callable[[], Any]] = {
        "small": lambda: SmallModel(SmallModelConfig(model=small)),
        "small:sampled": lambda: SmallModel(SmallModelConfig(model=small, draft="sampled")),
        "tree:sampled": lambda: TreeTop2(TreeTop2Config(layer=1, children="sampled")),
    }
    prompts = [[10], [3, 4, 5] * 6, [1, 2] * 20]
    params = [SamplingParams(max_new_tokens=24, temperature=temperature, seed=i) for i in range(3)]

    def said() -> list[list[int]]:
        chosen = made[drafter]() if drafter in made else drafter
        decoder = SpecDecoder(model, drafter=chosen, capture=Capture.FIXED, strict=True, draft_tokens=None)
        return [result.token_ids for result in decoder.generate(prompts, params)]

    expected = said()
    monkeypatch.setattr("specdec_core.model.runner.FixedSteps", Clobbered)
    assert said() == expected


def test_a_decoder_whose_captures_fail_is_lossless(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FakeCuda(fail=True).install(monkeypatch)
    model = tiny_model()
    decoder = SpecDecoder(model, capture=Capture.FIXED)
    decoder.target.runner.steps.capture = Capture.GRAPHS
    with caplog.at_level(logging.WARNING, "specdec"):
        for _ in range(2):
            result = decoder.generate([3, 4, 5] * 4, greedy(24))
            assert result.token_ids == base(model, [3, 4, 5] * 4, 24)
    assert [record.name for record in caplog.records] == ["specdec"]


def test_graphs_are_for_cuda_only() -> None:
    """On a machine with a GPU, a draft model on the CPU would be captured as an empty graph."""
    assert Runner(tiny_model(), capture=Capture.GRAPHS).steps.capture is Capture.OFF
    assert Runner(tiny_model(), capture=Capture.FIXED).steps.capture is Capture.FIXED
