"""Replicas: the model as it is now, whatever was done to it; what cannot be copied is shared, or refused."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from harness import ROUNDING, distance, plain
from support import base, greedy
from torch import Tensor, nn

from specdec_core import SpecDecoder, UnsupportedModel
from specdec_core.engine import dropin
from specdec_core.model import grouped
from specdec_core.model.replica import Replica
from specdec_core.model.runner import Runner
from specdec_core.testing.models import tiny_model

PROMPT = [3, 4, 5, 6] * 4
NEW = 20


def fresh(name: str = "llama", **options: Any) -> Any:
    return tiny_model(name, fresh=True, attention="sdpa", **options)


def said_by(model: Any) -> list[int]:
    """What a model says now; `base` remembers what it said before."""
    said: list[int] = []
    while len(said) < NEW:
        said.append(int(plain(model, [*PROMPT, *said])[-1].argmax()))
    return said


def check(decoder: SpecDecoder, model: Any) -> list[int]:
    """Whether a decoder says what its model says."""
    said = said_by(model)
    assert decoder.generate(PROMPT, greedy(NEW)).token_ids == said
    return said


def lora(**options: Any) -> Any:
    peft = pytest.importorskip("peft")
    given = {"r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return peft.LoraConfig(task_type="CAUSAL_LM", **given | options)


# --- what it is ------------------------------------------------------------------------------------


def test_modules_are_copied_and_weights_are_not() -> None:
    model = fresh()
    model.train()
    replica = Replica(model)
    theirs, ours = list(model.modules()), list(replica.model.modules())
    assert not {id(module) for module in theirs} & {id(module) for module in ours}
    assert list(map(type, theirs)) == list(map(type, ours))
    assert [*map(id, model.parameters())] == [*map(id, replica.model.parameters())]
    assert [*map(id, model.buffers())] == [*map(id, replica.model.buffers())]
    assert all(module.training for module in theirs)
    assert not any(module.training for module in ours)
    assert replica.model.config is replica.model.model.config is not model.config
    assert replica.whole


def test_a_layer_that_stands_in_two_places_stands_in_two_places() -> None:
    model = fresh()
    model.model.layers[1] = model.model.layers[0]
    ours = Replica(model).model.model.layers
    assert ours[0] is ours[1] is not model.model.layers[0]


def test_the_model_can_be_copied_and_pickled_beside_a_decoder() -> None:
    model = fresh()
    decoder = SpecDecoder(model)
    decoder.target.runner.hidden_layers = (1,)
    said = check(decoder, model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert base(other, PROMPT, NEW) == said


def test_a_decoder_of_a_decoders_model_has_grouped_attention_too() -> None:
    """It found our name in the config, and so no attention that it knew."""
    model = fresh()
    decoder = SpecDecoder(SpecDecoder(model).target.model)
    assert decoder.target.runner.plan.group == 2
    check(decoder, model)


def test_a_model_goes_though_a_decoder_of_it_is_kept() -> None:
    """`generate` keeps decoders by their models, which they held."""
    model = fresh()
    known = len(dropin._decoders)
    dropin.generate(model, torch.tensor([PROMPT]), max_new_tokens=2)
    assert len(dropin._decoders) == known + 1
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert len(dropin._decoders) == known


def test_a_decoder_needs_nobody_else_to_hold_its_model() -> None:
    said = base(fresh(), PROMPT, NEW)
    decoder = SpecDecoder(fresh())
    gc.collect()
    for _ in range(2):
        assert decoder.generate(PROMPT, greedy(NEW)).token_ids == said


# --- what is done to the model is followed ----------------------------------------------------------


def replace_a_module(model: Any) -> None:
    old = model.model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = nn.Linear(old.in_features, old.out_features, bias=False)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.copy_(-5 * old.weight)


def replace_a_layer(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[0])
    model.model.layers[1].self_attn.layer_idx = 1  # of the cache


def replace_a_weight(model: Any) -> None:
    model.model.norm.weight = nn.Parameter(-model.model.norm.weight.detach())


def replace_a_buffer(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.register_buffer("inv_freq", 3 * rotary.inv_freq, persistent=False)


def write_a_weight(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)


def set_an_attribute(model: Any) -> None:
    model.model.norm.variance_epsilon = 1e3
    model.model.layers[0].self_attn.scaling = 9.0


def add_a_hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda _, __, output: output.roll(1, dims=-1))


def bind_a_forward(model: Any) -> None:
    model.model.norm.forward = MethodType(
        lambda self, x: x * self.weight * 1.5 - x.roll(1, -1), model.model.norm
    )


def inject_adapters(model: Any) -> None:
    pytest.importorskip("peft").inject_adapter_in_model(lora(), model, "late")
    model.eval()


CHANGES = [replace_a_module, replace_a_layer, replace_a_weight, replace_a_buffer, write_a_weight]
CHANGES += [set_an_attribute, add_a_hook, bind_a_forward, inject_adapters]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_calls_is_followed(change: Callable[[Any], None]) -> None:
    """And what was fed before is not taken for what the model holds now; our attention stays in place."""
    model = fresh()
    decoder = SpecDecoder(model)
    decoder.target.runner.hidden_layers = (1,)
    norm = decoder.target.model.model.norm
    before = check(decoder, model)
    change(model)
    after = check(decoder, model)
    assert after != before
    assert decoder.target.model.model.norm is norm
    assert decoder.target.config._attn_implementation == grouped.NAME
    assert decoder.target.model.config._attn_implementation == grouped.NAME
    check(decoder, model)


def test_a_hook_that_was_removed_is_gone() -> None:
    model = fresh()
    decoder = SpecDecoder(model)
    before = check(decoder, model)
    hook = model.model.norm.register_forward_hook(lambda _, __, output: output.roll(1, dims=-1))
    assert check(decoder, model) != before
    hook.remove()
    assert check(decoder, model) == before


def test_a_setting_of_the_config_is_followed() -> None:
    """Some models read one in every forward."""
    model: Any = tiny_model("gemma2", fresh=True, window=8, final_logit_softcapping=None)
    decoder = SpecDecoder(model)
    check(decoder, model)
    model.config.final_logit_softcapping = 1e-3
    runner = decoder.target.runner
    runner._follow()
    assert distance(plain(runner.model, PROMPT), plain(model, PROMPT)) < ROUNDING
    assert float(plain(runner.model, PROMPT).abs().max()) <= 1.01e-3


@pytest.mark.filterwarnings("default")
def test_adapters_are_switched_added_and_taken_away() -> None:
    """Of one decoder's model, between its calls."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(fresh(), lora(), adapter_name="first").eval()
    decoder = SpecDecoder(model)
    said = [check(decoder, model)]
    with model.disable_adapter():
        said.append(check(decoder, model))
    assert check(decoder, model) == said[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        model.add_adapter("second", lora())
    assert check(decoder, model) == said[0]
    model.set_adapter("second")
    said.append(check(decoder, model))
    assert len(set(map(tuple, said))) == 3
    model.delete_adapter("first")
    assert check(decoder, model) == said[2]
    model.merge_adapter()
    check(decoder, model)


@pytest.mark.parametrize(
    "change",
    [lambda model: model.double(), lambda model: model.resize_token_embeddings(105)],
    ids=["cast", "resized"],
)
def test_what_a_decoder_was_not_built_for_is_told(change: Callable[[Any], object]) -> None:
    model = fresh()
    decoder = SpecDecoder(model, drafter="none")
    check(decoder, model)
    change(model)
    with pytest.raises(UnsupportedModel, match="after this decoder was built: build a new one"):
        decoder.generate(PROMPT, greedy(4))
    check(SpecDecoder(model, drafter="none"), model)


def test_nothing_is_made_anew_where_nothing_was_changed() -> None:
    """Training mode is no change: copies have their own."""
    model = fresh()
    replica = Replica(model)
    base(model, PROMPT, 4)
    model.train()
    assert replica.refresh() == replica.refresh() == 0
    model.model.norm.note = "new"
    assert replica.refresh() == replica.refresh() == 1


def test_a_change_that_could_not_be_made_is_tried_again() -> None:
    """Else a copy without our attention would be taken for the one that has it."""
    model, fails = fresh(), []
    replica = Replica(model)
    replica.change("one", lambda: fails and fails.pop().nothing)
    model.model.norm.note = "new"
    fails.append(model)
    with pytest.raises(AttributeError, match="nothing"):
        replica.refresh()
    assert replica.refresh() == replica.refresh() == 1


# --- forwards that hang on a module ----------------------------------------------------------------


def backwards(output: Any) -> Any:
    output.logits = output.logits.flip(-1)
    return output


def bound(model: Any) -> None:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return backwards(type(self).forward(self, *args, **kwargs))

    model.forward = MethodType(functools.wraps(type(model).forward)(forward), model)


def closed(model: Any) -> None:
    inner = model.forward
    model.forward = functools.wraps(inner)(lambda **arguments: backwards(inner(**arguments)))


def bound_and_closed(model: Any) -> None:
    inner = model.forward
    wrapped = functools.wraps(type(model).forward)(lambda self, **arguments: backwards(inner(**arguments)))
    model.forward = MethodType(wrapped, model)


def of_a_global(model: Any) -> None:
    globals()["_INNER"] = model.forward
    model.forward = functools.wraps(model.forward)(lambda **arguments: backwards(_INNER(**arguments)))  # type: ignore[name-defined] # noqa: F821


def of_an_object(model: Any) -> None:
    class Forward:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, **arguments: Any) -> Any:
            return backwards(self.inner(**arguments))

    model.forward = functools.update_wrapper(Forward(model.forward), model.forward)  # type: ignore[arg-type]


HUNG = [bound, closed, bound_and_closed, of_a_global, of_an_object]


@pytest.mark.parametrize("hang", HUNG)
def test_a_forward_that_was_hung_on_the_model_runs(hang: Callable[[Any], None]) -> None:
    """The replica's, where it can be bound; else the model itself runs, with its own attention."""
    model = fresh()
    hang(model)
    decoder = SpecDecoder(model)
    assert (decoder.target.model is not model) == (hang is bound) == decoder.target.runner.replica.whole
    assert (decoder.target.runner.plan.group is not None) == (hang is bound)
    assert model.config._attn_implementation == "sdpa"
    check(decoder, model)
    assert base(model, PROMPT, NEW) != base(fresh(), PROMPT, NEW)


@pytest.mark.parametrize("hang", HUNG)
def test_a_forward_that_is_hung_on_the_model_later_runs_or_is_told(hang: Callable[[Any], None]) -> None:
    """What would run the original was no part of what a decoder checked; it goes on when that is gone."""
    model = fresh()
    decoder = SpecDecoder(model)
    before = check(decoder, model)
    hang(model)
    if hang is bound:
        assert check(decoder, model) != before
    else:
        for _ in range(2):
            with pytest.raises(UnsupportedModel, match="a forward of LlamaForCausalLM was replaced, after"):
                decoder.generate(PROMPT, greedy(2))
    vars(model).pop("forward", None)
    assert check(decoder, model) == before


@pytest.mark.parametrize("hang", HUNG[1:])
def test_what_cannot_be_done_with_the_model_itself_is_refused(hang: Callable[[Any], None]) -> None:
    """Training mode is its owner's, its windows cannot be made small, hooks would be seen by all."""
    model = fresh("qwen3", window=8)
    hang(model)
    with pytest.raises(UnsupportedModel, match="its windows"):
        SpecDecoder(model)
    model = fresh()
    hang(model)
    with pytest.raises(UnsupportedModel, match="cannot be gathered: a forward was replaced"):
        Runner(model, hidden_layers=(1,))
    decoder = SpecDecoder(model)
    model.train()
    for use in (lambda: SpecDecoder(model), lambda: decoder.generate(PROMPT, greedy(2))):
        with pytest.raises(UnsupportedModel, match=r"LlamaForCausalLM is in training mode .* call eval\(\)"):
            use()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedModel, match="takes no tree mask"):
        SpecDecoder(model.eval())
    assert model.config._attn_implementation == "flash_attention_2"


def test_a_part_that_runs_the_original_is_shared() -> None:
    model = fresh()
    up = model.model.layers[0].mlp
    inner = up.forward
    up.forward = lambda x: -2 * inner(x)
    for optimize in ("none", "fuse"):
        decoder = SpecDecoder(model, optimize=optimize)
        assert decoder.target.model.model.layers[0].mlp is up
        assert decoder.target.model.model.layers[1].mlp is not model.model.layers[1].mlp
        check(decoder, model)
    assert base(model, PROMPT, NEW) != base(fresh(), PROMPT, NEW)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("how", ["the model", "its forward", "in place", "a layer"])
def test_what_was_compiled_is_run_as_it_was(how: str) -> None:
    """Its compiled code holds the model itself."""
    model = fresh()
    said = base(model, PROMPT, NEW)
    given, calls = model, []

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        calls.append(graph)
        return graph.forward

    if how == "the model":
        given = torch.compile(model, backend=backend)
    elif how == "its forward":
        model.forward = torch.compile(model.forward, backend=backend)
    elif how == "in place":
        model.compile(backend=backend)
    else:
        model.model.layers[0] = torch.compile(model.model.layers[0], backend=backend)
    decoder = SpecDecoder(given)
    assert decoder.target.runner.replica.whole
    assert decoder.generate(PROMPT, greedy(NEW)).token_ids == said
    assert not calls
