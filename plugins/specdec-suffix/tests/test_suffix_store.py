"""A history on disk: what comes back is what was kept; what is no history is refused in one line."""

from __future__ import annotations

import gc
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_core import Registry, SamplingParams, SpecDecoder, UsageError
from specdec_core.testing.models import ids, tiny_model
from specdec_core.testing.reference import base
from specdec_suffix import Suffix, SuffixConfig

N = 24


def decoder(path: Path, **options: Any) -> SpecDecoder:
    model = tiny_model("llama")
    return SpecDecoder(
        model, drafter=Suffix(SuffixConfig(path=path, **options)), draft_tokens=16, strict=True
    )


def history(made: SpecDecoder) -> list[tuple[list[int], list[int]]]:
    drafter: Any = made.drafter
    return [(list(before), list(said)) for before, said in drafter.history.sequences()]


def rounds(made: SpecDecoder, prompt: list[int]) -> int:
    result = made.generate(prompt, SamplingParams(max_new_tokens=N))
    assert result.token_ids == base(tiny_model("llama"), prompt, N)
    return result.stats.rounds


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A history of one row."""
    path = tmp_path / "history.safetensors"
    made = decoder(path)
    rounds(made, ids(5))
    drafter: Any = made.drafter
    drafter.save()
    return path


def test_what_is_saved_is_loaded_and_drafts_the_same(file: Path, tmp_path: Path) -> None:
    again = decoder(file)
    assert history(again) == [(ids(5), base(tiny_model("llama"), ids(5), N))]
    assert rounds(again, ids(5)) <= 4
    assert [path.name for path in tmp_path.iterdir()] == [file.name]  # nothing else is left behind


def test_it_is_saved_when_the_drafter_goes(tmp_path: Path) -> None:
    path = tmp_path / "history.safetensors"
    made = decoder(path)
    rounds(made, ids(5))
    assert not path.exists()
    del made
    gc.collect()
    assert len(history(decoder(path))) == 1


def test_it_is_saved_when_the_process_ends(tmp_path: Path) -> None:
    path = tmp_path / "history.safetensors"
    program = (
        "import sys; from specdec_core import SpecDecoder, SamplingParams\n"
        "from specdec_core.testing.models import tiny_model\n"
        "d = SpecDecoder(tiny_model('llama'), drafter=f'suffix:path={sys.argv[1]}')\n"
        "d.generate([1, 2, 3], SamplingParams(max_new_tokens=5))\n"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, capture_output=True)
    assert [len(said) for _, said in history(decoder(path))] == [5]


def test_row_ids_go_on_where_the_file_ends(file: Path) -> None:
    """Otherwise a row of the same seed would make the draws that its drafts come from."""
    again = decoder(file)
    assert again.drafter.capabilities.next_row == 1
    seen = [done.outcome.rows for done in again.rounds(ids(4), SamplingParams(max_new_tokens=1))]
    assert seen == [(1,)]


def test_a_smaller_history_keeps_the_latest(tmp_path: Path) -> None:
    path = tmp_path / "history.safetensors"
    made = decoder(path)
    drafter: Any = made.drafter
    for i in range(30):
        drafter.history.learn([i] * 100, 0)
    drafter.save()
    kept = history(decoder(path, max_history=1000))
    assert [said[0] for _, said in kept] == list(range(21, 30))


def damaged(file: Path, kind: str) -> None:
    """Make a file into what it must not be."""
    tensors, raw = load_file(file), file.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])["__metadata__"]
    spans = tensors["spans"]
    bytes_of = {"cut": raw[:-9], "text": b"hello, this is no history\n", "empty": b""}
    content: dict[str, tuple[dict[str, torch.Tensor], dict[str, str] | None]] = {
        "weights": ({"weight": torch.zeros(3)}, None),
        "vocabulary": (tensors, {**header, "vocabulary": "5 unnamed"}),
        "ids": ({**tensors, "tokens": tensors["tokens"] + 90}, header),
        "sizes": ({**tensors, "spans": spans + 1}, header),
        "shape": ({**tensors, "spans": spans.flatten()}, header),
        "no tensors": ({"other": torch.zeros(1)}, header),
        "row": (tensors, {**header, "next_row": "many"}),
    }
    if kind in bytes_of:
        file.write_bytes(bytes_of[kind])
    else:
        save_file(content[kind][0], file, content[kind][1])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("cut", "cannot be read"),
        ("text", "cannot be read"),
        ("empty", "cannot be read"),
        ("weights", "holds no suffix history"),
        ("vocabulary", "another tokenizer"),
        ("ids", "outside the vocabulary"),
        ("sizes", "do not add up"),
        ("shape", "cannot be read"),
        ("no tensors", "cannot be read"),
        ("row", "cannot be read"),
    ],
)
def test_a_file_that_is_no_history_is_refused(file: Path, kind: str, words: str) -> None:
    damaged(file, kind)
    with pytest.raises(UsageError, match=words) as caught:
        decoder(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_places_that_cannot_be_written_to_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        decoder(tmp_path / "no" / "history")
    with pytest.raises(UsageError, match="is a folder"):
        decoder(tmp_path)
    with pytest.raises(UsageError, match="shared=false"):
        Registry.discover().build_drafter("suffix", {"path": str(tmp_path / "x"), "shared": "false"})
    with pytest.raises(UsageError, match="path=FILE"):
        Suffix(SuffixConfig()).save()


def test_a_file_that_cannot_be_written_at_the_end_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    made = decoder(folder / "history")
    rounds(made, ids(5))
    folder.rmdir()
    del made
    gc.collect()
    assert "could not be written" in caplog.text
