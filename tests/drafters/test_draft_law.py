"""The laws that drafters with a model declare are those they draw by."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from drafting import Recorded, cousin, early, plain, says, small, tree
from harness import counted
from scipy.stats import chisquare
from support import ids, markov_llama, next_logits, sampled, warped
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import RepetitionPenaltyLogitsProcessor

from specdec_core import (
    HOLE,
    Budget,
    Capture,
    Context,
    Draft,
    Drafter,
    DraftLaw,
    SamplingParams,
    SpecDecoder,
)
from specdec_core.testing.models import tiny_model

SAMPLED: dict[str, Callable[[Any, float | None], Drafter]] = {
    "small_model": lambda draft, t: small(draft, draft="sampled", temperature=t),
    "tree_top2": lambda draft, t: tree(draft, children="sampled", temperature=t),
}
WARPS = {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.3}


class Redrawn(Recorded):
    """Draws every token again, from the q that the draft gives and with its key."""

    def propose(self, context: Context, budget: Budget) -> Draft:
        draft = super().propose(context, budget)
        assert draft.probs is None or draft.probs.dtype == torch.float32
        for node in range(draft.nodes):
            real = draft.parents[:, node] != HOLE
            assert draft.probs is not None
            again = context.rng.categorical(draft.probs[:, node], node, 0)
            assert torch.equal(again[real], draft.tokens[real, node])
        return draft


@pytest.mark.parametrize("kind", SAMPLED)
@pytest.mark.parametrize("temperature", [None, 0.5, 1.0])
def test_q_is_what_tokens_were_drawn_from(kind: str, temperature: float | None) -> None:
    target, n = tiny_model("llama"), 12
    draft_model = cousin(target)
    redrawn = Redrawn(SAMPLED[kind](draft_model, temperature))
    decoder = SpecDecoder(target, drafter=redrawn, strict=True, draft_tokens=None)
    params = SamplingParams(max_new_tokens=n, seed=3, **WARPS)
    decoder.generate([ids(4), ids(9)], params)
    texts = iter(redrawn.drafts)
    for draft in redrawn.raw:
        for row in range(draft.rows):
            text, _ = next(texts)
            check_q(draft, row, text, draft_model, None if temperature else params, temperature)


def check_q(
    draft: Draft,
    row: int,
    text: tuple[int, ...],
    model: Any,
    params: SamplingParams | None,
    temperature: float | None,
) -> None:
    """Compare every q of a row with the model's own, earlier siblings removed."""
    assert draft.probs is not None
    parents, tokens = draft.parents[row].tolist(), draft.tokens[row].tolist()
    paths: dict[int, list[int]] = {-1: list(text)}
    siblings: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        if parent == HOLE:
            continue
        paths[node] = [*paths[parent], tokens[node]]
        q = expected_q(model, paths[parent], params, temperature)
        q[siblings.setdefault(parent, [])] = 0
        given = draft.probs[row, node]
        torch.testing.assert_close(given, q / q.sum(), atol=1e-4, rtol=1e-3)
        assert given[tokens[node]] > 0
        siblings[parent].append(tokens[node])


def expected_q(
    model: Any, text: list[int], params: SamplingParams | None, temperature: float | None
) -> Tensor:
    logits = next_logits(model, text)[None]
    if params is not None:
        logits = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(torch.tensor([text]), logits)
        return warped(logits, params).softmax(dim=-1)[0]
    assert temperature is not None
    return (logits / temperature).softmax(dim=-1)[0]


@pytest.mark.parametrize("verifier", ["rejection", "block"])
def test_the_default_temperature_is_that_of_each_row(verifier: str) -> None:
    """Then a draft model that is the target is never refused, at any temperature; with another, it is."""
    target = tiny_model("llama")
    params = [SamplingParams(max_new_tokens=21, temperature=t, seed=5, top_p=0.9) for t in (0.0, 0.6, 1.5)]
    prompts = [ids(5), ids(6), ids(7)]
    rates = {}
    for temperature in (None, 3.0):
        drafter = small(target, draft="sampled", temperature=temperature, num_tokens=4)
        decoder = SpecDecoder(target, drafter=drafter, verifier=verifier, strict=True, draft_tokens=None)
        rates[temperature] = [r.stats.acceptance_rate for r in decoder.generate(prompts, params)]
    assert rates[None] == pytest.approx([1.0, 1.0, 1.0])
    assert max(rates[3.0]) < 0.8


def test_defaults_are_pinned() -> None:
    config = small(tiny_model("llama")).config
    assert (config.draft, config.temperature, config.min_confidence, config.num_tokens) == (
        "greedy",
        None,
        0.0,
        5,
    )
    assert (tree(layer=1).config.children, tree(layer=1).config.temperature) == ("top", None)
    assert small(tiny_model("llama")).capabilities.laws == {DraftLaw.ONE_HOT}


# --- the output's law ------------------------------------------------------------------------------

LOG_P = torch.randn(5, 5, generator=torch.Generator().manual_seed(1)).mul(1.5)
LOG_Q = LOG_P + torch.randn(5, 5, generator=torch.Generator().manual_seed(2))
LAW = {"temperature": 0.7, "top_k": 2}
DRAFTERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "sampled, q warped alike": ("rejection", lambda q: small(q, draft="sampled", num_tokens=3)),
    "sampled, at .1": ("rejection", lambda q: small(q, draft="sampled", temperature=0.1, num_tokens=3)),
    "sampled, at 1": ("block", lambda q: small(q, draft="sampled", temperature=1.0, num_tokens=3)),
    "sampled, at 2": ("block", lambda q: small(q, draft="sampled", temperature=2.0, num_tokens=3)),
    "careful": ("rejection", lambda q: small(q, draft="sampled", min_confidence=0.45, num_tokens=3)),
    "argmax": ("rejection", lambda q: small(q, num_tokens=3)),
    "coupled": ("match", lambda q: small(q, draft="coupled", num_tokens=3)),
    "lookup": ("rejection", lambda q: "prompt_lookup"),
    "tree, top": ("tree_mask", lambda q: tree(q, depth=2)),
    "tree, sampled": ("tree_mask", lambda q: tree(q, depth=2, children="sampled")),
    "tree, sampled, at 2": ("tree_mask", lambda q: tree(q, depth=2, children="sampled", temperature=2.0)),
}


def law_of_pairs(first: int) -> dict[tuple[int, int], float]:
    """The target's law of the next two tokens."""
    logits = LOG_P / LAW["temperature"]
    kept = logits.masked_fill(logits < logits.topk(2, dim=-1).values[:, -1:], -torch.inf).softmax(dim=-1)
    return {
        (a, b): float(kept[first, a] * kept[a, b])
        for a in range(5)
        for b in range(5)
        if kept[first, a] * kept[a, b] > 0
    }


@pytest.mark.parametrize("rows", [1000, pytest.param(8000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", DRAFTERS)
def test_law_of_the_first_two_tokens(case: str, rows: int) -> None:
    verifier, make = DRAFTERS[case]
    target = markov_llama(LOG_P)
    decoder = SpecDecoder(
        target,
        drafter=make(markov_llama(LOG_Q)),
        verifier=verifier,
        max_batch=500,
        strict=True,
        draft_tokens=None,
    )
    params = [SamplingParams(max_new_tokens=2, seed=seed, **LAW) for seed in range(rows)]
    results = decoder.generate([[3, 1]] * rows, params)
    seen = Counter(tuple(r.token_ids) for r in results)
    law = law_of_pairs(1)
    assert seen.keys() <= law.keys()
    assert chisquare([seen[pair] for pair in law], [rows * p for p in law.values()]).pvalue > 1e-3
    firsts = {a: sum(p for (x, _), p in law.items() if x == a) for a, _ in law}
    counts = Counter(a for a, _ in seen.elements())
    assert chisquare([counts[a] for a in firsts], [rows * p for p in firsts.values()]).pvalue > 1e-3


ALL: dict[str, Callable[[Any], Any]] = {
    "none": lambda target: "none",
    "greedy": lambda target: small(cousin(target)),
    "sampled": lambda target: small(cousin(target), draft="sampled"),
    "coupled": lambda target: small(cousin(target), draft="coupled"),
    "early": lambda target: early(1, draft="coupled"),
    "tree": lambda target: tree(cousin(target)),
    "tree sampled": lambda target: tree(cousin(target), children="sampled"),
}


@pytest.mark.parametrize("drafter", ALL)
def test_match_says_one_text_for_a_seed(drafter: str) -> None:
    target, n = tiny_model("llama"), 16
    prompts = [ids(5), ids(1), ids(12)]
    params = SamplingParams(max_new_tokens=n, temperature=0.8, top_p=0.95, seed=11)
    wanted = [sampled(target, prompt, params) for prompt in prompts]
    for max_batch, k in ((2, 1), (4, None)):
        decoder = SpecDecoder(
            target,
            drafter=ALL[drafter](target),
            verifier="match",
            max_batch=max_batch,
            draft_tokens=k,
            strict=True,
        )
        assert [r.token_ids for r in decoder.generate(prompts, params)] == wanted


def test_coupling_raises_acceptance() -> None:
    target = tiny_model("llama")
    close = cousin(target, noise=0.05)
    params = [SamplingParams(max_new_tokens=40, temperature=1.0, seed=seed) for seed in range(8)]
    accepted = {}
    for law in ("greedy", "sampled", "coupled"):
        decoder = SpecDecoder(
            target, drafter=small(close, draft=law), verifier="match", strict=True, draft_tokens=None
        )
        results = decoder.generate([ids(6)] * 8, params)
        accepted[law] = sum(r.stats.accepted_tokens for r in results)
    assert accepted["coupled"] > 1.3 * max(accepted["greedy"], accepted["sampled"])
    own = SpecDecoder(
        target,
        drafter=small(target, draft="coupled", num_tokens=4),
        verifier="match",
        strict=True,
        draft_tokens=None,
    )
    assert own.generate([ids(6)] * 8, params)[0].stats.acceptance_rate == 1.0


# --- stops, randomness, transfers ------------------------------------------------------------------


def test_a_chain_stops_before_what_it_is_not_sure_of() -> None:
    target, n = tiny_model("llama"), 20
    draft_model, least = cousin(target), 0.35
    recorded = Recorded(small(draft_model, min_confidence=least))
    prompts = [ids(4), ids(9)]
    says(SpecDecoder(target, drafter=recorded, strict=True, draft_tokens=None), prompts, n)
    lengths = set()
    for text, nodes in recorded.drafts:
        path = list(text)
        for token, _ in nodes:
            assert next_logits(draft_model, path).softmax(-1).max() >= least - 1e-4
            path.append(token)
        prompt = next(len(p) for p in prompts if list(text[: len(p)]) == p)
        if len(nodes) < min(5, prompt + n - len(text) - 1):
            assert next_logits(draft_model, path).softmax(-1).max() <= least + 1e-4
            lengths.add(len(nodes))
    assert len(lengths) > 2


def test_on_a_cpu_a_stop_saves_forwards() -> None:
    target = tiny_model("llama")
    drafter = small(cousin(target), min_confidence=0.35)
    recorded = Recorded(drafter)
    decoder = SpecDecoder(target, drafter=recorded, strict=True, draft_tokens=None)
    model: Any = drafter.draft_model.cached
    with counted(model.model) as calls:
        says(decoder, [ids(4)], 30)
    unfinished = [len(nodes) for text, nodes in recorded.drafts if len(text) < 4 + 30 - 6]
    finished = len(recorded.drafts) - len(unfinished)
    least = sum(1 + min(n, 4) for n in unfinished)  # what is not drafted is not fed
    assert least <= len(calls) <= least + 5 * finished
    assert sum(unfinished) < 4 * len(unfinished)


@pytest.mark.parametrize("law", ["greedy", "sampled"])
def test_on_a_device_a_stop_is_padding(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a look at the confidence would be a transfer, all forwards run and the rest is holes."""
    target = tiny_model("llama")
    drafts, calls = [], []
    for on_host in (True, False):
        monkeypatch.setattr("specdec_drafters._chain._Chain._decides_on_host", on_host)
        drafter = small(cousin(target), draft=law, temperature=1.0, min_confidence=0.35)
        recorded = Recorded(drafter)
        decoder = SpecDecoder(target, drafter=recorded, strict=True, draft_tokens=None)
        prompts = [ids(4), ids(9), ids(2)]
        params = SamplingParams(max_new_tokens=20, seed=2)
        wanted = [plain(target, tuple(prompt), 20) for prompt in prompts]
        model: Any = drafter.draft_model.cached
        with counted(model.model) as made:
            assert [r.token_ids for r in decoder.generate(prompts, params)] == wanted
        drafts.append(recorded.drafts)
        calls.append(len(made))
    assert drafts[0] == drafts[1]
    assert calls[0] < calls[1]


@pytest.mark.parametrize("drafter", ALL)
def test_no_global_generator_is_moved(drafter: str) -> None:
    target = tiny_model("llama")
    built = ALL[drafter](target)
    before, before_python = torch.get_rng_state(), random.getstate()
    decoder = SpecDecoder(target, drafter=built, strict=True, draft_tokens=None)
    decoder.generate(ids(4), SamplingParams(max_new_tokens=8, temperature=1.0))
    assert torch.equal(torch.get_rng_state(), before)
    assert random.getstate() == before_python


class Transfers(TorchDispatchMode):
    """Counts what would wait for a GPU: reads of single values, and shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in {
            "aten::_local_scalar_dense",
            "aten::nonzero",
            "aten::equal",
            "aten::masked_select",
        }:
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Watched(Recorded):
    """Counts transfers while its drafter proposes."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.transfers = Transfers()

    def propose(self, context: Context, budget: Budget) -> Draft:
        with self.transfers, refused("tolist", "numpy", "cpu"):
            return self.drafter.propose(context, budget)


class refused:
    """Makes tensor methods that transfer raise."""

    def __init__(self, *names: str) -> None:
        self._patch = pytest.MonkeyPatch()
        self._names = names

    def __enter__(self) -> None:
        for name in self._names:
            self._patch.setattr(Tensor, name, self._raise)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    @staticmethod
    def _raise(*_: object) -> Iterator[None]:
        raise AssertionError("a transfer while drafting")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", [name for name in ALL if name != "none"])
def test_drafting_transfers_nothing(drafter: str, temperature: float) -> None:
    target = tiny_model("llama")
    watched = Watched(ALL[drafter](target))
    decoder = SpecDecoder(
        target,
        drafter=watched,
        verifier="match",
        max_batch=2,
        strict=True,
        capture=Capture.FIXED,
        draft_tokens=None,
    )
    decoder.generate(
        [ids(4), ids(9), ids(2)],
        SamplingParams(max_new_tokens=12, temperature=temperature, top_p=0.9, seed=1),
    )
    assert watched.transfers.found == []
