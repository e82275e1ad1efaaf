"""What only a CUDA device can show: captured graphs give what eager forwards give, and a round waits once."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from typing import Any

import pytest
import torch
from harness import View, admit, check_tree, distance, outcome, random_parents, random_path, random_tokens

from specdec_core import Capture, SamplingParams, SpecDecoder
from specdec_core.model.graphs import FixedSteps, Inputs, Outputs
from specdec_core.model.runner import Runner
from specdec_core.testing.models import tiny_model
from specdec_drafters.early_exit import EarlyExit, EarlyExitConfig
from specdec_drafters.small_model import SmallModel, SmallModelConfig
from specdec_drafters.tree_top2 import TreeTop2, TreeTop2Config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def model_on_gpu(layers: int = 2) -> Any:
    return tiny_model(layers=layers, fresh=True).to("cuda")


@pytest.mark.parametrize("seed", range(3))
def test_graphs_give_the_logits_of_eager_forwards(seed: int) -> None:
    rng, model = random.Random(seed), model_on_gpu()
    eager, graphs = (Runner(model, chunk=8, capture=one) for one in (Capture.FIXED, Capture.GRAPHS))
    texts = {place: random_tokens(rng, rng.randrange(1, 40)) for place in (0, 2)}
    for runner in (eager, graphs):
        admit(runner, texts, nodes=8)
    for n in [4, 0, 4, 0, 4, 0, 3, 4, 0]:
        drafts = {place: (random_tokens(rng, n), random_parents(rng, n)) for place in texts}
        both = torch.tensor([drafts[place] for place in sorted(texts)]) if n else None
        given = (None, None) if both is None else (both[:, 0], both[:, 1])
        got = [runner.extend(View(texts, runner.device), *given) for runner in (eager, graphs)]
        assert distance(got[1], got[0]) < 1e-5
        paths = {place: random_path(rng, drafts[place][1]) for place in texts}
        for row, place in zip(got[1], sorted(texts), strict=True):
            check_tree(model, row, texts[place], *drafts[place])
            texts[place] += [*(drafts[place][0][node] for node in paths[place]), rng.randrange(97)]
        for runner in (eager, graphs):
            runner.keep(outcome(paths))
    assert graphs.steps.capture is Capture.GRAPHS
    assert sum(step.graph is not None for step in graphs.steps._steps.values()) >= 2


def test_graphs_outlive_rows_that_move() -> None:
    """They hold addresses: a row that has moved there is read by the graph of the one before it."""
    rng, model = random.Random(1), model_on_gpu()
    runner = Runner(model, capture=Capture.GRAPHS)
    texts = {place: random_tokens(rng, 9 + place) for place in range(3)}
    admit(runner, texts)
    runner.extend(View(texts, runner.device))
    runner.keep(outcome({place: [] for place in texts}))

    def step(place: int) -> None:
        texts[place].append(rng.randrange(97))
        got = runner.extend(View({place: texts[place]}, runner.device))
        runner.keep(outcome({place: []}))
        check_tree(model, got[0], texts[place], [], [])

    for _ in range(4):
        step(0)
    graphs = [step.graph for step in runner.steps._steps.values() if step.graph is not None]
    runner.release([0, 1])
    for _ in range(3):
        step(2)
    assert runner.places.at([2]) == [0]
    assert graphs == [step.graph for step in runner.steps._steps.values() if step.graph is not None] != []


DRAFTERS: dict[str, Callable[[], Any]] = {
    "none": lambda: "none",
    "prompt_lookup": lambda: "prompt_lookup:num_tokens=4",
    "small_model": lambda: SmallModel(SmallModelConfig(model=model_on_gpu(1), num_tokens=4)),
    "small_model, sampled": lambda: SmallModel(
        SmallModelConfig(model=model_on_gpu(1), num_tokens=4, draft="sampled")
    ),
    "early_exit": lambda: EarlyExit(EarlyExitConfig(layer=1, num_tokens=4)),
    "tree_top2": lambda: TreeTop2(TreeTop2Config(layer=1, depth=3)),
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_round_waits_once(name: str, batch: int, temperature: float) -> None:
    """By what CUDA itself counts as waiting; copies from pageable memory count, too."""
    decoder = SpecDecoder(model_on_gpu(), drafter=DRAFTERS[name](), draft_tokens=None, strict=True)
    prompts = [[3, 4, 5] * 5, [6, 7] * 3, [8, 9, 10, 11, 8, 9]][:batch]
    params = [
        SamplingParams(max_new_tokens=60, temperature=temperature, top_k=30, seed=i, ignore_eos=True)
        for i in range(batch)
    ]
    for _ in range(2):  # captures wait
        for _ in decoder.rounds(prompts, params):
            pass
    counts = []
    with closing(decoder.rounds(prompts, params)) as run, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        next(run)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in islice(run, 8):
                waits = [x for x in seen if "called a synchronizing" in str(x.message)]
                counts.append([f"{x.filename}:{x.lineno}" for x in waits])
                seen.clear()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert [len(places) for places in counts] == [1] * len(counts), counts
    assert counts


def test_a_failed_capture_leaves_everything_usable(caplog: pytest.LogCaptureFixture) -> None:
    before = torch.cuda.current_stream()

    def waits(x: Inputs) -> Outputs:
        return (x["a"] * x["a"].sum().item(),)

    def works(x: Inputs) -> Outputs:
        return (x["a"] * 2,)

    broken, sound = FixedSteps(Capture.GRAPHS), FixedSteps(Capture.GRAPHS)
    with caplog.at_level(logging.WARNING, "specdec"):
        for _ in range(3):
            (got,) = broken.run("key", {"a": torch.ones(2, device="cuda")}, waits)
            assert got.tolist() == [2, 2]
    assert len(caplog.records) == 1
    assert broken.capture is Capture.FIXED
    assert torch.cuda.current_stream() == before
    for value in (1.0, 2.0, 3.0):
        (got,) = sound.run("key", {"a": torch.full((2,), value, device="cuda")}, works)
        assert got.tolist() == [2 * value] * 2
    assert sound._steps["key"].graph is not None
