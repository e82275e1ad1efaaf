"""Many calls of one decoder leave nothing behind (B90), and copy no model and no tokenizer (B92)."""

from __future__ import annotations

import copy
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_support import byte_tokenizer
from memory import live_tensors
from support import ids
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from specdec_core import SamplingParams, SpecDecoder
from specdec_core.testing.models import tiny_model

WARM = 5
SLACK = 256  # bytes: what is kept of the last round depends on how much it drafted
RUNS = [("prompt_lookup", 4), ("prompt_lookup", 0), ("early_exit:layer=1", 4), ("none", 0)]


def test_what_tracing_leaves_behind_is_not_counted() -> None:
    """Whatever ran before in this process: a size that is a symbol cannot be summed or compared."""
    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        fake = torch.empty(shapes.create_unbacked_symint())
    assert isinstance(fake.numel(), torch.SymInt)
    before = live_tensors()
    real = torch.zeros(3)
    assert live_tensors() == (before[0] + 1, before[1] + real.nbytes)


def resident() -> int:
    """Bytes of this process in memory."""
    if not Path("/proc/self/statm").is_file():
        return 0
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a deep copy of a model or a tokenizer an error."""
    original = copy.deepcopy

    def checked(thing: Any, *args: Any, **options: Any) -> Any:
        assert not isinstance(thing, torch.nn.Module)
        assert "okenizer" not in type(thing).__name__
        return original(thing, *args, **options)

    monkeypatch.setattr(copy, "deepcopy", checked)


def call(decoder: SpecDecoder, i: int) -> None:
    """Make one short call; the kinds take turns, and each has had one when measuring begins."""
    kind = i % WARM
    params = SamplingParams(max_new_tokens=6, temperature=float(kind % 2), seed=i)
    if kind == 0:
        decoder.generate([*ids(12), i % 90], params)
    elif kind == 1:
        decoder.generate([ids(9, i % 7), ids(20, i % 11)], params.replace(logprobs=1))
    elif kind == 2:
        decoder.generate("abcabcabc", params.replace(stop="x", n=2))
    elif kind == 3:
        stream = decoder.stream("hello hello", params)
        next(stream)
        stream.close()
    else:
        list(decoder.finished([(i, "again", params)], [params]))


def soak(monkeypatch: pytest.MonkeyPatch, drafter: str, k: int, calls: int) -> int:
    """Make calls; return by how many bytes the process grew after the first ones."""
    model, tokenizer = tiny_model("llama", vocab=257), byte_tokenizer()
    no_copies(monkeypatch)
    decoder = SpecDecoder(model, tokenizer, drafter=drafter, draft_tokens=k, max_batch=2, strict=True)
    for i in range(WARM):
        call(decoder, i)
    (alive, size), held = live_tensors(), resident()
    for i in range(WARM, calls):
        call(decoder, i)
        if i % 60 == 59:
            now, bytes_now = live_tensors()
            assert now == alive
            assert bytes_now <= size + SLACK
    return resident() - held


@pytest.mark.parametrize(("drafter", "k"), RUNS)
def test_live_tensors_are_flat_after_the_fifth_call(
    monkeypatch: pytest.MonkeyPatch, drafter: str, k: int
) -> None:
    soak(monkeypatch, drafter, k, calls=60)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="no /proc")
@pytest.mark.parametrize(("drafter", "k"), RUNS)
def test_memory_is_flat_over_a_thousand_calls(
    monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None], drafter: str, k: int
) -> None:
    grown = soak(monkeypatch, drafter, k, calls=1000)
    record_property("bytes_grown", grown)
    print(f"{drafter}, k={k}: resident memory grew by {grown / 2**20:.1f} MiB in 995 calls")
    assert grown < 8 * 2**20
