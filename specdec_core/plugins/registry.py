"""The plugins that are there, and the drafters and verifiers they offer by name.

Every plugin is loaded alone: one that fails is skipped with one line, and whatever it had registered is
dropped. Built-ins take the same way, from the entry points of the distribution `specdec-core`.

The name of a drafter or verifier is its class attribute `name`, nothing else. Where several distributions
use one name, `DISTRIBUTION/NAME` chooses. Environment: `SPECDEC_PLUGINS` lists the third-party plugins to
load (entry points or distributions; empty: none), `SPECDEC_STRICT_PLUGINS=1` raises instead of skipping.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from specdec_core.contract.blame import blaming, one_line
from specdec_core.contract.errors import InvalidParameter, PluginError, UnknownPlugin
from specdec_core.plugins.loading import (
    DRAFTER,
    VERIFIER,
    Contents,
    Loadable,
    installed_plugins,
    normalised,
    read_plugin,
)
from specdec_core.plugins.lookup import Entry, PluginInfo, Status, build, find
from specdec_core.plugins.spec_string import nearest

if TYPE_CHECKING:
    from specdec_core.contract.interfaces import Drafter, Verifier

BUILT_IN = "specdec-core"
"""The distribution whose plugins `SPECDEC_PLUGINS` does not concern."""
T = TypeVar("T")
__all__ = ["BUILT_IN", "Entry", "PluginInfo", "Registry"]


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


class Registry:
    """Plugins by entry point, drafters and verifiers by name. Starts empty; see `discover`."""

    def __init__(self) -> None:
        self._plugins: list[PluginInfo] = []
        self._drafters: list[Entry[Drafter]] = []
        self._verifiers: list[Entry[Verifier]] = []

    @classmethod
    def discover(
        cls,
        *,
        blocked: Iterable[str] = (),
        strict: bool | None = None,
        environ: Mapping[str, str] = os.environ,
        report: Callable[[str], None] = _to_stderr,
    ) -> Registry:
        """Load every installed plugin, each alone, in the order of distribution and entry point.

        Args:
            blocked: entry points or distributions to leave out, built-ins too (`--no-plugin NAME`).
            strict: raise at the first plugin that fails; None: as SPECDEC_STRICT_PLUGINS says.
            environ: where SPECDEC_PLUGINS and SPECDEC_STRICT_PLUGINS are read.
            report: takes the one line about a plugin that was skipped.

        Raises:
            UnknownPlugin: `blocked` names nothing that is installed.
            PluginError: with `strict`, chained to what the plugin raised.
        """
        if strict is None:
            strict = environ.get("SPECDEC_STRICT_PLUGINS", "") not in ("", "0")
        loadables = sorted(installed_plugins(), key=_order)
        choice = _Choice(blocked, environ.get("SPECDEC_PLUGINS"), loadables, report)
        registry = cls()
        for loadable in loadables:
            if refusal := choice.refusal(loadable):
                registry._note(loadable, "blocked", refusal)
            else:
                registry._try(loadable, strict, report)
        return registry

    def register(self, plugin: object, *, name: str | None = None) -> PluginInfo:
        """Register a plugin that is not installed: a module or object with hooks, in a test or notebook.

        Its `name` stands for the distribution too, so that `NAME/DRAFTER` works.

        Raises:
            InvalidParameter: a plugin or distribution of this name is there already.
            PluginError: the plugin is refused, or raised; the registry is as it was before.
        """
        name = name or getattr(plugin, "__name__", None) or type(plugin).__name__
        if any(normalised(name) in (normalised(p.name), normalised(p.distribution)) for p in self._plugins):
            raise InvalidParameter(f"a plugin named {name!r} is there already; give another name=")
        module = getattr(plugin, "__module__", None) or name
        self._load(Loadable(name, name, "", module, lambda: plugin))
        return self._plugins[-1]

    def plugins(self) -> list[PluginInfo]:
        """All plugins that were found, loaded or not."""
        return list(self._plugins)

    def drafters(self) -> list[Entry[Drafter]]:
        """All drafters, sorted by name; a name that two distributions use is there twice."""
        return sorted(self._drafters, key=lambda entry: (entry.name, entry.distribution))

    def verifiers(self) -> list[Entry[Verifier]]:
        """All verifiers, sorted by name; a name that two distributions use is there twice."""
        return sorted(self._verifiers, key=lambda entry: (entry.name, entry.distribution))

    def drafter(self, name: str) -> type[Drafter]:
        """The drafter class called `name` or `distribution/name`.

        Raises:
            UnknownPlugin: there is none; lists the nearest, the known and the plugins that failed.
            AmbiguousPlugin: several distributions use the name.
        """
        return find(DRAFTER, self._drafters, name, self._plugins).cls

    def verifier(self, name: str) -> type[Verifier]:
        """The verifier class called `name` or `distribution/name`; raises as `drafter` does."""
        return find(VERIFIER, self._verifiers, name, self._plugins).cls

    def build_drafter(self, name: str, options: Mapping[str, object] | None = None) -> Drafter:
        """Build a drafter: `cls(cls.Config(**options))`.

        Raises:
            UnknownPlugin, AmbiguousPlugin: as `drafter`.
            InvalidSpec: an option is unknown, missing or wrong.
            PluginError: the plugin raised anything but a `SpecdecError`, or built an incomplete object.
        """
        return build(DRAFTER, find(DRAFTER, self._drafters, name, self._plugins), options or {})

    def build_verifier(self, name: str, options: Mapping[str, object] | None = None) -> Verifier:
        """Build a verifier; raises as `build_drafter` does."""
        return build(VERIFIER, find(VERIFIER, self._verifiers, name, self._plugins), options or {})

    def _try(self, loadable: Loadable, strict: bool, report: Callable[[str], None]) -> None:
        """Load a plugin; where it fails, note and report that, or raise if `strict`."""
        try:
            self._load(loadable)
        except PluginError as error:
            if strict:
                raise
            self._note(loadable, "failed", one_line(error.__cause__ or error))
            report(f"specdec: skipped {error}")

    def _load(self, loadable: Loadable) -> None:
        """Import a plugin and take in what it registers: all of it or, with a `PluginError`, nothing."""
        # SystemExit too: a plugin must not end the program
        with blaming(partial(_failure, loadable), passing=_is_interrupt, catching=BaseException):
            contents = read_plugin(loadable.load(), loadable.name)
            drafters = _entries(loadable, contents.drafters, self._drafters)
            verifiers = _entries(loadable, contents.verifiers, self._verifiers)
        self._drafters += drafters
        self._verifiers += verifiers
        self._note(loadable, "loaded", contents=contents)

    def _note(
        self, loadable: Loadable, status: Status, error: str | None = None, contents: Contents | None = None
    ) -> None:
        """Add a plugin to the list of those that were found."""
        self._plugins.append(
            PluginInfo(
                name=loadable.name,
                distribution=loadable.distribution,
                version=loadable.version,
                origin=loadable.origin,
                status=status,
                error=error,
                drafters=tuple(contents.drafters) if contents else (),
                verifiers=tuple(contents.verifiers) if contents else (),
            )
        )


class _Choice:
    """Which of the installed plugins are wanted."""

    def __init__(
        self,
        blocked: Iterable[str],
        listed: str | None,
        loadables: Sequence[Loadable],
        report: Callable[[str], None],
    ) -> None:
        self.blocked = {normalised(name) for name in blocked}
        self.listed = (
            None if listed is None else {normalised(name.strip()) for name in listed.split(",")} - {""}
        )
        known = {name for loadable in loadables for name in _names(loadable)}
        if unknown := self.blocked - known:
            raise UnknownPlugin(f"cannot leave out {_not_installed(unknown, known)}")
        if unknown := (self.listed or set()) - known:
            report(f"specdec: SPECDEC_PLUGINS names {_not_installed(unknown, known)}")

    def refusal(self, loadable: Loadable) -> str | None:
        """Why a plugin is not to be loaded, if it is not."""
        if _names(loadable) & self.blocked:
            return "left out by name"
        if self.listed is None or normalised(loadable.distribution) == BUILT_IN:
            return None
        return None if _names(loadable) & self.listed else "not in SPECDEC_PLUGINS"


def _names(loadable: Loadable) -> set[str]:
    """What a user may call a plugin."""
    return {normalised(loadable.name), normalised(loadable.distribution)}


def _not_installed(unknown: Iterable[str], known: Iterable[str]) -> str:
    """Names without a plugin, and those that have one."""
    name, *_ = sorted(unknown)
    match = nearest(name, known)
    meant = f"did you mean {match!r}? " if match else ""
    return f"{name!r}, which is no plugin here; {meant}installed: {', '.join(sorted(known)) or 'none'}"


def _order(loadable: Loadable) -> tuple[str, str]:
    """Sorts plugins the same way on every machine."""
    return normalised(loadable.distribution), loadable.name


def _entries(loadable: Loadable, classes: Mapping[str, type[T]], known: Iterable[Entry[T]]) -> list[Entry[T]]:
    """The classes of one plugin, refused where another plugin of its distribution uses one of their names."""
    own = {entry.name: entry for entry in known if entry.distribution == loadable.distribution}
    for name, cls in classes.items():
        if name in own and own[name].cls is not cls:
            other = own[name].plugin
            raise PluginError(f"{name!r} is also in plugin {other!r} of this distribution; rename one")
    return [
        Entry(name, loadable.distribution, loadable.version, loadable.name, cls)
        for name, cls in classes.items()
    ]


def _is_interrupt(error: BaseException) -> bool:
    return isinstance(error, KeyboardInterrupt)


def _failure(loadable: Loadable, error: BaseException) -> PluginError:
    """What is said of a plugin that could not be loaded."""
    origin = f"{loadable.distribution} {loadable.version}".strip()
    return PluginError(
        f"plugin {loadable.name!r} of {origin}: {one_line(error)}",
        distribution=loadable.distribution,
        version=loadable.version,
        entry_point=loadable.name,
    )
