"""A table on disk: a safetensors file, which holds numbers only, and in its header what they are."""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec_core import TargetInfo, UsageError
from specdec_recycling.table import Table

logger = logging.getLogger("specdec")

FORMAT = "specdec-recycling table 1"


@dataclass(eq=False)
class Stored:
    """What is kept: the shared table, and above which id no row has been seen."""

    table: Table | None = None
    next_row: int = 0
    changed: bool = False


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


def load(path: Path, stored: Stored, words: str) -> None:
    """Fill the table from a file.

    Raises:
        UsageError: the file is damaged, no table, one over another vocabulary, or of another k.
    """
    assert stored.table is not None
    table = stored.table.candidates[0, : stored.table.unknown]
    try:
        with safe_open(str(path), "pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise UsageError(f"path={path} holds no recycling table; name another file")
            if header.get("vocabulary") != words:
                raise UsageError(
                    f"path={path} was written with another tokenizer (vocabulary "
                    f"{header.get('vocabulary')!r}, the target's is {words!r}); name another file"
                )
            held, next_row = file.get_tensor("candidates"), int(header["next_row"])
        _check(held, next_row, table, stored.table.unknown, path)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(f"path={path} cannot be read ({reason}); delete it, or name another file") from error
    table.copy_(held)
    stored.next_row, stored.changed = next_row, False


def save(path: Path, stored: Stored, words: str) -> None:
    """Write the table, in one step: who reads the file finds the old one or the new one.

    Raises:
        OSError: it cannot be written.
    """
    assert stored.table is not None
    tensors = {"candidates": stored.table.candidates[0, : stored.table.unknown].cpu().contiguous()}
    header = {"format": FORMAT, "vocabulary": words, "next_row": str(stored.next_row)}
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(tensors, name, header)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    stored.changed = False


def save_at_the_end(path: Path, stored: Stored, words: str) -> None:
    """Write what has changed; where it cannot be written, say so and go on."""
    if not stored.changed:
        return
    try:
        save(path, stored, words)
    except (OSError, SafetensorError) as error:
        logger.warning("the recycling table could not be written to %s: %s", path, error)


def _check(held: Tensor, next_row: int, table: Tensor, unknown: int, path: Path) -> None:
    """Raise ValueError where the numbers are no table, UsageError where they are one of another k."""
    if held.dim() != 2 or held.shape[0] != table.shape[0] or held.dtype != torch.int32 or next_row < 0:
        raise ValueError("not the numbers of a table")
    if held.shape[1] != table.shape[1]:
        raise UsageError(
            f"path={path} was written with candidates={held.shape[1]}, not {table.shape[1]}: "
            "use that many, or name another file"
        )
    if not bool(((held >= 0) & (held <= unknown)).all()):
        raise ValueError("token ids outside the vocabulary")
