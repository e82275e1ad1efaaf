"""The hooks a plugin may implement. Mark an implementation with `hookimpl`.

A plugin is a module that an entry point of the group `specdec` names. Hooks fire once, when plugins are
discovered. A plugin that raises, in a hook or at import, is skipped whole with one line on stderr.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from specdec_core.contract.interfaces import Drafter, Verifier

PLUGIN_API_VERSION = 1
"""Major version of the plugin API. A module that sets `SPECDEC_API_VERSION` to another one is refused."""

hookspec = pluggy.HookspecMarker("specdec")
hookimpl = pluggy.HookimplMarker("specdec")


@hookspec
def specdec_register_drafters(register: Callable[[type[Drafter]], None]) -> None:
    """Call `register(cls)` for each drafter class the plugin offers.

    Fires once, when plugins are discovered; nothing is built yet. `register` raises `PluginError` for a
    class that lacks a part of the contract. If the hook raises, the whole plugin is skipped with one line
    on stderr, and nothing that it had registered stays.
    """


@hookspec
def specdec_register_verifiers(register: Callable[[type[Verifier]], None]) -> None:
    """Call `register(cls)` for each verifier class the plugin offers.

    Fires once, after `specdec_register_drafters` of the same plugin; nothing is built yet. A failure is
    treated as there: the whole plugin is skipped with one line on stderr, its drafters included.
    """
