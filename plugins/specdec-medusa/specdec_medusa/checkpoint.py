"""Read and write heads: published checkpoints, merged models, and what `specdec-medusa train` makes.

Three layouts are read, of which the first is written:

    {head}.{layer}.linear.weight, .bias and {head}.{layers}.weight     `medusa_lm_head.pt` as published
    medusa_head.{head}. ...                                            merged into the target's checkpoint
    blocks.{head}.layers.{layer}.weight, .bias, lm_heads.{head}.weight as vLLM has them

How many heads there are is read from the weights: published configs say something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec_core import UsageError
from specdec_medusa.heads import Heads
from specdec_medusa.vocabulary import MAP_NAMES, target_ids

WEIGHTS, CONFIG = "medusa_lm_head.safetensors", "config.json"
_FILES = (WEIGHTS, "medusa_lm_head.pt", "model.safetensors", "pytorch_model.bin")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_PROJECTION = re.compile(r"(\d+)\.(\d+)\.weight")
_RENAMES = (
    (re.compile(r"^(?:medusa_heads?|model\.medusa_heads?)\."), ""),
    (re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$"), r"\1.\2.linear.\3"),
)
_LM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


def load_heads(where: str, vocab_size: int, revision: str | None = None) -> tuple[Heads, dict[str, Any]]:
    """Load heads from a file, a folder or a hub id; return them, on the CPU, and their config.

    vocab_size: the target's; heads that draft from fewer tokens must bring the map to the target's ids.

    Raises:
        UsageError: nothing is found, it cannot be read, or it holds no complete set of heads.
    """
    path = _local(where, revision)
    folder = path if path.is_dir() else path.parent
    found = _named(_read(path, where))
    heads = _assembled(found, vocab_size, where)
    return heads, _config(folder / CONFIG)


def save_heads(heads: Heads, folder: Path, config: Mapping[str, Any]) -> None:
    """Write `medusa_lm_head.safetensors` in the published layout, and config.json beside it."""
    tensors: dict[str, Tensor] = {}
    for head in range(heads.count):
        for layer in range(heads.layers):
            tensors[f"{head}.{layer}.linear.weight"] = heads.weight[head, layer]
            tensors[f"{head}.{layer}.linear.bias"] = heads.bias[head, layer]
        if heads.projection is not None:
            tensors[f"{head}.{heads.layers}.weight"] = heads.projection[head]
    if heads.ids is not None:
        tensors["token_map"] = heads.ids
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(dict(config), indent=2) + "\n", encoding="utf-8")


def _local(where: str, revision: str | None) -> Path:
    path = Path(where).expanduser()
    if path.exists():
        return path
    if path.is_absolute() or where.startswith(("./", "../", "~")) or where.count("/") != 1:
        raise UsageError(f"heads={where} does not exist; name a file, a folder or a hub id")
    try:
        patterns = ["medusa_lm_head.*", CONFIG]
        return Path(snapshot_download(where, revision=revision, allow_patterns=patterns))
    except Exception as error:  # whatever the hub's client raises
        raise UsageError(
            f"heads={where} is no local path and cannot be fetched: {_first_line(error)}"
        ) from error


def _read(path: Path, where: str) -> dict[str, Tensor]:
    """Read all tensors of heads in a file, or in the first file of a folder that has any."""
    files = [path] if path.is_file() else [path / name for name in _FILES if (path / name).is_file()]
    if path.is_dir():
        for index in filter(Path.is_file, (path / name for name in _INDICES)):
            files += _shards(index, where)
    for file in files:
        try:
            found = _tensors(file)
        except Exception as error:  # unpickling raises whatever it likes
            raise UsageError(f"heads={where}: {file.name} cannot be read: {_first_line(error)}") from error
        if found:
            return found
    looked = ", ".join(file.name for file in files) or f"no {' or '.join(_FILES[:2])}"
    raise UsageError(
        f"heads={where} holds no Medusa heads ({looked}); name a file with keys 0.0.linear.weight, ..."
    )


def _shards(index: Path, where: str) -> list[Path]:
    """Name the shards of a merged checkpoint that hold heads; they must all be in one."""
    try:
        shards: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"heads={where}: {index.name} cannot be read: {_first_line(error)}") from error
    names = sorted({shard for name, shard in shards.items() if name.startswith("medusa_head")})
    if len(names) > 1:
        raise UsageError(f"heads={where} is spread over {', '.join(names)}; put the heads into one file")
    return [index.parent / name for name in names]


def _tensors(file: Path) -> dict[str, Tensor]:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys() if _is_ours(name)}  # noqa: SIM118
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(loaded, Mapping):
        raise ValueError(f"it holds {type(loaded).__name__}, not weights by name")
    ours = {name: tensor for name, tensor in loaded.get("state_dict", loaded).items() if _is_ours(name)}
    if not all(isinstance(tensor, Tensor) for tensor in ours.values()):
        raise ValueError("it holds something else than tensors under the names of heads")
    return ours


def _is_ours(name: str) -> bool:
    short = _short(name)
    patterns = (_BLOCK, _PROJECTION, _LM_HEAD)
    return short in MAP_NAMES or any(pattern.fullmatch(short) for pattern in patterns)


def _short(name: str) -> str:
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    return name


def _named(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bring names into the published layout."""
    short = {_short(name): tensor for name, tensor in found.items()}
    layers = 1 + max((int(m[2]) for m in map(_BLOCK.fullmatch, short) if m), default=-1)
    return {_LM_HEAD.sub(rf"\1.{layers}.weight", name): tensor for name, tensor in short.items()}


def _assembled(found: dict[str, Tensor], vocab_size: int, where: str) -> Heads:
    blocks = [match for match in map(_BLOCK.fullmatch, found) if match]
    if not blocks:
        raise UsageError(f"heads={where} holds no residual blocks ({{head}}.{{layer}}.linear.weight)")
    count, layers = 1 + max(int(m[1]) for m in blocks), 1 + max(int(m[2]) for m in blocks)

    def stacked(name: Callable[[int, int], str]) -> Tensor:
        return torch.stack(
            [torch.stack([_get(found, name(k, n), where) for n in range(layers)]) for k in range(count)]
        )

    try:
        weight = stacked(lambda k, n: f"{k}.{n}.linear.weight")
        bias = stacked(lambda k, n: f"{k}.{n}.linear.bias")
        projection = None
        if any(m and int(m[2]) == layers for m in map(_PROJECTION.fullmatch, found)):
            projection = torch.stack([_get(found, f"{k}.{layers}.weight", where) for k in range(count)])
    except RuntimeError as error:  # sizes that differ among heads
        raise UsageError(f"heads={where}: the heads are not of one shape: {_first_line(error)}") from error
    _check_shapes(weight, bias, projection, where)
    size = vocab_size if projection is None else projection.shape[1]
    return Heads(weight, bias, projection, target_ids(found, size, vocab_size, where))


def _check_shapes(weight: Tensor, bias: Tensor, projection: Tensor | None, where: str) -> None:
    hidden = weight.shape[-1]
    each = [("linear.weight", weight.shape[2:], (hidden, hidden)), ("linear.bias", bias.shape[2:], (hidden,))]
    if projection is not None:
        each.append(("projection", projection.shape[1:], (projection.shape[1], hidden)))
    for name, shape, wanted in each:
        if tuple(shape) != wanted:
            raise UsageError(f"heads={where}: a {name} has shape {list(shape)}, not {list(wanted)}")


def _get(found: Mapping[str, Tensor], name: str, where: str) -> Tensor:
    if name not in found:
        raise UsageError(f"heads={where} lacks {name}; the file is not complete")
    return found[name]


def _config(file: Path) -> dict[str, Any]:
    """Read the config beside the weights; its counts are not trusted, and it may be missing."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{file} is no JSON: {_first_line(error)}") from error
    return found if isinstance(found, dict) else {}


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
