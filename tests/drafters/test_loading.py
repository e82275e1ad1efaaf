"""A draft model of one's own: loaded as the target may be, and given back as it was."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import transformers
from support import greedy, ids

from specdec_core import SpecDecoder
from specdec_core.testing.models import tiny_model
from specdec_drafters.small_model import SmallModel, SmallModelConfig


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"trust_remote_code": False}),
        ({"trust_remote_code": True}, {"trust_remote_code": True}),
        ({"offline": True}, {"trust_remote_code": False, "local_files_only": True}),
    ],
)
@pytest.mark.parametrize("loaded", [True, False])
def test_what_holds_for_the_target_holds_for_a_draft_of_the_hub(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, bool],
    expected: dict[str, bool],
    loaded: bool,
) -> None:
    """From `SpecDecoder` and from `from_pretrained`, for the model and for its tokenizer."""
    asked: list[dict[str, Any]] = []

    def from_pretrained(name: str, **given: Any) -> Any:
        asked.append(given)
        if name == "some/draft":
            raise OSError("no such tokenizer")
        return original(name, **given)

    original = transformers.AutoTokenizer.from_pretrained
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM,
        "from_pretrained",
        lambda name, **given: asked.append(given) or tiny_model("llama"),
    )
    if loaded:
        monkeypatch.setattr(
            "specdec_core.engine.decoder.load_model", lambda *_, **__: (deepcopy(tiny_model("llama")), None)
        )
        SpecDecoder.from_pretrained("target", drafter="small_model:model=some/draft", **options)
    else:
        SpecDecoder(tiny_model("llama"), drafter="small_model:model=some/draft", **options)
    assert len(asked) == 2
    for given in asked:
        assert {
            name: given[name] for name in ("trust_remote_code", "local_files_only") if name in given
        } == expected


def test_a_model_in_memory_drafts_without_dropout_and_goes_on_training() -> None:
    draft = tiny_model("llama", fresh=True, attention_dropout=0.5).train()
    layer = draft.model.layers[0]
    layer.eval()  # a part that its owner has frozen
    before = [module.training for module in draft.modules()]
    drafter = SmallModel(SmallModelConfig(model=draft))
    decoder = SpecDecoder(tiny_model("llama"), drafter=drafter, draft_tokens=4, strict=True)
    assert [module.training for module in draft.modules()] == before
    seen: set[bool] = set()
    draft.model.register_forward_hook(lambda module, *_: seen.add(module.training))
    result = decoder.generate(ids(6), greedy(21))
    assert seen == {False}
    assert result.stats.acceptance_rate == 1.0  # the same weights
    assert [module.training for module in draft.modules()] == before
