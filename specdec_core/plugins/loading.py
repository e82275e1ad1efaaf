"""One plugin alone: find it among the installed distributions, check it, and collect what it registers.

Nothing here is kept: a plugin that fails half way has registered nothing. Imports no torch of its own.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import pluggy
from pydantic import BaseModel

from specdec_core.contract.errors import PluginError
from specdec_core.plugins import hookspecs
from specdec_core.plugins.spec_string import nearest

if TYPE_CHECKING:
    from specdec_core.contract.interfaces import Drafter, Verifier

GROUP = "specdec"
UNKNOWN = "unknown"
RESERVED_NAMES = ("auto",)
_NAME = re.compile(r"[a-z][a-z0-9_]*")
T = TypeVar("T")


@dataclass(frozen=True)
class Kind:
    """What the registry knows of a kind of part: its word, and what must be there."""

    word: str
    methods: tuple[str, ...]
    class_attributes: tuple[str, ...]
    object_attributes: tuple[str, ...]  # may depend on the config


DRAFTER = Kind(
    "drafter",
    ("bind", "admit", "propose", "observe", "release"),
    ("name", "Config"),
    ("config", "capabilities"),
)
VERIFIER = Kind(
    "verifier",
    ("verify",),
    ("name", "Config", "laws", "handles_trees", "lossless", "samples", "drafter_invariant", "preference"),
    ("config",),
)


@dataclass(frozen=True)
class Loadable:
    """A plugin that is there to be loaded, and where it comes from."""

    name: str
    distribution: str
    version: str
    target: str
    load: Callable[[], object]

    @property
    def origin(self) -> str:
        """The file of the module, or what the entry point names when that was not imported."""
        module = sys.modules.get(self.target.partition(":")[0])
        return getattr(module, "__file__", None) or self.target


@dataclass(frozen=True)
class Contents:
    """The classes that one plugin registered, by their names."""

    drafters: Mapping[str, type[Drafter]]
    verifiers: Mapping[str, type[Verifier]]


def normalised(distribution: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def installed_plugins() -> Iterator[Loadable]:
    """Every entry point of the group `specdec`, of the first on the path where a distribution is there twice.

    Distributions are read one by one, so that one with a broken entry_points.txt hides no other.
    """
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        name = _field(distribution, "Name")
        if normalised(name) not in seen or name == UNKNOWN:
            seen.add(normalised(name))
            yield from _loadables(distribution, name)


def _field(distribution: importlib.metadata.Distribution, name: str) -> str:
    """One field of a distribution's metadata, which may be missing or broken."""
    try:
        return distribution.metadata[name] or UNKNOWN
    except Exception:
        return UNKNOWN


def _loadables(distribution: importlib.metadata.Distribution, name: str) -> Iterator[Loadable]:
    """The plugins of one distribution, or one that fails where its entry points cannot be read."""
    version = _field(distribution, "Version")
    try:
        for point in distribution.entry_points.select(group=GROUP):
            yield Loadable(point.name, name, version, point.value, point.load)
    except Exception as error:
        if f"[{GROUP}]" in (distribution.read_text("entry_points.txt") or ""):
            yield Loadable("entry_points.txt", name, version, "entry_points.txt", _raiser(error))


def _raiser(error: Exception) -> Callable[[], object]:
    """A loader that only raises `error`."""

    def load() -> object:
        raise error

    return load


def read_plugin(plugin: object, name: str) -> Contents:
    """Check a plugin that was imported, and call its hooks.

    Raises:
        PluginError: another API version, an unknown or unmarked hook, wrong arguments, a class that lacks
            a part of the contract. Whatever the plugin's own hooks raise goes through.
    """
    _check_version(plugin)
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    _check_hooks(manager, plugin)
    _register_hooks(manager, plugin, name)
    drafters: _Collector[Drafter] = _Collector(DRAFTER)
    verifiers: _Collector[Verifier] = _Collector(VERIFIER)
    manager.hook.specdec_register_drafters(register=drafters)
    manager.hook.specdec_register_verifiers(register=verifiers)
    return Contents(dict(drafters.classes), dict(verifiers.classes))


class _Collector(Generic[T]):
    """What a hook is given as `register`: checks each class and keeps it."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.classes: dict[str, type[T]] = {}

    def __call__(self, cls: type[T]) -> None:
        name = _check_class(self.kind, cls)
        if self.classes.setdefault(name, cls) is not cls:
            raise PluginError(f"it registers two {self.kind.word}s named {name!r}; rename one")


def _check_version(plugin: object) -> None:
    """Refuse a plugin that was made for another major version of the plugin API."""
    home = sys.modules.get(getattr(plugin, "__module__", None) or "")
    declared = getattr(plugin, "SPECDEC_API_VERSION", getattr(home, "SPECDEC_API_VERSION", None))
    if declared is None:
        return
    if str(declared).partition(".")[0] != str(hookspecs.PLUGIN_API_VERSION):
        ours = hookspecs.PLUGIN_API_VERSION
        raise PluginError(
            f"it is built for version {declared} of the plugin API and this specdec has version {ours}; "
            f"install a release of it for version {ours}"
        )


def _check_hooks(manager: pluggy.PluginManager, plugin: object) -> None:
    """Refuse misspelt hooks, hooks without their mark, and plugins without any hook."""
    known = [name for name in dir(hookspecs) if manager.parse_hookspec_opts(hookspecs, name)]
    implemented = False
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is not None:
            implemented = True
            if not options["optionalhook"]:
                _check_hook_name(options["specname"] or attribute, known)
        elif attribute.startswith("specdec_") and _is_function(plugin, attribute):
            _check_hook_name(attribute, known)
            raise PluginError(f"{attribute} lacks its mark; put @hookimpl before it")
    if not implemented:
        raise PluginError(f"it implements no hook; there are: {', '.join(known)}")


def _is_function(plugin: object, attribute: str) -> bool:
    """Whether an attribute is a function or method; runs no property."""
    return inspect.isroutine(inspect.getattr_static(plugin, attribute))


def _check_hook_name(name: str, known: list[str]) -> None:
    """Refuse a hook that no spec knows, with the nearest that one does."""
    if name not in known:
        match = nearest(name, known)
        meant = f"did you mean {match}?" if match else f"there are: {', '.join(known)}"
        raise PluginError(f"{name} is no hook of specdec; {meant}")


def _register_hooks(manager: pluggy.PluginManager, plugin: object, name: str) -> None:
    """Give the plugin to pluggy, which checks the arguments of its hooks."""
    try:
        manager.register(plugin, name)
    except pluggy.PluginValidationError as error:
        raise PluginError(str(error)) from error


def _check_class(kind: Kind, cls: Any) -> str:
    """Check that a class has what its kind needs, and return its name."""
    if not isinstance(cls, type):
        raise PluginError(f"register takes a {kind.word} class, not {cls!r}")
    culprit = f"{kind.word} class {cls.__qualname__}"
    lacks = [name for name in kind.class_attributes if not hasattr(cls, name)]
    lacks += [f"{method}()" for method in kind.methods if not callable(getattr(cls, method, None))]
    if lacks:
        raise PluginError(f"{culprit} lacks {', '.join(lacks)}")
    name, config = getattr(cls, "name", None), getattr(cls, "Config", None)
    if not (isinstance(config, type) and issubclass(config, BaseModel)):
        raise PluginError(f"{culprit}: Config is no pydantic model but {config!r}")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name in RESERVED_NAMES:
        raise PluginError(f"{culprit} has name {name!r}, {_naming_rule(name)}")
    return name


def _naming_rule(name: object) -> str:
    """Why a name was refused."""
    return "which specdec keeps for itself" if name in RESERVED_NAMES else f"which must match {_NAME.pattern}"
