"""What the rows of an output were made with: a run that goes on with them must be set alike."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_jsonable_python

from specdec_core.cli.groups import Drafting, Model
from specdec_core.cli.options import named_target
from specdec_core.contract.sampling_params import SamplingParams

Settings = dict[str, Any]


def settings_of(model: Model, drafting: Drafting, params: SamplingParams, chat: bool | None) -> Settings:
    """Collect what a row's text depends on besides the row itself; what is at its default is left out."""
    settings: Settings = {
        "target": named_target(model.target),
        "drafter": drafting.drafter,
        "verifier": drafting.verifier,
        "draft_tokens": drafting.draft_tokens,
    }
    if model.dtype != Model.dtype:
        settings["dtype"] = model.dtype
    if model.revision is not None:
        settings["revision"] = model.revision
    if chat is not None:
        settings["mode"] = "chat" if chat else "raw"
    given = params.model_dump(exclude_defaults=True, exclude={"constraint", "logits_processors"})
    if params.constraint is not None:
        text = getattr(params.constraint, "text", "")
        given["constraint"] = f"{params.constraint!r} {digest_of({'text': text})}"
    return settings | dict(to_jsonable_python(given))


def difference(made: Mapping[str, Any], now: Settings) -> str:
    """Name the first setting that differs, as it was and as it is; empty if none does."""
    for name in [*now, *(name for name in made if name not in now)]:
        was, is_ = made.get(name), now.get(name)
        if was != is_ and not (name == "target" and _one_folder(was, is_)):
            return f"was made with {_shown(name, was)}, and this run has {_shown(name, is_)}"
    return ""


def digest_of(row: Mapping[str, Any]) -> str:
    """Give a short name of what a row of the input asks for: its prompt and its own params."""
    text = json.dumps(row, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _shown(name: str, value: Any) -> str:
    return f"no {name}" if value is None else f"{name}={value}"


def _one_folder(was: Any, is_: Any) -> bool:
    both = [Path(str(name)).expanduser() for name in (was, is_)]
    return all(path.is_dir() for path in both) and both[0].samefile(both[1])
