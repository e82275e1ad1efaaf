"""Find a drafter or verifier by name among what the plugins registered, and build it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from specdec_core.contract.blame import blaming, one_line
from specdec_core.contract.errors import AmbiguousPlugin, PluginError, UnknownPlugin
from specdec_core.plugins.loading import Kind, normalised
from specdec_core.plugins.spec_string import make_config, nearest

T = TypeVar("T")
Status = Literal["loaded", "failed", "blocked"]


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A drafter or verifier that can be asked for by name, and the plugin it comes from."""

    name: str
    distribution: str
    version: str
    plugin: str
    cls: type[T]

    @property
    def qualified(self) -> str:
        """The name that is never ambiguous: `distribution/name`."""
        return f"{self.distribution}/{self.name}"

    @property
    def origin(self) -> str:
        """Distribution and version in words."""
        return f"{self.distribution} {self.version}".strip()


@dataclass(frozen=True)
class PluginInfo:
    """One plugin, loaded or not: a line of `specdec plugins`.

    `name` is its entry point; `origin` its file, or what the entry point names where that was not
    imported; `error` says why it is not loaded.
    """

    name: str
    distribution: str
    version: str
    origin: str
    status: Status
    error: str | None = None
    drafters: tuple[str, ...] = ()
    verifiers: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Entry point, distribution and version in words."""
        return f"{self.name!r} of {self.distribution} {self.version}".strip()


def find(kind: Kind, entries: Sequence[Entry[T]], name: str, plugins: Sequence[PluginInfo]) -> Entry[T]:
    """The entry called `name` or `distribution/name`.

    Raises:
        UnknownPlugin: there is none; lists the nearest, the known, and the plugins that are not loaded.
        AmbiguousPlugin: several distributions use the name for different classes.
    """
    found = [entry for entry in entries if _answers_to(entry, name)]
    if not found:
        raise UnknownPlugin(_unknown(kind, entries, name, plugins))
    if any(entry.cls is not found[0].cls for entry in found):
        owners = " and ".join(entry.origin for entry in found)
        choices = " or ".join(entry.qualified for entry in found)
        raise AmbiguousPlugin(f"{kind.word} {name!r} is offered by {owners}; write {choices}")
    return found[0]


def build(kind: Kind, entry: Entry[T], options: Mapping[str, object]) -> T:
    """Make the config from the options and the object from the config.

    Raises:
        InvalidSpec: an option is unknown, missing or wrong.
        PluginError: the plugin raised anything but a `SpecdecError`, or built an incomplete object.
    """
    culprit = f"{kind.word} {entry.name!r}"
    with blaming(lambda error: _plugin_error(entry, f"{culprit} of {entry.origin}: {one_line(error)}")):
        return _built(kind, entry, options, culprit)


def _built(kind: Kind, entry: Entry[T], options: Mapping[str, object], culprit: str) -> T:
    """Build, and check what may depend on the config."""
    cls: Any = entry.cls  # has a Config: that was checked when it was registered
    built: T = cls(make_config(cls.Config, options, culprit))
    lacks = [attribute for attribute in kind.object_attributes if not hasattr(built, attribute)]
    if lacks:
        raise _plugin_error(entry, f"{culprit} of {entry.origin} lacks {', '.join(lacks)}")
    return built


def _plugin_error(entry: Entry[T], message: str) -> PluginError:
    """A `PluginError` that knows the plugin of `entry`."""
    return PluginError(
        message, distribution=entry.distribution, version=entry.version, entry_point=entry.plugin
    )


def _answers_to(entry: Entry[T], name: str) -> bool:
    """Whether `name`, with or without a distribution, means `entry`."""
    distribution, slash, short = name.rpartition("/")
    return entry.name == short and (not slash or normalised(entry.distribution) == normalised(distribution))


def _unknown(kind: Kind, entries: Sequence[Entry[T]], name: str, plugins: Sequence[PluginInfo]) -> str:
    """Everything that helps someone who asked for a name that is not there."""
    names = sorted({entry.name for entry in entries})
    match = nearest(name, [entry.qualified for entry in entries] if "/" in name else names)
    meant = f"did you mean {match!r}? " if match else ""
    parts = [*_offers(kind, name, plugins), f"known: {', '.join(names) or 'none'}"]
    for status, words in (("failed", "failed to load"), ("blocked", "left out")):
        if absent := [f"{p.label} ({p.error})" for p in plugins if p.status == status]:
            parts.append(f"{words}: {', '.join(absent)}")
    return f"no {kind.word} {name!r}; {meant}{'; '.join(parts)}"


def _offers(kind: Kind, name: str, plugins: Sequence[PluginInfo]) -> list[str]:
    """What a plugin offers whose entry point or distribution was taken for a drafter's name."""
    meant = [p for p in plugins if normalised(name) in (normalised(p.name), normalised(p.distribution))]
    offered = [*dict.fromkeys(one for p in meant for one in getattr(p, f"{kind.word}s"))]
    return [f"{name} is a plugin and offers: {', '.join(offered)}"] if offered else []
