"""Faster forwards of whole models: the same text, the caller's model as it was, and reasons."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ONCE_EACH, distance, known, plain
from support import ScriptedDrafter, base, greedy, ids, planted, plugins
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast

from specdec_core import InvalidParameter, SpecDecoder, UnsupportedModel
from specdec_core.model.faster import optimize as module
from specdec_core.model.faster.fused import FusedLinear
from specdec_core.model.faster.optimize import Optimizations, optimized
from specdec_core.model.faster.packed import PackedLinear, Projection, why_not_packed
from specdec_core.testing.models import tiny_model

pytestmark = pytest.mark.skipif(bool(why_not_packed("cpu", torch.float32)), reason="oneDNN is not here")
WAYS = ["pack", "fuse", "pack,fuse"]
PROMPT = [3, 4, 5, 6] * 4


def projections(model: nn.Module) -> list[Projection]:
    return [part for part in model.modules() if isinstance(part, Projection)]


def fast(model: nn.Module, text: str = "pack,fuse", *, in_place: bool = False) -> nn.Module:
    return optimized(model, Optimizations.of(text), in_place=in_place).model


def saved(model: Any, folder: Path) -> str:
    """Save a model with a tokenizer of words."""
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return str(folder)


# --- the same logits and texts --------------------------------------------------------------------


@pytest.mark.parametrize("model", ONCE_EACH, indirect=True)
def test_logits_are_the_same_and_the_model_is_as_it_was(model: Any) -> None:
    prompt = ids(30)
    before, parts = plain(model, prompt), list(model.modules())
    faster = fast(model)
    assert projections(faster)
    assert distance(plain(faster, prompt), before) < 1e-4
    assert torch.equal(plain(model, prompt), before)
    assert list(model.modules()) == parts
    assert list(faster.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("way", WAYS)
def test_greedy_text_is_the_same(way: str) -> None:
    model = tiny_model("llama")
    said = base(model, PROMPT, 40)
    tree = planted([-1, -1, 1, 1, 3], [1, 3, 4], known([*PROMPT, *said]))
    for drafter in (
        "none",
        "prompt_lookup",
        "early_exit",
        ScriptedDrafter(tree, depth=3, nodes=5, trees=True),
    ):
        decoder = SpecDecoder(model, drafter=drafter, strict=True, optimize=way, draft_tokens=None)
        assert projections(decoder.target.model)
        assert decoder.generate(PROMPT, greedy(30)).token_ids == said[:30]


def test_a_draft_model_is_made_faster_too() -> None:
    model, draft = tiny_model("llama"), tiny_model("llama", fresh=True)
    small = plugins().build_drafter("small_model", {"model": draft})
    decoder = SpecDecoder(model, drafter=small, strict=True, optimize="pack", draft_tokens=None)
    result = decoder.generate(PROMPT, greedy(24))
    assert result.token_ids == base(model, PROMPT, 24)
    assert result.stats.acceptance_rate == 1.0
    source: Any = decoder.drafter
    assert projections(decoder.target.model)
    assert projections(source.draft_model.cached.model)


def test_what_drafters_read_of_the_target() -> None:
    model = tiny_model("llama")
    target = SpecDecoder(model, optimize="pack,fuse").target
    head: Any = target.output_embeddings
    assert isinstance(head, PackedLinear)
    assert torch.equal(head.weight, model.lm_head.weight)
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = model.lm_head(model.model.norm(hidden))
    torch.testing.assert_close(target.head(hidden), wanted, rtol=1e-4, atol=1e-4)


# --- whose model it is ----------------------------------------------------------------------------


def test_in_place_each_weight_is_there_once() -> None:
    model = tiny_model("llama", fresh=True)
    before, weights = plain(model, PROMPT), [weakref.ref(p) for p in model.model.layers.parameters()]
    assert fast(model, in_place=True) is model
    assert not [part for part in model.modules() if type(part) is nn.Linear]
    left = {id(p) for p in model.parameters()}
    assert not [w for w in weights if w() is not None and id(w()) not in left]
    assert distance(plain(model, PROMPT), before) < 1e-4
    made = list(model.modules())
    assert optimized(model, Optimizations.of("pack,fuse")).model is model, "once is enough"
    assert list(model.modules()) == made


def test_a_tied_head_is_packed_and_its_embedding_stays() -> None:
    model = tiny_model("llama", tie_word_embeddings=True, fresh=True)
    before = plain(model, PROMPT)
    fast(model, in_place=True)
    head: Any = model.lm_head
    assert isinstance(head, PackedLinear)
    assert head.weight is model.model.embed_tokens.weight
    assert distance(plain(model, PROMPT), before) < 1e-4


def test_changed_weights_are_told() -> None:
    model = tiny_model("llama", fresh=True)
    decoder = SpecDecoder(model, optimize="pack")
    decoder.generate(PROMPT, greedy(4))
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(2)
    with pytest.raises(UnsupportedModel, match=r"q_proj\) were changed .* new decoder"):
        decoder.generate(PROMPT, greedy(4))
    assert SpecDecoder(model, optimize="pack").generate(PROMPT, greedy(4)).token_ids == base(model, PROMPT, 4)


def test_a_layer_that_was_replaced_is_told() -> None:
    model = tiny_model("llama", fresh=True)
    decoder = SpecDecoder(model, optimize="fuse")
    model.model.layers[1].mlp.up_proj = nn.Linear(32, 48, bias=False)
    with pytest.raises(UnsupportedModel, match="up_proj"):
        decoder.generate(PROMPT, greedy(4))


def test_by_default_a_model_in_memory_is_not_copied() -> None:
    assert not projections(SpecDecoder(tiny_model("llama")).target.model)


def test_a_model_that_was_loaded_is_packed(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = saved(model, tmp_path)
    for way, kinds in (("auto", {PackedLinear, FusedLinear}), ("none", set()), ("fuse", {FusedLinear})):
        decoder = SpecDecoder.from_pretrained(folder, device="cpu", optimize=way)
        assert set(map(type, projections(decoder.target.model))) == kinds
        assert decoder.generate(PROMPT, greedy(20)).token_ids == base(model, PROMPT, 20)


# --- what is left alone ---------------------------------------------------------------------------


class Subclass(nn.Linear):
    """Somebody's own kind of linear layer."""


def test_layers_that_are_more_than_a_weight_are_left_alone() -> None:
    model = tiny_model("llama", fresh=True)
    first, second = model.model.layers
    first.self_attn.k_proj.register_forward_hook(lambda module, args, output: output * 2)
    first.mlp.up_proj.forward = lambda x: nn.functional.linear(x, first.mlp.up_proj.weight) * 2
    own = Subclass(32, 32, bias=False)
    own.weight = second.self_attn.q_proj.weight
    second.self_attn.q_proj = own
    before = plain(model, PROMPT)
    faster: Any = fast(model)
    assert distance(plain(faster, PROMPT), before) < 1e-4
    first, second = faster.model.layers
    assert type(first.self_attn.k_proj) is type(first.mlp.up_proj) is nn.Linear
    assert type(second.self_attn.q_proj) is Subclass
    assert second.self_attn.q_proj.weight is own.weight
    assert isinstance(first.self_attn.q_proj, PackedLinear), "its group is broken, and it is packed alone"
    assert isinstance(second.mlp.up_proj, FusedLinear)


def test_adapters_stay_and_can_be_switched() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, r=2)
    model = peft.get_peft_model(tiny_model("llama", fresh=True), config).eval()
    decoder = SpecDecoder(model, optimize="pack,fuse", strict=True)
    attention = decoder.target.model.model.layers[0].self_attn
    assert isinstance(attention.k_proj, PackedLinear)
    theirs = model.base_model.model.model.layers[0].self_attn.q_proj
    assert type(attention.q_proj) is type(theirs)
    assert attention.q_proj.base_layer.weight is theirs.base_layer.weight
    said = base(model, PROMPT, 24)
    assert decoder.generate(PROMPT, greedy(24)).token_ids == said
    with model.disable_adapter():
        bare = [int(plain(model, PROMPT)[-1].argmax())]
        assert decoder.generate(PROMPT, greedy(1)).token_ids == bare


# --- what is said ---------------------------------------------------------------------------------


def test_names() -> None:
    for text in ("fast", "pack,fast", "", "pack,,fuse", "none,pack"):
        with pytest.raises(InvalidParameter, match=r"use auto, none, or any of pack,fuse,compile"):
            SpecDecoder(tiny_model("llama"), optimize=text)


def test_what_cannot_be_done_is_told_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model = tiny_model("gpt2", dtype=torch.float64)
    with caplog.at_level(logging.WARNING, "specdec"):
        fast(model, "auto")
        assert not caplog.records
        assert fast(model) is model
    pack, fuse = [record.getMessage() for record in caplog.records]
    assert pack.startswith(
        "optimize=pack has no effect on this model: there is no packed product for float64"
    )
    assert fuse.startswith("optimize=fuse has no effect on this model: it has no siblings q_proj")
    folder = saved(model, tmp_path)
    caplog.clear()
    decoder = SpecDecoder.from_pretrained(folder, device="cpu", optimize="pack")
    assert [record.getMessage() for record in caplog.records] == [pack]
    assert decoder.generate(PROMPT, greedy(8)).token_ids == base(model, PROMPT, 8)


def test_auto_is_for_measured_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE256")
    assert fast(model, "auto") is model
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert {type(part) for part in projections(fast(model, "auto"))} == {PackedLinear, FusedLinear}


def test_compile_alone_brings_what_auto_chooses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert {type(part) for part in projections(fast(model, "compile"))} == {PackedLinear, FusedLinear}
    assert {type(part) for part in projections(fast(model, "fuse,compile"))} == {FusedLinear}
    with caplog.at_level(logging.WARNING, "specdec"):
        whole = tiny_model("llama", dtype=torch.float64)
        assert fast(whole, "compile") is whole, "what was not asked for by name is left without a word"
    assert not caplog.records
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE256")
    assert fast(model, "compile") is model


def test_a_long_wait_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "_BYTES_A_SECOND", 1e3)
    with caplog.at_level(logging.WARNING, "specdec"):
        fast(tiny_model("llama"), "auto")
    [record] = caplog.records
    assert record.getMessage().startswith("packing 0.0 GB of weights, at most about")
