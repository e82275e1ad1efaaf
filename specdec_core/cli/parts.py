"""`specdec drafters` and `specdec verifiers`: what there is, and the options of one."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_core.cli.exits import Debug
from specdec_core.cli.fields import describe_fields
from specdec_core.cli.loading import discover
from specdec_core.cli.options import Json
from specdec_core.cli.quiet import quiet
from specdec_core.cli.report import print_json
from specdec_core.cli.tables import print_list, print_table, print_text
from specdec_core.contract.errors import SpecdecError

if TYPE_CHECKING:
    from specdec_core.plugins.registry import Entry, Registry

Name = Annotated[str, typer.Argument(metavar="NAME", help="As in the list, or DISTRIBUTION/NAME.")]


@dataclass(frozen=True)
class _Kind:
    """What differs between drafters and verifiers."""

    word: str
    entries: Callable[[Registry], Sequence[Entry[Any]]]
    find: Callable[[Registry, str], type]
    facts: Callable[[Entry[Any], Registry], dict[str, Any]]
    columns: tuple[str, ...]


def _drafter_facts(entry: Entry[Any], registry: Registry) -> dict[str, Any]:
    """Give laws, shape and depth with default options; null where they depend on options without one."""
    can: Any = getattr(entry.cls, "capabilities", None)
    with suppress(SpecdecError):
        can = registry.build_drafter(entry.qualified).capabilities
    if not hasattr(can, "laws"):
        return {"laws": None, "shape": None, "depth": None}
    shape = "trees" if can.makes_trees else "chains"
    return {"laws": _names(can.laws), "shape": shape, "depth": can.max_depth}


def _verifier_facts(entry: Entry[Any], registry: Registry) -> dict[str, Any]:
    cls = entry.cls
    return {
        "laws": _names(cls.laws),
        "shape": "trees" if cls.handles_trees else "chains",
        "samples": cls.samples,
        "lossless": cls.lossless,
        "preference": cls.preference,
    }


_DRAFTERS = _Kind(
    "drafter",
    lambda registry: registry.drafters(),
    lambda registry, name: registry.drafter(name),
    _drafter_facts,
    ("name", "distribution", "shape", "laws"),
)
_VERIFIERS = _Kind(
    "verifier",
    lambda registry: registry.verifiers(),
    lambda registry, name: registry.verifier(name),
    _verifier_facts,
    ("name", "distribution", "shape", "samples", "lossless", "laws"),
)


def _group(kind: _Kind, summary: str) -> typer.Typer:
    """Make the command group of a kind: the list itself, and `show`."""
    group = typer.Typer(name=f"{kind.word}s", invoke_without_command=True, help=summary)

    @group.callback()
    def listed(context: typer.Context, as_json: Json = False, debug: Debug = False) -> None:
        if context.invoked_subcommand is None:
            with quiet(debug=debug) as out:
                registry = discover()
                rows = [_row(kind, entry, registry) for entry in kind.entries(registry)]
            if as_json:
                print_json(rows, out)
            else:
                cells = [[_listed(row, name) for name in kind.columns] for row in rows]
                print_list(kind.columns, cells, [[row["description"]] for row in rows])

    @group.command(help=f"Describe one {kind.word} and its options.")
    def show(name: Name, as_json: Json = False, debug: Debug = False) -> None:
        with quiet(debug=debug) as out:
            registry = discover()
            cls = kind.find(registry, name)
            entry = next(entry for entry in kind.entries(registry) if entry.cls is cls)
            row = _row(kind, entry, registry)
            row |= {"description": _doc(cls), "options": describe_fields(entry.cls.Config)}
        if as_json:
            print_json(row, out)
        else:
            _print_one(kind, row)

    return group


def _row(kind: _Kind, entry: Entry[Any], registry: Registry) -> dict[str, Any]:
    own = {"name": entry.name, "distribution": entry.distribution, "version": entry.version}
    first_line = _doc(entry.cls).partition("\n\n")[0]
    return {**own, **kind.facts(entry, registry), "description": " ".join(first_line.split())}


def _listed(row: dict[str, Any], column: str) -> str:
    """Give a cell of the list, where all laws but one are a long text."""
    if column != "laws" or row["laws"] is None:
        return _cell(row[column])
    from specdec_core.contract.draft import DraftLaw

    others = [law.name for law in DraftLaw if law.name not in row["laws"]]
    if len(others) > 1:
        return _cell(row["laws"])
    return f"all but {others[0]}" if others else "all"


def _print_one(kind: _Kind, row: dict[str, Any]) -> None:
    laws = _cell(row["laws"])
    facts = [f"laws: {laws}", f"shape: {_cell(row['shape'])}"]
    facts += [f"{name}: {_cell(row[name])}" for name in ("depth", "samples", "lossless") if name in row]
    print(f"{row['name']}: {kind.word} of {row['distribution']} {row['version']}")
    print_text("; ".join(facts))
    print()
    print_text(row["description"] or "It has no description.")
    print()
    options = row["options"]
    if not options:
        print("It takes no options.")
        return
    print(f"Options, as --{kind.word} {row['name']}:OPTION=VALUE,OPTION=VALUE\n")
    columns = ("option", "type", "default", "description")
    print_table(columns, [_option(option) for option in options])


def _doc(cls: type) -> str:
    """Give a class's own docstring; a base's would describe something else."""
    return inspect.cleandoc(cls.__doc__ or "")


def _option(option: dict[str, Any]) -> list[str]:
    default = option["default"]
    shown = default if isinstance(default, str) else json.dumps(default)
    shown = {"null": "none"}.get(shown, shown)
    return [
        option["option"],
        option["type"],
        "required" if option["required"] else shown,
        option["description"],
    ]


def _names(laws: Iterable[Any]) -> list[str]:
    return [law.name for law in sorted(laws)]


def _cell(value: Any) -> str:
    if value is None:
        return "by options"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else str(value)


drafters = _group(_DRAFTERS, "List the drafters there are; `show NAME` describes one.")
verifiers = _group(_VERIFIERS, "List the verifiers there are; `show NAME` describes one.")
