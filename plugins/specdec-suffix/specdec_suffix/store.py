"""A history on disk: a safetensors file, which holds numbers only, and in its header what they are."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from array import array
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specdec_core import TargetInfo, UsageError
from specdec_suffix.history import History

logger = logging.getLogger("specdec")

FORMAT = "specdec-suffix history 1"


def vocabulary(target: TargetInfo) -> str:
    """Name the target's vocabulary: its size and, where there is a tokenizer, a digest of it."""
    known = getattr(target.tokenizer, "get_vocab", None)
    words = "" if known is None else "\n".join(f"{i} {word!r}" for word, i in sorted(known().items()))
    digest = hashlib.sha256(words.encode("utf-8", "surrogatepass")).hexdigest()[:16] if words else "unnamed"
    return f"{target.vocab_size} {digest}"


def check_place(path: Path) -> None:
    """Refuse a file that could not be written later.

    Raises:
        UsageError: its folder is not there, or one may not write there.
    """
    folder = path.parent
    if path.is_dir():
        raise UsageError(f"path={path} is a folder; name a file in it")
    if not folder.is_dir():
        raise UsageError(f"path={path}: the folder {folder} does not exist; make it, or name another file")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"path={path}: the folder {folder} cannot be written to; name another file")


def load(path: Path, history: History, words: str, vocab_size: int) -> None:
    """Fill an empty history from a file; one that is larger than the history loses its oldest.

    Raises:
        UsageError: the file is damaged, no history, or one over another vocabulary.
    """
    try:
        with safe_open(str(path), "pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise UsageError(f"path={path} holds no suffix history; name another file")
            if header.get("vocabulary") != words:
                raise UsageError(
                    f"path={path} was written with another tokenizer (vocabulary "
                    f"{header.get('vocabulary')!r}, the target's is {words!r}); name another file"
                )
            tokens, spans = file.get_tensor("tokens").tolist(), file.get_tensor("spans").tolist()
            next_row = int(header["next_row"])
        _check(tokens, spans, next_row, vocab_size)
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(f"path={path} cannot be read ({reason}); delete it, or name another file") from error
    start = 0
    for before, said in spans:
        history.learn(tokens[start : start + before + said], before)
        start += before + said
    history.next_row, history.changes = next_row, 0


def save(path: Path, history: History, words: str) -> None:
    """Write a history, in one step: who reads the file finds the old one or the new one.

    Raises:
        OSError: it cannot be written.
    """
    tokens, spans = array("i"), []
    for before, said in history.sequences():
        tokens += before + said
        spans.append([len(before), len(said)])
    tensors = {
        "tokens": torch.tensor(tokens.tolist(), dtype=torch.int32),
        "spans": torch.tensor(spans, dtype=torch.int64).reshape(-1, 2),
    }
    header = {"format": FORMAT, "vocabulary": words, "next_row": str(history.next_row)}
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(tensors, name, header)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def save_at_the_end(path: Path, history: History, words: str) -> None:
    """Write what has changed; where it cannot be written, say so and go on."""
    if not history.changes:
        return
    try:
        save(path, history, words)
    except (OSError, SafetensorError) as error:
        logger.warning("the suffix history could not be written to %s: %s", path, error)
    else:
        history.changes = 0


def _check(tokens: list[Any], spans: list[Any], next_row: int, vocab_size: int) -> None:
    """Raise ValueError where the numbers are no history."""
    if next_row < 0 or any(before < 0 or said < 1 for before, said in spans):
        raise ValueError("negative sizes")
    if sum(before + said for before, said in spans) != len(tokens):
        raise ValueError("sizes do not add up")
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ValueError("token ids outside the vocabulary")
