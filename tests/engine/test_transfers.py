"""A round has one device-to-host transfer, the outcome's: counted, so that no GPU is needed to see it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from support import ScriptedDrafter, accepting, ids, oracle, tiny_llama
from torch import Tensor
from transfers import counting

from specdec_core import HOLE, ROOT, Budget, Capture, Context, Draft, DraftLaw, SamplingParams, SpecDecoder
from specdec_drafters.early_exit import EarlyExit, EarlyExitConfig
from specdec_drafters.small_model import SmallModel, SmallModelConfig
from specdec_drafters.tree_top2 import TreeTop2, TreeTop2Config


class DeviceTree(ScriptedDrafter):
    """Makes a tree on the device, of what the device knows: siblings that follow the last token's id."""

    name = "device_tree"
    shape, depths = (ROOT, ROOT, 0, 0, 1, 2, 3), (1, 1, 2, 2, 2, 3, 3)

    def __init__(self) -> None:
        super().__init__(lambda ask: [], depth=3, nodes=7, trees=True)

    def propose(self, context: Context, budget: Budget) -> Draft:
        last = context.tokens.gather(1, context.lengths[:, None] - 1)
        offsets = torch.arange(1, 8, device=context.device)
        parents = torch.tensor([self.shape] * len(context.rows), device=context.device)
        deepest = torch.tensor(budget.depth, device=context.device)[:, None]
        parents = parents.masked_fill(torch.tensor(self.depths, device=context.device) > deepest, HOLE)
        return Draft.of((last + offsets) % 97, parents, DraftLaw.ONE_HOT, depth=3, width=2)


PROMPTS = [[3, 4, 5] * 5, [6, 7] * 3, ids(9, 71), [8]]
DRAFTERS: dict[str, Callable[[int], Any]] = {
    "none": lambda k: "none",
    "prompt_lookup": lambda k: f"prompt_lookup:num_tokens={k}",
    "scripted chain": lambda k: ScriptedDrafter(
        accepting(oracle(tiny_llama(), *PROMPTS), [2, k, 0], k), depth=k
    ),
    "tree on the device": lambda k: DeviceTree(),
    "small_model": lambda k: SmallModel(SmallModelConfig(model=tiny_llama(), num_tokens=k)),
    "early_exit": lambda k: EarlyExit(EarlyExitConfig(layer=1, num_tokens=k)),
    "tree_top2": lambda k: TreeTop2(TreeTop2Config(layer=1, depth=min(k, 3))),
}


@pytest.mark.parametrize("capture", [Capture.OFF, Capture.FIXED])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("k", [1, 16])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_round_has_one_transfer(
    name: str, k: int, batch: int, temperature: float, capture: Capture
) -> None:
    """One at any draft length, batch size and temperature, eagerly and at fixed shapes."""
    model, prompts = tiny_llama(), PROMPTS[:batch]
    decoder = SpecDecoder(model, drafter=DRAFTERS[name](k), draft_tokens=None, strict=True, capture=capture)
    params = [
        SamplingParams(max_new_tokens=90, temperature=temperature, top_k=30, seed=i) for i in range(batch)
    ]
    counts = []
    with counting() as names:
        for done in islice(decoder.rounds(prompts, params), 5):
            counts.append((list(names), done.draft.nodes))
            names.clear()
    assert [waits for waits, _ in counts] == [["tolist"]] * 5
    if name == "scripted chain" and not temperature:
        assert k in [nodes for _, nodes in counts]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["small_model", "sampled", "early_exit", "tree_top2"])
def test_lists_of_the_host_reach_the_device_in_one_way(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through `on_device`: a tensor made on a GPU directly waits for the forward under way."""
    sampled = SmallModelConfig(model=tiny_llama(), num_tokens=3, draft="sampled")
    drafter = SmallModel(sampled) if name == "sampled" else DRAFTERS[name](3)
    decoder = SpecDecoder(tiny_llama(), drafter=drafter, draft_tokens=None, strict=True)
    params = [  # a greedy row among others; one ends before the other, and its last draft is shorter
        SamplingParams(max_new_tokens=9 + 4 * i, temperature=temperature * i, seed=i) for i in range(2)
    ]
    real, direct = torch.tensor, []

    def tensor(values: Any, *args: Any, **options: Any) -> Tensor:
        if "device" in options:
            direct.append(inspect.stack()[1].function)
        return real(values, *args, **options)

    monkeypatch.setattr(torch, "tensor", tensor)
    assert len(list(decoder.rounds(PROMPTS[:2], params))) > 2
    assert set(direct) == {"on_device"}


def test_a_prefill_chunk_has_none() -> None:
    """Chunks of a long prompt are fed without waiting."""
    decoder = SpecDecoder(tiny_llama(), drafter="prompt_lookup", strict=True, prefill_chunk=4)
    prompt = ids(21, 72)
    with counting() as names:
        done = next(decoder.rounds(prompt, SamplingParams(max_new_tokens=9)))
        assert done.batch.rows[0].stats.prefill_calls == 5
        assert names == ["tolist"]


def test_accepted_second_children_are_moved_without_waiting() -> None:
    """Slots are moved by indices that the host knows already."""
    model, prompt = tiny_llama(), PROMPTS[0]
    ahead = oracle(model, prompt)

    def script(ask: Any) -> list[tuple[int, int]]:
        right = ahead(ask.tokens, 2)
        return [(1, ROOT), (right[0], ROOT), (2, 1), (right[1], 1)] if ask.depth >= 2 else []

    decoder = SpecDecoder(
        model, drafter=ScriptedDrafter(script, depth=2, nodes=4, trees=True), strict=True, draft_tokens=None
    )
    with counting() as names:
        for done in decoder.rounds(prompt, SamplingParams(max_new_tokens=9)):
            assert done.outcome.paths == ([1, 3],)
            assert names == ["tolist"]
            names.clear()


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.tolist(),
        lambda x: x[0].item(),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: bool(x.any()),
        lambda x: int(x[0]),
        lambda x: float(x[0]),
        lambda x: [0, 1, 2][x[0]],
        lambda x: x.nonzero(),
        lambda x: torch.nonzero(x),
        lambda x: torch.where(x > 0),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: torch.equal(x, x),
        lambda x: x.unique(),
        lambda x: f"{x[0]}",
    ],
)
def test_the_count_sees_each_way_to_wait(wait: Callable[[Tensor], object]) -> None:
    """Otherwise the tests above could not fail."""
    with counting() as names:
        x = torch.tensor([1, 2])
        assert not names
        wait(x)
        assert len(names) == 1


def test_the_count_sees_a_drafter_that_waits() -> None:
    """Otherwise the tests above could not fail."""

    class Waiting(DeviceTree):
        def propose(self, context: Context, budget: Budget) -> Draft:
            assert context.tokens.max() < 97
            return super().propose(context, budget)

    decoder = SpecDecoder(tiny_llama(), drafter=Waiting(), strict=True, draft_tokens=None)
    with counting() as names:
        next(decoder.rounds(PROMPTS[0], SamplingParams(max_new_tokens=9)))
        assert names == ["__bool__", "tolist"]
