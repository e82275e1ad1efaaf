"""A draft model must share the target's vocabulary; padding of either side is no matter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import Recorded, cousin, plain, says, small, tree
from support import ids
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from specdec_core import Registry, SamplingParams, SpecDecoder, UsageError
from specdec_core.testing.models import tiny_model
from specdec_drafters._vocabulary import aligned

WORDS = [f"w{i}" for i in range(90)]


def tokenizer(words: list[str]) -> Any:
    """One token a word."""
    model = WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), clean_up_tokenization_spaces=False)


def drafter(model: Any, **options: Any) -> Any:
    """A `small_model`, built as the command line does."""
    return Registry.discover().build_drafter("small_model", {"model": model, **options})


@pytest.mark.parametrize(("draft_size", "target_size"), [(96, 112), (112, 96), (90, 97), (97, 90)])
@pytest.mark.parametrize("law", ["greedy", "sampled", "coupled"])
def test_padded_sizes_may_differ(draft_size: int, target_size: int, law: str) -> None:
    target, words = tiny_model("llama", vocab=target_size), tokenizer(WORDS)
    # The ids that only the larger one has are said, too: by a target of random weights.
    recorded = Recorded(small(tiny_model("llama", vocab=draft_size), tokenizer=words, draft=law))
    verifier = "match" if law == "coupled" else "rejection"
    decoder = SpecDecoder(target, words, drafter=recorded, verifier=verifier, strict=True, draft_tokens=None)
    prompts = [ids(4, vocab=90), ids(9, vocab=90)]
    assert says(decoder, prompts, 30) == [plain(target, tuple(prompt), 30) for prompt in prompts]
    says(decoder, prompts, 30, temperature=1.5)
    for draft in recorded.raw:
        if draft.nodes:
            assert int(draft.tokens.max()) < min(draft_size, target_size)
        if draft.probs is not None:
            assert draft.probs.shape[-1] == target_size
            assert float(draft.probs[..., draft_size:].sum()) == 0


def test_aligned_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    assert aligned(logits, 2).tolist() == [[1.0, 2.0]]
    assert aligned(logits, 5).softmax(-1)[0, 3:].tolist() == [0.0, 0.0]
    assert aligned(logits, 3) is logits


PERMUTED = [*WORDS[:7], WORDS[8], WORDS[7], *WORDS[9:]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (PERMUTED, "id 7 is 'w8' there and 'w7' in the target"),
        (WORDS[:80], "id 80 is nothing there and 'w80' in the target"),
        ([*WORDS, "more"], "id 90 is 'more' there and nothing in the target"),
    ],
)
@pytest.mark.parametrize("stored", [False, True])
def test_another_vocabulary_is_refused(words: list[str], message: str, stored: bool, tmp_path: Path) -> None:
    target, model, other = tiny_model("llama"), tiny_model("llama", seed=1), tokenizer(words)
    if stored:
        model.save_pretrained(tmp_path)
        other.save_pretrained(tmp_path)
        built, label = drafter(str(tmp_path)), str(tmp_path)
    else:
        built, label = small(model, tokenizer=other), "LlamaForCausalLM"
    with pytest.raises(UsageError) as caught:
        SpecDecoder(target, tokenizer(WORDS), drafter=built, draft_tokens=None)
    assert message in str(caught.value)
    assert label in str(caught.value)


def test_a_tree_is_as_strict() -> None:
    target = tiny_model("llama")
    with pytest.raises(UsageError, match="id 7 is"):
        SpecDecoder(
            target,
            tokenizer(WORDS),
            drafter=tree(cousin(target), tokenizer=tokenizer(PERMUTED)),
            draft_tokens=None,
        )


@pytest.mark.parametrize(("size", "fits"), [(97, True), (90, True), (112, True), (89, False), (1200, False)])
def test_without_the_drafts_tokenizer_sizes_must_be_those_of_padding(size: int, fits: bool) -> None:
    model = tiny_model("llama", vocab=size)
    if fits:
        SpecDecoder(tiny_model("llama"), tokenizer(WORDS), drafter=small(model), draft_tokens=None)
    else:
        with pytest.raises(UsageError, match=f"{size} ids there and 97 in the target"):
            SpecDecoder(tiny_model("llama"), tokenizer(WORDS), drafter=small(model), draft_tokens=None)


def test_without_any_tokenizer_sizes_must_be_equal() -> None:
    SpecDecoder(tiny_model("llama"), drafter=small(tiny_model("llama", seed=1)), draft_tokens=None)
    with pytest.raises(UsageError, match="96 ids there and 97 in the target"):
        SpecDecoder(tiny_model("llama"), drafter=small(tiny_model("llama", vocab=96)), draft_tokens=None)


# --- where the model comes from --------------------------------------------------------------------


def test_a_folder_with_its_tokenizer_and_without(tmp_path: Path) -> None:
    target, words = tiny_model("llama"), tokenizer(WORDS)
    target.save_pretrained(tmp_path)
    for _ in range(2):
        decoder = SpecDecoder(target, words, drafter=drafter(str(tmp_path)), strict=True, draft_tokens=None)
        result = decoder.generate(ids(5, vocab=90), SamplingParams(max_new_tokens=19))
        assert result.stats.acceptance_rate == 1.0
        words.save_pretrained(tmp_path)


def test_a_loaded_model_takes_the_targets_dtype(tmp_path: Path) -> None:
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    for dtype, expected in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        built = drafter(str(tmp_path), dtype=dtype)
        decoder = SpecDecoder(tiny_model("llama"), drafter=built, strict=True, draft_tokens=None)
        assert built.draft_model.cached.dtype == expected
        assert says(decoder, [ids(5)], 12) == [plain(tiny_model("llama"), tuple(ids(5)), 12)]


def test_a_target_may_ship_its_draft(tmp_path: Path) -> None:
    target = tiny_model("llama", fresh=True)
    target.save_pretrained(tmp_path / "draft")
    (tmp_path / "specdec.json").write_text(json.dumps({"draft": "draft"}))
    target.config._name_or_path = str(tmp_path)
    for name in ("small_model", "tree_top2"):
        decoder = SpecDecoder(target, drafter=name, strict=True, draft_tokens=None)
        result = decoder.generate(ids(5), SamplingParams(max_new_tokens=13))
        assert result.stats.mean_acceptance_length > 3
    with pytest.raises(UsageError, match="ships none: write small_model:model=ID_OR_PATH"):
        SpecDecoder(tiny_model("llama"), drafter="small_model")


def test_what_cannot_be_loaded(tmp_path: Path) -> None:
    wrong = {
        str(tmp_path): "cannot be loaded: ",
        str(tmp_path / "nothing"): "does not exist; name a model folder",
    }
    for name, words in wrong.items():
        with pytest.raises(UsageError, match=f"model={name} {words}") as caught:
            SpecDecoder(tiny_model("llama"), drafter=drafter(name), draft_tokens=None)
        assert "\n" not in str(caught.value)


def test_a_model_in_memory_is_an_option_and_prints_as_its_class() -> None:
    model = tiny_model("llama")
    built = drafter(model)
    assert built.config.model is model
    assert json.loads(built.config.model_dump_json())["model"] == "LlamaForCausalLM"
