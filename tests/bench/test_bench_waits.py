"""How often a round waits for a CUDA device, with what CUDA would say."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from specdec_core import RowDrafter, RowDrafterConfig, SpecDecoder
from specdec_core.bench import session
from specdec_core.bench.methods import parse_methods
from specdec_core.bench.prompts import BenchPrompt
from specdec_core.bench.record import Record
from specdec_core.bench.session import made
from specdec_core.bench.stand import Stand
from specdec_core.bench.waits import Waits, count_waits, rounds_enough
from specdec_core.plugins.registry import Registry
from specdec_core.testing.models import tiny_model


class Waiting(RowDrafter):
    """Waits not at all, once, or twice, by the length of the text."""

    name = "waiting"

    def propose_row(self, tokens: Sequence[int], budget: int) -> list[int]:
        for _ in range(len(tokens) % 3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return []


def test_waits_are_counted_by_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """As CUDA warns of them; those of the prompt's round, and of setting the mode, are left out."""
    modes: list[Any] = []

    def set_mode(mode: Any) -> None:
        modes.append(mode)
        warnings.warn("does not detect all synchronizing operations", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    decoder = SpecDecoder(tiny_model(), drafter=Waiting(RowDrafterConfig(num_tokens=2)), draft_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = count_waits(decoder, [1, 2, 3, 4], rounds_enough(2))
    assert found.counts == [2, 0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert modes == ["warn", 0]
    assert len(found.places) == 1
    assert found.places[0].startswith(__file__)


def test_they_are_counted_once_for_each_method_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, and not again where a record holds them."""
    asked: list[str] = []

    def counted(decoder: SpecDecoder, prompt: Sequence[int], new_tokens: int) -> Waits:
        asked.append(f"{decoder.drafter.name} {list(prompt)} {new_tokens}")
        return Waits([1, 1], ["a.py:1 (2)"])

    monkeypatch.setattr(session, "count_waits", counted)
    stand, record = Stand.of(tiny_model(), None, Registry.discover()), Record(None)
    prompts = [BenchPrompt(str(n), "c", tuple(range(n))) for n in (5, 3, 4)]
    with made(parse_methods(["prompt_lookup@4", "hf"]), stand) as methods:
        session._count_waits(stand, methods, prompts, record)
        assert asked == []
        monkeypatch.setattr(session, "device_of", lambda model: torch.device("cuda"))
        for _ in range(2):
            session._count_waits(stand, methods, prompts, record)
    assert [line["method"] for line in record.of("waits")] == ["none", "prompt_lookup@4"]
    assert asked == ["none [0, 1, 2, 3] 12", "prompt_lookup [0, 1, 2, 3] 56"]
