"""PEFT adapters and quantized weights: served as they are, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import distance, known, plain
from support import ScriptedDrafter, base, greedy, planted
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from specdec_core import InvalidParameter, SpecDecoder, UnsupportedModel
from specdec_core.model.loading import load_model
from specdec_core.testing.models import tiny_model

PROMPT = [3, 4, 5, 6] * 4


def check_lossless(model: Any, expected: list[int] | None = None) -> None:
    """Decode chains and trees; the reference is the model's own generate."""
    ids = torch.tensor([PROMPT])
    said = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False
    )
    said = said[0, len(PROMPT) :].tolist()
    assert said == base(model, PROMPT, 40)
    assert expected is None or said[: len(expected)] == expected
    tree = planted([-1, -1, 1, 1, 3], [1, 3, 4], known([*PROMPT, *said]))
    for drafter in ("prompt_lookup", ScriptedDrafter(tree, depth=3, nodes=5, trees=True)):
        result = SpecDecoder(model, drafter=drafter, draft_tokens=None, strict=True).generate(
            PROMPT, greedy(24)
        )
        assert result.token_ids == said[:24]
    assert result.stats.accepted_tokens > 10


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `base`, a model with its tokenizer."""
    root = tmp_path_factory.mktemp("models")
    tiny_model(fresh=True, hidden_size=64).save_pretrained(root / "base")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(root / "base")
    return root


def adapted(folders: Path, config: Any, name: str) -> Any:
    """Wrap the base model, save the adapter alone, and give the wrapped model."""
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(folders / "base")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        wrapped = peft.get_peft_model(model, config)
    wrapped.save_pretrained(folders / name)
    file = folders / name / "adapter_config.json"
    said = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(said | {"base_model_name_or_path": str(folders / "base")}), encoding="utf-8")
    return wrapped.eval()


# --- adapters ---------------------------------------------------------------------------------------


@pytest.fixture
def lora(folders: Path) -> Any:
    """A wide LoRA adapter."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=32,
        target_modules=["q_proj", "v_proj", "up_proj"],
        init_lora_weights=False,
    )
    return adapted(folders, config, "lora")


def test_a_lora_adapter_is_served_as_it_is(folders: Path, lora: Any) -> None:
    """B24 kin: the reference is the adapted model's own generate, which is not the base model's."""
    plain = base(AutoModelForCausalLM.from_pretrained(folders / "base"), PROMPT, 24)
    check_lossless(lora)
    assert base(lora, PROMPT, 24) != plain
    with lora.disable_adapter():
        assert SpecDecoder(lora).generate(PROMPT, greedy(24)).token_ids == plain


def test_a_lora_adapter_is_loaded_from_its_folder(folders: Path, lora: Any) -> None:
    """Its model is loaded with it; its tokenizer is the model's, where it has none of its own."""
    model, tokenizer = load_model(str(folders / "lora"), device="cpu")
    assert tokenizer.convert_tokens_to_ids("w7") == 7
    check_lossless(model, base(lora, PROMPT, 24))
    decoder = SpecDecoder.from_pretrained(str(folders / "lora"), device="cpu")
    assert decoder.generate(PROMPT, greedy(24)).token_ids == base(lora, PROMPT, 24)


def test_virtual_tokens_are_refused_by_name(folders: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = adapted(folders, config, "prompt")
    with pytest.raises(
        UnsupportedModel, match=r"the PEFT adapter 'default' .*PROMPT_TUNING.* adds virtual tokens"
    ):
        SpecDecoder(model)
    with pytest.raises(UnsupportedModel, match="prompt' is a PEFT adapter that adds virtual tokens"):
        load_model(str(folders / "prompt"), device="cpu")


def test_an_adapter_without_peft_says_what_to_install(
    folders: Path, lora: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec_core.model.loading.is_peft_available", lambda: False)
    with pytest.raises(InvalidParameter, match="lora' is a PEFT adapter; install peft"):
        load_model(str(folders / "lora"), device="cpu")


def test_an_adapter_whose_model_is_gone_is_one_line(folders: Path, lora: Any) -> None:
    file = folders / "lora" / "adapter_config.json"
    said = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(said | {"base_model_name_or_path": str(folders / "gone")}), encoding="utf-8")
    with pytest.raises(InvalidParameter, match="lora' cannot be loaded: "):
        load_model(str(folders / "lora"), device="cpu", offline=True)


# --- quantized weights -------------------------------------------------------------------------------


class Int8Linear(nn.Module):
    """Weight-only int8, as quantizing packages do it: no `weight` that says its size."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.abs().amax(dim=1) / 127
        self.register_buffer("packed", (linear.weight / scale[:, None]).round().to(torch.int8).flatten())
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.packed.view(self.out_features, -1) * self.scale[:, None]).T


@torch.no_grad()
def test_weight_only_quantization_is_lossless() -> None:
    """Against the quantized model's own generate; every linear layer is, and the head."""
    model = tiny_model(fresh=True)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, Int8Linear(child))
    check_lossless(model)
    assert SpecDecoder(model).target.vocab_size == 97
    assert distance(plain(model, PROMPT), plain(tiny_model(), PROMPT)) > 0.01


def test_torchao_weights_are_lossless_and_placed_while_they_are_loaded(folders: Path) -> None:
    """They are a tensor subclass; and what is quantized is not moved afterwards."""
    pytest.importorskip("torchao")
    pytest.importorskip("accelerate")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    settings = TorchAoConfig(Int8WeightOnlyConfig(version=2))
    model = AutoModelForCausalLM.from_pretrained(folders / "base", quantization_config=settings)
    assert type(model.model.layers[0].mlp.up_proj.weight.data) is not Tensor
    check_lossless(model)
    model.save_pretrained(folders / "int8")
    _, tokenizer = load_model(str(folders / "base"), device="cpu")
    tokenizer.save_pretrained(folders / "int8")
    loaded, _ = load_model(str(folders / "int8"), device="cpu")
    check_lossless(loaded, base(model, PROMPT, 24))


class Immovable(nn.Module):
    """A model that must not be moved."""

    def to(self, *_: Any, **__: Any) -> Any:
        raise ValueError("`.to` is not supported for 4-bit models")


def test_quantized_weights_are_not_moved(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B63: some raise; a `device_map` brings them to their device as they are loaded."""
    asked: list[dict[str, Any]] = []

    def loaded(name: str, **options: Any) -> Any:
        asked.append(options)
        return Immovable()

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", loaded)
    file = folders / "base" / "config.json"
    config = file.read_text(encoding="utf-8")
    quantized = json.loads(config) | {
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}
    }
    try:
        file.write_text(json.dumps(quantized), encoding="utf-8")
        model, _ = load_model(str(folders / "base"), device="cpu")
    finally:
        file.write_text(config, encoding="utf-8")
    assert isinstance(model, Immovable)
    assert asked[0]["device_map"] == {"": torch.device("cpu")}
    with pytest.raises(ValueError, match="not supported for 4-bit"):  # a model as any other is moved
        load_model(str(folders / "base"), device="cpu")
    assert "device_map" not in asked[1]


# --- spread over devices -----------------------------------------------------------------------------


def test_a_spread_model_is_lossless(folders: Path) -> None:
    """B63: with a device map, accelerate's hooks carry inputs along; here all devices are the CPU."""
    accelerate = pytest.importorskip("accelerate")
    said = base(AutoModelForCausalLM.from_pretrained(folders / "base"), PROMPT, 24)
    model, _ = load_model(str(folders / "base"), device="balanced")
    check_lossless(model, said)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "cpu"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    spread = accelerate.dispatch_model(model, places, force_hooks=True)
    assert hasattr(spread.model.layers[0], "_hf_hook")
    check_lossless(spread, said)
    for drafter in ("none", "prompt_lookup"):
        assert SpecDecoder(spread, drafter=drafter).generate(PROMPT, greedy(24)).token_ids == said


@pytest.mark.parametrize("device", ["cuda:99", "gpu", "tpu"])
def test_a_device_that_is_not_there_is_one_line(folders: Path, device: str) -> None:
    with pytest.raises(InvalidParameter, match=f"device='{device}'"):
        load_model(str(folders / "base"), device=device)
