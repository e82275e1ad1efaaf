"""What a round costs besides the model's forward: operators counted, so that no clock is needed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import ScriptedDrafter, ids, writer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_core import (
    HOLE,
    ROOT,
    Budget,
    Capabilities,
    Draft,
    DraftLaw,
    SamplingParams,
    SpecDecoder,
    TargetDistributions,
)
from specdec_core.checks.draft_values import CheckedDraft, check_chains, check_values
from specdec_core.contract.draft import HostNodes, on_device
from specdec_core.engine.handles import Request
from specdec_core.testing.models import tiny_model
from specdec_drafters.small_model import SmallModel, SmallModelConfig
from specdec_verifiers.greedy import Greedy

_VIEWS = {
    "_reshape_alias",
    "alias",
    "detach",
    "expand",
    "select",
    "slice",
    "squeeze",
    "transpose",
    "unflatten",
    "unsqueeze",
    "view",
}
_PICKS = {"gather", "index", "index_select"}  # read only what they give


class Operators(TorchDispatchMode):
    """Counts operators outside of models' forwards, and those that read a whole vocabulary."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.vocab, self.inside = vocab, 0
        self.names: list[str] = []
        self.over_vocabulary: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not self.inside:
            self.names.append(name)
            sizes = [x.shape[-1] for x in (*args, out) if isinstance(x, Tensor) and x.dim()]
            blocks = [x.shape[-2:].numel() for x in args if isinstance(x, Tensor) and x.dim() > 2]
            if max([0, *sizes, *blocks]) > self.vocab // 2 and name not in _VIEWS | _PICKS:
                self.over_vocabulary.append(name)
        return out


@contextmanager
def counting(decoder: SpecDecoder, *models: Any) -> Iterator[Operators]:
    """Count what is done outside of the forwards of the target and of these models."""
    seen = Operators(decoder.target.vocab_size)

    def outside(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            seen.inside += 1
            try:
                return forward(*args, **kwargs)
            finally:
                seen.inside -= 1

        return run

    with pytest.MonkeyPatch.context() as patch, seen:
        for model in (decoder.target.model, *models):
            patch.setattr(model, "forward", outside(model.forward))
        yield seen


def counts(decoder: SpecDecoder, prompts: list[list[int]], rounds: int = 4, **options: Any) -> Operators:
    """Count those of some rounds, the first ones left out."""
    run = decoder.rounds(prompts, SamplingParams(max_new_tokens=40, ignore_eos=True, **options))
    list(islice(run, 3))
    drafter: Any = decoder.drafter
    own = [drafter.draft_model.cached.model] if hasattr(drafter, "draft_model") else []
    with counting(decoder, *own) as seen:
        list(islice(run, rounds))
    run.close()
    return seen


class Chains(ScriptedDrafter):
    """Drafts as deep as it may what is mostly wrong, made as drafters on the host make it."""

    def propose(self, context: Any, budget: Budget) -> Draft:
        return Draft.chains([[7] * depth for depth in budget.depth], context.device)


# At the time of writing 27 and 91 a round. The bounds leave room for one more check, not for a tree.
BOUNDS = {"none": 40, "a chain of 2": 115, "a chain of 16": 115}
LENGTHS = {"a chain of 2": 2, "a chain of 16": 16}


def made(kind: str) -> Any:
    k = LENGTHS.get(kind, 0)
    return Chains(lambda ask: [], depth=k) if k else "none"


@pytest.mark.parametrize("kind", BOUNDS)
def test_a_greedy_round_takes_few_operators(kind: str) -> None:
    """Whatever the draft's length; a chain needs no tree."""
    seen = counts(SpecDecoder(tiny_model(), drafter=made(kind), draft_tokens=None), [ids(9)])
    assert len(seen.names) / 4 <= BOUNDS[kind]


@pytest.mark.parametrize("kind", BOUNDS)
def test_context_and_vocabulary_cost_no_operator_more(kind: str) -> None:
    found = set()
    for vocab, length in ((97, 9), (97, 200), (1500, 9)):
        model = tiny_model(vocab=vocab, context=512)
        seen = counts(SpecDecoder(model, drafter=made(kind), draft_tokens=None), [ids(length)])
        found.add(len(seen.names))
    assert len(found) == 1


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kind", BOUNDS)
def test_greedy_reads_the_vocabulary_once(kind: str, batch: int) -> None:
    """No softmax, no copy to float32, no second argmax: one pass over the logits a round."""
    model = tiny_model(vocab=50_000, layers=1)
    prompts = [ids(5, seed) for seed in range(batch)]
    decoder = SpecDecoder(model, drafter=made(kind), draft_tokens=None)
    assert counts(decoder, prompts).over_vocabulary == ["amax"] * 4


def test_a_draft_step_reads_the_vocabulary_once() -> None:
    """For the token; for its probability too only where somebody asks how sure the model was."""
    model = tiny_model(vocab=50_000, layers=1)
    drafter = SmallModel(SmallModelConfig(model=model, num_tokens=4))
    seen = counts(SpecDecoder(model, drafter=drafter, draft_tokens=None), [ids(5)])
    assert seen.over_vocabulary == ["amax"] * (4 + 1) * 4
    sure = SmallModel(SmallModelConfig(model=model, num_tokens=4, min_confidence=1e-9))
    seen = counts(SpecDecoder(model, drafter=sure, draft_tokens=None), [ids(5)])
    assert sorted(seen.over_vocabulary) == sorted(["_softmax", "amax", "amax"] * 4 * 4 + ["amax"] * 4)


def test_a_draft_step_takes_few_operators() -> None:
    """Of a chain on a row: its columns follow one another, whatever was fed before."""
    model = tiny_model()
    each = []
    for k in (4, 8):
        drafter = SmallModel(SmallModelConfig(model=model, num_tokens=k))
        decoder = SpecDecoder(model, drafter=drafter, draft_tokens=None)
        each.append(len(counts(decoder, [ids(9)]).names) / 4)
    assert (each[1] - each[0]) / 4 <= 20  # 62 more in its layout alone, when a step made a tree


# --- a chain is a tree ---------------------------------------------------------------------------------


CAN = Capabilities(frozenset({DraftLaw.ONE_HOT}), max_depth=6)


@st.composite
def chains(draw: st.DrawFn) -> tuple[Draft, Budget]:
    """Chains of three rows, over the budget, with ids outside the vocabulary and undeclared laws, or not."""
    n = draw(st.integers(1, 7))
    lengths = [draw(st.integers(0, n)) for _ in range(3)]
    tokens = [[draw(st.sampled_from([0, 1, 2, 3, 4, -1, 99])) for _ in range(n)] for _ in lengths]
    parents = [[*range(ROOT, length - 1), *[HOLE] * (n - length)] for length in lengths]
    laws = [draw(st.sampled_from([DraftLaw.ONE_HOT, DraftLaw.ONE_HOT, DraftLaw.SAMPLED])) for _ in lengths]
    budget = Budget([draw(st.integers(0, 6)) for _ in lengths], draw(st.integers(1, 6)))
    depth = draw(st.integers(1, n))
    draft = Draft.of(torch.tensor(tokens), torch.tensor(parents), laws, depth=depth, chain=True)
    return draft, budget


def rules(checked: CheckedDraft) -> list[int]:
    """Flags; of a chain, too deep and too many are one thing."""
    flags = checked.flags.tolist() if checked.known is None else [flag for _, flag in checked.known]  # type: ignore[union-attr]
    return [flag & ~(1 << 4) | (flag >> 4 & 1) << 3 for flag in flags]


@settings(deadline=None, max_examples=200)
@given(chains(), st.data())
def test_a_chain_is_checked_and_judged_as_the_tree_that_it_is(
    drafted: tuple[Draft, Budget], data: st.DataObject
) -> None:
    draft, budget = drafted
    chain = check_values(draft, budget, CAN, 5)
    tree = check_values(replace(draft, chain=False), budget, CAN, 5)
    assert chain.tree is None
    assert torch.equal(chain.draft.parents, tree.draft.parents)
    assert chain.counts is not None
    assert tree.counts is not None
    assert torch.equal(chain.counts, tree.counts)
    assert rules(chain) == rules(tree)
    if not chain.draft.nodes:
        return
    said = [[data.draw(st.integers(0, 4)) for _ in range(1 + chain.draft.nodes)] for _ in range(3)]
    p = TargetDistributions(torch.nn.functional.one_hot(torch.tensor(said), 5).float())
    verifier, nobody = Greedy(Greedy.Config()), Any
    one, other = (verifier.verify(p, checked.draft, nobody) for checked in (chain, tree))  # type: ignore[arg-type]
    paths = [[[node for node in row if node >= 0] for row in v.path.tolist()] for v in (one, other)]
    assert paths[0] == paths[1]
    assert torch.equal(one.next_token, other.next_token)


@settings(deadline=None, max_examples=200)
@given(chains())
def test_a_chain_that_the_host_knows_is_checked_there(drafted: tuple[Draft, Budget]) -> None:
    """With the same counts, flags and nodes as on the device, and tensors of what is left."""
    draft, budget = drafted
    real = [sum(parent != HOLE for parent in row) for row in draft.parents.tolist()]
    tokens = [row[:n] for row, n in zip(draft.tokens.tolist(), real, strict=True)]
    host = HostNodes.each(tokens, [range(ROOT, n - 1) for n in real], None)
    draft = replace(draft, laws=torch.zeros_like(draft.laws), host=host)
    for capabilities in (CAN, Capabilities(frozenset({DraftLaw.COUPLED}), max_depth=6)):
        there, here = (check(draft, budget, capabilities, 5) for check in (check_values, check_chains))
        assert there.counts is not None
        assert here.known is not None
        assert there.counts.tolist() == [count for count, _ in here.known]
        assert rules(there) == rules(here)
        n = here.draft.nodes
        assert (there.draft.parents[:, n:] == HOLE).all()
        assert torch.equal(there.draft.parents[:, :n], here.draft.parents)
        held = here.draft.parents != HOLE
        assert torch.equal(there.draft.tokens[:, :n][held], here.draft.tokens[held])
        assert n == 0 or not (here.draft.laws != DraftLaw.ONE_HOT).any()


@pytest.mark.parametrize(
    "parents", [[ROOT, HOLE, 1], [ROOT, ROOT, 1], [0, 1, 2], [ROOT, 0, 0], [HOLE, 0, 1]], ids=str
)
def test_what_is_no_chain_is_cut_and_flagged(parents: list[int]) -> None:
    """B102: up to the first node that does not follow the one before."""
    draft = Draft.chains([[1, 2, 3]])
    checked = check_values(replace(draft, parents=torch.tensor([parents])), Budget([3], 3), CAN, 5)
    told = replace(draft, host=HostNodes.each([[1, 2, 3]], [parents], None))
    on_host = check_chains(told, Budget([3], 3), CAN, 5)
    kept = 1 if parents[0] == ROOT else 0
    kept += parents[:2] == [ROOT, 0]
    assert checked.draft.parents.tolist() == [[*range(ROOT, kept - 1), *[HOLE] * (3 - kept)]]
    assert checked.flags is not None
    assert checked.flags.tolist() == [1 << 7]
    assert on_host.draft.tokens.tolist() == [[1, 2, 3][:kept]]
    assert on_host.known == ((kept, 1 << 7),)


# --- on the way to the device ----------------------------------------------------------------------------


def test_lists_reach_a_gpu_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from pageable memory would wait for the forward under way."""
    asked: list[dict[str, Any]] = []

    class Pinned:
        def to(self, device: Any, **options: Any) -> str:
            asked.append({"device": device, **options})
            return "there"

    def tensor(values: Any, **options: Any) -> Pinned:
        asked.append({"values": values, **options})
        return Pinned()

    monkeypatch.setattr(torch, "tensor", tensor)
    assert on_device([1, 2], torch.device("cuda:1")) == "there"
    assert asked == [
        {"values": [1, 2], "dtype": torch.int64, "pin_memory": True},
        {"device": torch.device("cuda:1"), "non_blocking": True},
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_every_list_goes_that_way(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor is made on the device directly, nor indexed by a list, from the draft to the outcome."""
    model, real = tiny_model(), torch.tensor
    decoder = SpecDecoder(model, drafter=made("a chain of 2"), draft_tokens=None)
    params = [
        SamplingParams(max_new_tokens=9, temperature=temperature, top_k=9, top_p=0.9, seed=i) for i in (1, 2)
    ]
    run = decoder.rounds([ids(5), ids(6)], params)
    list(islice(run, 3))
    direct = []

    def tensor(values: Any, *args: Any, **options: Any) -> Tensor:
        caller = inspect.stack()[1]
        if "device" in options and caller.function != "on_device":
            direct.append(caller.filename)
        return real(values, *args, **options)

    def index(x: Tensor, at: Any) -> Any:
        assert not any(isinstance(one, list) for one in (at if isinstance(at, tuple) else (at,))), "by a list"
        return index_real(x, at)

    index_real = Tensor.__getitem__
    monkeypatch.setattr(torch, "tensor", tensor)
    monkeypatch.setattr(Tensor, "__getitem__", index)
    list(run)
    assert not direct


def test_a_steady_round_stops_at_thirty_files_at_most() -> None:
    """Of our own: who follows a token through a round can hold them all in the head."""
    decoder = SpecDecoder(writer("abcdefgh"), drafter="prompt_lookup", strict=True)
    session, files = decoder.session, set[str]()
    session.submit(Request(list(b"abcdefgh" * 4), SamplingParams(max_new_tokens=400, ignore_eos=True)))
    for _ in range(10):
        session.step()

    def watch(frame: Any, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and any(part.startswith("specdec_") for part in Path(name).parts):
            files.add(name)

    sys.setprofile(watch)
    try:
        session.step()
    finally:
        sys.setprofile(None)
    assert any(name.endswith("prompt_lookup.py") for name in files)
    assert len(files) <= 30, sorted(files)
