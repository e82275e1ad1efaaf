"""Attention over grouped heads, not expanded: what transformers' `sdpa` gives, and no trace of it left."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import ROUNDING, View, admit, distance, outcome, random_parents, random_path, random_tokens
from support import base, greedy
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from specdec_core import SpecDecoder
from specdec_core.model import grouped
from specdec_core.model.layout import fold
from specdec_core.model.probe import probe
from specdec_core.model.runner import Runner
from specdec_core.testing.models import tiny_model

# (architecture, window): grouped heads, alone and under windows, with and without scales of their own
FOLDED = [
    *(("llama", None), ("qwen3", None), ("qwen3", 8), ("mistral", 8), ("gemma3_text", 8), ("granite", None)),
    *(("mixtral", 8), ("cohere2", 8), ("olmo3", 8), ("starcoder2", 8)),
]


class Operators(TorchDispatchMode):
    """Counts operators, and the numbers that attention's copies of keys and values hold."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.attended: list[tuple[torch.Size, torch.Size]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.counts[name] += 1
        if "scaled_dot_product" in name:
            self.attended.append((args[0].shape, args[1].shape))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("name", "window"), FOLDED)
def test_blocks_get_the_logits_that_sdpa_gives(name: str, window: int | None, seed: int) -> None:
    """Trees, chains and plain rounds of ragged batches, windows shorter than the text."""
    rng = random.Random(seed)
    model = tiny_model(name, window=window, attention="sdpa")
    runners = [Runner(model, chunk=8) for _ in range(2)]
    assert runners[0].plan.group == 2
    runners[1].plan = runners[1].plan.as_loaded()
    texts = {place: random_tokens(rng, rng.randrange(1, 30)) for place in (0, 2, 3)}
    for runner in runners:
        admit(runner, texts, nodes=6)
    for n in (0, 6, 3, 1):
        tokens = torch.tensor([random_tokens(rng, n) for _ in texts])
        parents = [random_parents(rng, n) for _ in texts]
        chain = n == 3
        given = (tokens, None if chain else torch.tensor(parents)) if n else (None, None)
        got, expected = (runner.extend(View(texts), *given) for runner in runners)
        assert distance(got, expected) < ROUNDING
        for row, place in enumerate(sorted(texts)):
            path = list(range(rng.randrange(n + 1))) if chain or not n else random_path(rng, parents[row])
            for runner in runners:
                runner.keep(outcome({place: path}))
            texts[place] += [*(int(tokens[row, node]) for node in path), rng.randrange(97)]


def test_keys_and_values_are_not_repeated() -> None:
    """Queries are folded: 4 heads over 2 key-value heads."""
    runner = Runner(tiny_model(attention="sdpa"))
    admit(runner, {0: [5] * 20})
    with Operators() as seen:
        runner.extend(View({0: [5] * 20}), torch.tensor([[1, 2, 3]]))
        assert seen.attended
    for query, key in seen.attended:
        assert (query[1:3], key[1:3]) == ((2, 2 * 23), (2, 23))


def test_one_mask_serves_all_layers() -> None:
    """More layers need no more masks: a boolean one would be turned into numbers by every layer."""
    made = []
    for layers in (1, 4):
        runner = Runner(tiny_model(layers=layers, attention="sdpa"))
        admit(runner, {0: [5] * 20})
        with Operators() as seen:
            runner.extend(View({0: [5] * 20}), torch.tensor([[1, 2, 3]]))
        made.append(seen.counts["masked_fill"] + seen.counts["masked_fill_"] + seen.counts["where"])
    assert made[0] == made[1]


# --- whom it is for --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "window"), [("gemma2", 8), ("gpt_oss", 8)])
def test_attention_of_another_kind_is_left_as_it_is(name: str, window: int | None) -> None:
    """Soft caps and sinks are eager attention's here."""
    assert Runner(tiny_model(name, window=window)).plan.group is None
    assert Runner(tiny_model("llama", attention="eager")).plan.group is None


def test_a_model_that_does_not_ask_the_interface_is_left_as_it_is() -> None:
    assert Runner(tiny_model("stablelm", attention="sdpa")).plan.group is None


def test_a_model_that_does_not_take_it_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe tells: it may look its attention up and yet read the mask in a way of its own."""
    real = grouped.grouped_attention

    def broken(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        out, _ = real(*args, **kwargs)
        return out.roll(1, dims=1), None

    grouped.register()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, grouped.NAME, broken)
    runner = Runner(tiny_model(attention="sdpa"))
    found = probe(runner)
    assert found.trees
    assert runner.plan.group is None
    prompt = [3, 4, 5] * 4
    result = SpecDecoder(tiny_model(attention="sdpa")).generate(prompt, greedy(16))
    assert result.token_ids == base(tiny_model(), prompt, 16)


def test_the_model_is_left_as_it_was_found() -> None:
    """Between forwards, after one that failed, and where its owner changes it later."""
    model: Any = tiny_model(attention="sdpa", fresh=True)
    decoder = SpecDecoder(model)
    seen = []
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(model.config._attn_implementation))
    own = decoder.target.model.config
    for _ in decoder.rounds([3, 4, 5] * 4, greedy(8)):
        assert model.config._attn_implementation == "sdpa"
    assert set(seen) == {"sdpa"}
    assert own._attn_implementation == decoder.target.model.config._attn_implementation == grouped.NAME
    hook = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        decoder.generate([1, 2], greedy(2))
    hook.remove()
    assert model.config._attn_implementation == "sdpa"
    model.config._attn_implementation = "eager"
    decoder.generate([3, 4, 5] * 4, greedy(8))
    assert model.config._attn_implementation == "eager"


# --- the function itself ---------------------------------------------------------------------------


def attend(**arguments: Any) -> tuple[Tensor, Tensor]:
    """Ours, and transformers' `sdpa` over the boolean mask."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    seen = torch.ones(2, 1, 5, 9, dtype=torch.bool).tril(4)
    additive = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    module: Any = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    scaling = arguments.pop("scaling", 0.3)
    ours, _ = grouped.grouped_attention(
        module, query, key, value, fold(additive, 2), scaling=scaling, **arguments
    )
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]
    theirs, _ = plain(module, query, key, value, seen, scaling=scaling, **arguments)
    assert ours.shape == theirs.shape == (2, 5, 6, 8)
    assert ours.is_contiguous()
    return ours, theirs


@pytest.mark.parametrize("scaling", [None, 0.3, 1.0])
def test_scaling_is_honoured(scaling: float | None) -> None:
    ours, theirs = attend(scaling=scaling)
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_what_is_not_treated_goes_to_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfolded, and with all that was given."""
    given: list[Any] = []

    def sdpa(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **kwargs: Any) -> Any:
        given.append((mask.shape, kwargs))
        return query.transpose(1, 2).contiguous(), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", sdpa)
    for name in ("softcap", "s_aux", "position_bias", "output_attentions"):
        attend(**{name: 2.0}, dropout=0.1)
        ours, _ = given[-2:]
        assert ours[0] == (2, 1, 5, 9)
        assert (ours[1][name], ours[1]["dropout"], ours[1]["scaling"]) == (2.0, 0.1, 0.3)


def test_dropout_is_passed_on() -> None:
    """Our decoders switch it off; another's forward in another thread may not."""
    ours, theirs = attend(dropout=0.5)
    assert not torch.allclose(ours, theirs, atol=1e-3)  # other draws
    assert (attend()[0] - ours).abs().max() > 0.1


@pytest.mark.parametrize("mask", ["none", "boolean", "of each head", "of another dtype", "one query"])
def test_masks_as_sdpa_takes_them(mask: str) -> None:
    """Also a forward that is not ours may come by while the name is set, in another thread."""
    torch.manual_seed(1)
    columns = 1 if mask == "one query" else 5
    query, key, value = torch.randn(2, 6, columns, 8), torch.randn(2, 3, 9, 8), torch.randn(2, 3, 9, 8)
    seen = torch.ones(2, 1, columns, 9, dtype=torch.bool).tril(4)
    additive = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    given: Tensor | None = {
        "none": None,
        "boolean": seen,
        "of each head": additive + torch.randn(2, 6, 5, 1) if columns > 1 else None,
        "of another dtype": additive.double(),
        "one query": additive,
    }[mask]
    module: Any = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    ours, _ = grouped.grouped_attention(module, query, key, value, given)
    like = given.float() if given is not None and given.dtype == torch.float64 else given
    theirs, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, like)
    assert torch.allclose(ours, theirs, atol=1e-6)
