"""A folder of tiny distributions that stands in for site-packages, and stand-in drafters and verifiers."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from specdec_core.plugins.registry import BUILT_IN, PluginInfo, Registry

PREAMBLE = """
from pydantic import BaseModel, ConfigDict
from specdec_core.contract.errors import UsageError
from specdec_core.plugins.hookspecs import hookimpl

class Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    num_tokens: int = 4

class Part:
    Config = Config
    capabilities = "stand-in"
    laws, preference = frozenset(), 0
    handles_trees = lossless = samples = drafter_invariant = True
    def __init__(self, config): self.config = config
    def bind(self, target): ...
    def admit(self, rows): ...
    def propose(self, context, budget): ...
    def observe(self, outcome): ...
    def release(self, rows): ...
    def verify(self, p, draft, rng): ...
"""


def offering(*drafters: str, verifiers: tuple[str, ...] = (), more: str = "") -> str:
    """The text of a plugin that registers stand-ins of these names."""
    lines = [PREAMBLE, more]
    for kind, names in (("drafter", drafters), ("verifier", verifiers)):
        lines += [f"class {kind}_{name}(Part):\n    name = {name!r}" for name in names]
        body = "; ".join(f"register({kind}_{name})" for name in names) or "pass"
        lines.append(f"@hookimpl\ndef specdec_register_{kind}s(register): {body}")
    return "\n".join(lines)


class Site:
    """A folder with distributions, like site-packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []

    def add(
        self, distribution: str, text: str | None, *, version: str = "1.0", entry_points: str | None = None
    ) -> str:
        """Install one distribution with one module; its entry point is called as the module."""
        module = distribution.replace("-", "_").replace(".", "_").lower() + "_plugin"
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        points = entry_points if entry_points is not None else f"[specdec]\n{module} = {module}\n"
        (info / "entry_points.txt").write_text(points)
        if text is not None:
            (self.folder / f"{module}.py").write_text(text)
        self.modules.append(module)
        return module


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """A site with the built-in distribution alone, in place of all that is installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        importlib.metadata,
        "distributions",
        lambda: importlib.metadata.Distribution.discover(path=[str(tmp_path)]),
    )
    site = Site(tmp_path)
    site.add(BUILT_IN, offering("small_model", "prompt_lookup", verifiers=("greedy",)), version="0.1")
    yield site
    for module in site.modules:
        sys.modules.pop(module, None)


@dataclass(frozen=True)
class Discovered:
    """A registry, and the lines that were reported while it was filled."""

    registry: Registry
    lines: list[str]


def discover(
    environ: Mapping[str, str] | None = None, *, blocked: Iterable[str] = (), strict: bool | None = None
) -> Discovered:
    """Discover with what was reported; the environment of the test run plays no part."""
    lines: list[str] = []
    registry = Registry.discover(blocked=blocked, strict=strict, environ=environ or {}, report=lines.append)
    return Discovered(registry, lines)


def info(registry: Registry, distribution: str) -> PluginInfo:
    """The one plugin of a distribution."""
    [found] = [plugin for plugin in registry.plugins() if plugin.distribution == distribution]
    return found


def names(registry: Registry) -> list[str]:
    """The names of all drafters."""
    return [entry.name for entry in registry.drafters()]


def module_of(text: str) -> ModuleType:
    """A module made on the spot, as in a notebook."""
    module = ModuleType("in_process")
    exec(text, vars(module))
    return module
