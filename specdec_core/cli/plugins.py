"""`specdec plugins`: every plugin that is installed, and why one is not loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from specdec_core.cli.exits import Debug
from specdec_core.cli.loading import discover
from specdec_core.cli.options import Json
from specdec_core.cli.quiet import quiet
from specdec_core.cli.report import print_json
from specdec_core.cli.tables import print_list

if TYPE_CHECKING:
    from specdec_core.plugins.registry import PluginInfo


def plugins(as_json: Json = False, debug: Debug = False) -> None:
    """List the installed plugins, what each offers, and why one is not loaded."""
    with quiet(debug=debug) as out:
        found = discover().plugins()
    if as_json:
        print_json([asdict(plugin) for plugin in found], out)
        return
    columns = ("name", "distribution", "version", "status")
    rows = [[p.name, p.distribution, p.version, p.status] for p in found]
    print_list(columns, rows, [list(_notes(plugin)) for plugin in found])


def _notes(plugin: PluginInfo) -> Iterator[str]:
    """Say why a plugin is not loaded, what it registers and where it comes from."""
    if plugin.error:
        yield f"error: {plugin.error}"
    for kind, names in (("drafters", plugin.drafters), ("verifiers", plugin.verifiers)):
        if names:
            yield f"{kind}: {', '.join(names)}"
    yield f"origin: {plugin.origin}"
