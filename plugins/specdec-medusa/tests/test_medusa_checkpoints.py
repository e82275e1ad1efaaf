"""Every layout of heads is read, and what is wrong with a file is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heads_files import HIDDEN, PROMPTS, says, tensors, write
from torch import Tensor

from specdec_core import SamplingParams, SpecDecoder, UsageError
from specdec_core.testing.models import VOCAB, tiny_model
from specdec_medusa import Medusa
from specdec_medusa.checkpoint import load_heads, save_heads
from specdec_medusa.heads import Heads

Made = dict[str, Tensor]


def vllm(made: Made) -> Made:
    names = {}
    for name, tensor in made.items():
        head, layer, *rest = name.split(".")
        block = f"blocks.{head}.layers.{layer}.{rest[-1]}"
        names[block if rest[0] == "linear" else f"lm_heads.{head}.weight"] = tensor
    return names


def merged(made: Made) -> Made:
    return {"model.embed_tokens.weight": torch.zeros(2, 2), "lm_head.weight": torch.zeros(2, 2)} | {
        f"medusa_head.{name}": tensor for name, tensor in made.items()
    }


LAYOUTS: dict[str, tuple[str, Callable[[Made], Made]]] = {
    "published": ("medusa_lm_head.pt", lambda made: made),
    "safetensors": ("medusa_lm_head.safetensors", lambda made: made),
    "merged": ("model.safetensors", merged),
    "merged pickle": ("pytorch_model.bin", merged),
    "vllm": ("model.safetensors", vllm),
}


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_heads(layout: str, layers: int, tmp_path: Path) -> None:
    """The config says another number of heads, as published ones do: the weights count."""
    made = tensors(heads=3, layers=layers)
    name, renamed = LAYOUTS[layout]
    write(tmp_path, renamed(made), name)
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 5, "medusa_num_layers": 1}))
    for where in (tmp_path, tmp_path / name):
        heads, config = load_heads(str(where), VOCAB)
        assert (heads.count, heads.layers, heads.vocab_size) == (3, layers, VOCAB)
        assert config["medusa_num_heads"] == 5
        states = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1))
        logits = heads(states, lambda x: x)
        for head in range(3):
            for row, state in enumerate(states):
                assert torch.allclose(logits[head, row], says(made, head, layers, state), atol=1e-4)


def test_a_merged_checkpoint_in_shards(tmp_path: Path) -> None:
    write(tmp_path, {"lm_head.weight": torch.zeros(2, 2)}, "model-00001-of-00002.safetensors")
    write(tmp_path, merged(tensors()), "model-00002-of-00002.safetensors")
    names = dict.fromkeys(merged(tensors()), "model-00002-of-00002.safetensors")
    names["lm_head.weight"] = "model-00001-of-00002.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert load_heads(str(tmp_path), VOCAB)[0].count == 3


@pytest.mark.parametrize("vocab", [VOCAB, None])
def test_what_is_saved_is_loaded(vocab: int | None, tmp_path: Path) -> None:
    heads, _ = load_heads(str(write(tmp_path / "a", tensors(vocab=vocab))), VOCAB)
    save_heads(heads, tmp_path / "b", {"medusa_num_heads": 3})
    again, config = load_heads(str(tmp_path / "b"), VOCAB)
    assert config == {"medusa_num_heads": 3}
    for name, tensor in heads.state_dict().items():
        assert tensor.equal(again.state_dict()[name])


def without(name: str) -> Callable[[Made], Made]:
    return lambda made: {key: value for key, value in made.items() if key != name}


FAULTS: dict[str, tuple[Callable[[Made], Any], str]] = {
    "a bias is missing": (without("1.0.linear.bias"), "lacks 1.0.linear.bias"),
    "a projection is missing": (without("2.1.weight"), "lacks 2.1.weight"),
    "one head is wider": (lambda m: m | {"1.0.linear.weight": torch.zeros(4, 4)}, "not of one shape"),
    "a bias is longer": (
        lambda m: m | {f"{k}.0.linear.bias": torch.zeros(HIDDEN + 1) for k in range(3)},
        "has shape [33], not [32]",
    ),
    "no heads": (lambda m: {"lm_head.weight": torch.zeros(2, 2)}, "holds no Medusa heads"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_incomplete_file_is_named(fault: str, tmp_path: Path) -> None:
    broken, reason = FAULTS[fault]
    with pytest.raises(UsageError, match=str(tmp_path)) as caught:
        load_heads(str(write(tmp_path, broken(tensors()))), VOCAB)
    assert reason in str(caught.value)


class Evil:
    """Would run code when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("unpickled",)


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
@pytest.mark.parametrize("content", [b"", b"not a file of weights", b"\x80\x02."])
def test_a_corrupt_file_is_one_line(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=name) as caught:
        load_heads(str(tmp_path), VOCAB)
    assert "\n" not in str(caught.value)


def test_a_pickle_runs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {"0.0.linear.weight": Evil()}, "medusa_lm_head.pt")
    with pytest.raises(UsageError, match="cannot be read"):
        load_heads(str(tmp_path), VOCAB)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("where", ["./nowhere", "/nowhere/at/all", "nowhere"])
def test_a_path_that_is_not_there(where: str) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        load_heads(where, VOCAB)


def test_heads_of_another_width_are_refused(tmp_path: Path) -> None:
    where = str(write(tmp_path, tensors(hidden=16)))
    with pytest.raises(UsageError, match="width 16, and the target's are 32"):
        SpecDecoder(tiny_model("qwen3"), drafter=Medusa(Medusa.Config(heads=where)))


# --- a reduced vocabulary (B51) -------------------------------------------------------------------


def test_fewer_tokens_without_a_map_are_refused(tmp_path: Path) -> None:
    where = str(write(tmp_path, tensors(vocab=20)))
    with pytest.raises(UsageError, match="draft from 20 tokens, the target has 97, and there is no map"):
        load_heads(where, VOCAB)


KEPT = torch.tensor([96, 3, 17, 42, 8, 9, 11, 33, 21, 50, 1, 0])
MAPS = {"token_map": KEPT, "d2t": KEPT - torch.arange(len(KEPT))}


@pytest.mark.parametrize("name", MAPS)
def test_with_its_map_the_drafted_ids_are_the_targets(name: str, tmp_path: Path) -> None:
    made = tensors(vocab=len(KEPT))
    made["0.1.weight"].zero_()
    made["0.1.weight"][3] = 1.0  # draft id 3 or its opposite leads: the sign of the state's sum says which
    where = str(write(tmp_path, made | {name: MAPS[name]}))
    heads, _ = load_heads(where, VOCAB)
    assert heads.named(torch.tensor([[0, 3]])).tolist() == [[96, 42]]

    class Watched(Medusa):
        seen: set[int] = set()  # noqa: RUF012

        def propose(self, context: Any, budget: Any) -> Any:
            draft = super().propose(context, budget)
            self.seen.update(draft.tokens.flatten().tolist())
            return draft

    drafter = Watched(Medusa.Config(heads=where, tree="chain"))
    decoder = SpecDecoder(tiny_model("qwen3"), drafter=drafter, strict=True, draft_tokens=None)
    decoder.generate(PROMPTS, SamplingParams(max_new_tokens=12))
    assert Watched.seen <= set(KEPT.tolist())
    assert Watched.seen


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        (KEPT[:-1], "shape [11], and the heads draft from 12"),
        (KEPT + 1, "leads to ids 1 to 97; the target has 0 to 96"),
        (KEPT.clamp(max=50), "gives two draft ids one target id"),
    ],
)
def test_a_map_that_is_none_is_refused(ids: Tensor, reason: str, tmp_path: Path) -> None:
    where = str(write(tmp_path, tensors(vocab=len(KEPT)) | {"token_map": ids}))
    with pytest.raises(UsageError) as caught:
        load_heads(where, VOCAB)
    assert reason in str(caught.value)


def test_fresh_heads_say_what_the_targets_head_does() -> None:
    head = tiny_model("qwen3").lm_head
    states = torch.randn(5, HIDDEN)
    for heads in (Heads.fresh(2, 1, HIDDEN), Heads.fresh(2, 1, HIDDEN, head.weight)):
        for logits in heads(states, head):
            assert torch.allclose(logits, head(states), atol=1e-5)
