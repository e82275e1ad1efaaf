"""`specdec models`: the demo pair, and what lies in the local model cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from specdec_core.cli.options import Json
from specdec_core.cli.report import print_json
from specdec_core.cli.tables import print_list
from specdec_core.demo import DRAFT, TARGET

_MB = 1e6


@dataclass(frozen=True)
class Found:
    """A model on this machine."""

    name: str  # what `--target` takes
    type: str  # its config's model_type
    megabytes: float
    causal: bool  # whether it can be a target
    note: str


def models(as_json: Json = False) -> None:
    """List the demo pair and the models in the local cache."""
    found = [*_demo(), *_cached()]
    if as_json:
        print_json([asdict(model) for model in found])
        return
    rows = [[m.name, m.type, f"{m.megabytes:.1f} MB"] for m in found]
    print_list(("target", "type", "size"), rows, [[m.note] for m in found])


def _demo() -> Iterator[Found]:
    yield _found(str(TARGET), TARGET, "the demo target: what runs without --target")
    yield _found(str(DRAFT), DRAFT, "the demo draft: what small_model and tree_top2 take for it")


def _cached() -> Iterator[Found]:
    """Read the hub's cache; nothing where there is none."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return
    for repo in sorted(cache.repos, key=lambda repo: repo.repo_id):
        if repo.repo_type != "model" or not repo.revisions:
            continue
        newest = max(repo.revisions, key=lambda revision: revision.last_modified)
        if (newest.snapshot_path / "config.json").is_file():
            yield _found(repo.repo_id, newest.snapshot_path, "", repo.size_on_disk)


def _found(name: str, folder: Path, note: str, size: int | None = None) -> Found:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if size is None:
        size = sum(file.stat().st_size for file in folder.iterdir())
    causal = any("CausalLM" in name or "LMHead" in name for name in config.get("architectures") or ())
    if not causal:
        note = "no causal language model, so no target"
    return Found(name, config.get("model_type", "unknown"), size / _MB, causal, note)
