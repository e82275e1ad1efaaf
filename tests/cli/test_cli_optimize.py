"""`--optimize`: what is packed, and when it would not pay."""

from __future__ import annotations

import cli_support
import pytest
import torch
from cli_support import AFTER_A, error_of, run_text

from specdec_core.engine import decoder
from specdec_core.model.faster.optimize import Optimized, optimized
from specdec_core.model.faster.packed import Projection, why_not_packed

model = cli_support.model


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """What stands in place of linear layers in each target that is loaded."""
    kinds = []

    def watched(*args: object, **options: object) -> Optimized:
        done = optimized(*args, **options)  # type: ignore[arg-type]
        kinds.append({type(part).__name__ for part in done.model.modules() if isinstance(part, Projection)})
        return done

    monkeypatch.setattr(decoder, "optimized", watched)
    return kinds


@pytest.mark.skipif(bool(why_not_packed("cpu", torch.float32)), reason="oneDNN is not here")
def test_it_has_an_effect(model: str, made: list[set[str]]) -> None:
    text = [run_text(model, "-n", "4", "--optimize", way) for way in ("none", "pack", "fuse", "pack,fuse")]
    assert text == ["bcde"] * 4
    assert made == [set(), {"PackedLinear"}, {"FusedLinear"}, {"PackedLinear", "FusedLinear"}]


@pytest.mark.skipif(bool(why_not_packed("cpu", torch.float32)), reason="oneDNN is not here")
def test_auto_leaves_short_texts_alone(
    model: str, made: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert run_text(model, "-n", "31") == AFTER_A
    assert run_text(model, "-n", "32") == AFTER_A
    assert run_text(model, "-n", "16", "--samples", "2").startswith("bcde")
    assert made == [set(), {"PackedLinear", "FusedLinear"}, {"PackedLinear", "FusedLinear"}]


def test_a_wrong_name(model: str) -> None:
    line = error_of("run", "--target", model, "-p", "a", "--optimize", "fast")
    assert line.startswith("optimize='fast': 'fast' is unknown; use auto, none, or any of pack,fuse,compile")
