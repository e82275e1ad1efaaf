"""What is done about a target's own settings: its cache, and attention that takes no tree mask."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import pytest
import torch
from harness import known
from support import ScriptedDrafter, base, greedy, planted
from transformers import Cache

from specdec_core import SpecDecoder, UnsupportedModel
from specdec_core.model.cache import SlotCache
from specdec_core.model.runner import Runner
from specdec_core.testing.models import tiny_model

PROMPT = [3, 4, 5, 6] * 4


def check_lossless(model: Any, said: list[int], **options: Any) -> SpecDecoder:
    """Decode with a tree whose accepted path goes through second children."""
    tree = planted([-1, -1, 1, 1, 3], [1, 3, 4], known([*PROMPT, *said]))
    drafter = ScriptedDrafter(tree, depth=3, nodes=5, trees=True)
    decoder = SpecDecoder(model, drafter=drafter, strict=True, **{"draft_tokens": None, **options})
    result = decoder.generate(PROMPT, greedy(24))
    assert result.token_ids == said[:24]
    assert result.stats.accepted_tokens > 10
    return decoder


@pytest.mark.parametrize(
    "setting",
    [
        {"cache_implementation": "static"},
        {"cache_implementation": "hybrid"},
        {"cache_implementation": "offloaded"},
        {"cache_implementation": "offloaded_static"},
        {"cache_implementation": "quantized", "cache_config": {"backend": "quanto", "nbits": 4}},
        {"use_cache": False},
    ],
    ids=lambda setting: "-".join(map(str, setting.values())),
)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_targets_own_cache_setting_is_replaced_by_ours(name: str, setting: dict[str, Any]) -> None:
    """B24: it has no say, as the model is handed a cache in every forward."""
    said = base(tiny_model(name, window=8 if name == "mistral" else None), PROMPT, 40)
    model = tiny_model(name, window=8 if name == "mistral" else None, fresh=True)
    for option, value in setting.items():
        setattr(model.generation_config, option, value)
    if "use_cache" in setting:
        model.config.use_cache = False
    check_lossless(model, said)
    for option, value in setting.items():
        assert getattr(model.generation_config, option) == value


def test_a_model_with_many_settings_is_put_in_evaluation_mode() -> None:
    """Dropout and gradient checkpointing are of training."""
    model: Any = tiny_model("gpt2", fresh=True, attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    said = base(model, PROMPT, 40)
    model.train()
    check_lossless(model, said)


@pytest.mark.parametrize("chosen", ["flash_attention_2", "flash_attention_3", "flex_attention"])
def test_attention_without_masks_is_switched_to_sdpa_and_one_line_says_so(
    chosen: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = base(tiny_model(), PROMPT, 40)
    model = tiny_model(fresh=True)
    model.config._attn_implementation = chosen
    with caplog.at_level(logging.WARNING, "specdec"):
        decoder = check_lossless(model, said)
    assert model.config._attn_implementation == chosen
    assert decoder.target.runner.plan.group == 2
    lines = [record.getMessage() for record in caplog.records if record.name == "specdec"]
    assert lines == [f"attention '{chosen}' takes no tree mask: the decoder uses 'sdpa' in its place"]


def test_a_model_that_cannot_be_switched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt_oss", window=8, fresh=True)
    monkeypatch.setattr(type(model.config), "_attn_implementation", "flash_attention_2")
    with pytest.raises(UnsupportedModel) as raised:
        SpecDecoder(model)
    assert str(raised.value).startswith(
        "attention 'flash_attention_2' takes no tree mask and gpt_oss has no sdpa"
    )
    assert "attn_implementation='eager'" in str(raised.value)


def test_attention_that_takes_masks_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    for attention in ("sdpa", "eager"):
        model = tiny_model(attention=attention)
        assert Runner(model).plan.additive == (attention == "eager")
        assert model.config._attn_implementation == attention
    assert not [record for record in caplog.records if record.name == "specdec"]


# --- other releases of transformers ----------------------------------------------------------------


@pytest.mark.parametrize("argument", ["cache", "past_key_values"])
@pytest.mark.parametrize("keeps", [True, False], ids=["logits_to_keep", "all logits"])
def test_the_cache_is_handed_over_by_the_name_that_the_forward_has(argument: str, keeps: bool) -> None:
    """`past_key_values` in earlier releases, `cache` later; and not every forward can leave logits out."""
    said = base(tiny_model(), PROMPT, 40)
    model = tiny_model(fresh=True)
    inner, own = model.forward, Runner(model).plan.cache_argument
    names = ["input_ids", "attention_mask", "position_ids", argument, "use_cache"]
    names += ["logits_to_keep"] if keeps else []
    widths = set()

    def forward(**arguments: Any) -> Any:
        assert set(arguments) <= set(names)
        if argument in arguments:
            assert isinstance(arguments[argument], SlotCache)
            arguments[own] = arguments.pop(argument)
        output = inner(**arguments)
        widths.add(output.logits.shape[1] == arguments["input_ids"].shape[1])
        return output

    kinds = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    forward.__signature__ = inspect.Signature(kinds)  # type: ignore[attr-defined]
    model.forward = forward  # type: ignore[method-assign]
    decoder = check_lossless(model, said)
    assert decoder.target.runner.plan.cache_argument == argument
    assert (False in widths) == keeps


def test_the_cache_is_what_every_release_calls_a_cache() -> None:
    """Models ask for its length and for mask sizes, and say `cache or DynamicCache()` of an empty one."""
    cache = SlotCache()
    assert isinstance(cache, Cache)
    assert cache
    assert len(cache) == 0
    assert cache.get_seq_length() == 0
    cache.resize(*cache.grown(2, 10))
    cache.aim(0, 2, 5, torch.tensor([[0, 1], [3, 4]]))
    states = torch.randn(2, 2, 2, 8)
    for more in ((), ({"cache_position": None},)):  # older releases hand over a dictionary
        keys, values = cache.update(states, 2 * states, 0, *more)
        assert keys.shape == (2, 2, 5, 8)
        assert torch.equal(keys[0, :, :2], states[0])
        assert torch.equal(values[1, :, 3:5], 2 * states[1])
    assert cache.update(states, states, 1, cache_kwargs={"sin": None})[0].shape == keys.shape
    assert (cache.get_seq_length(), cache.get_mask_sizes(2, 0)) == (5, (5, 0))
    assert (len(cache), cache.slots, cache.trash) == (2, 64, 63)
