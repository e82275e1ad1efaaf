"""`specdec new drafter NAME` and `specdec new verifier NAME`: a complete, tested plugin package."""

from __future__ import annotations

import keyword
import re
from importlib import metadata, resources
from pathlib import Path
from string import Template
from typing import Annotated

import typer

import specdec_core
from specdec_core.cli.exits import Debug
from specdec_core.cli.loading import discover
from specdec_core.cli.quiet import quiet
from specdec_core.contract.errors import UsageError
from specdec_core.plugins.hookspecs import PLUGIN_API_VERSION
from specdec_core.plugins.loading import RESERVED_NAMES, normalised

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="As on the command line: small letters, digits, _.")
]
Into = Annotated[Path, typer.Option("--into", metavar="FOLDER", help="Where the package's folder is made.")]

new = typer.Typer(name="new", no_args_is_help=True, help="Write a plugin package: a drafter or a verifier.")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@new.command()
def drafter(name: Name, into: Into = Path(), debug: Debug = False) -> None:
    """Write the package of a drafter, which passes its own tests and the conformance kit as it is."""
    _new("drafter", name, into, debug)


@new.command()
def verifier(name: Name, into: Into = Path(), debug: Debug = False) -> None:
    """Write the package of a verifier, which passes its own tests and the conformance kit as it is."""
    _new("verifier", name, into, debug)


def _new(kind: str, name: str, into: Path, debug: bool) -> None:
    _check_name(kind, name)
    distribution = f"specdec-{name.replace('_', '-')}"
    with quiet(debug=debug):
        _check_free(kind, name, distribution)
    folder = into / distribution
    _write(folder, _files(kind, name, distribution))
    print(f"{folder}: a package with the {kind} {name!r}. Next:")
    print(f"  pip install -e '{folder}[test]'")
    print(f"  cd {folder} && pytest")
    example = "" if kind == "drafter" else " --temperature 0.8"
    print(f"  specdec run --{kind} {name}{example} -p 'Once upon a time'")


def _check_name(kind: str, name: str) -> None:
    """Refuse what cannot be a name on the command line and a module's.

    Raises:
        UsageError: names the rule, and a name that would do.
    """
    if _NAME.fullmatch(name) and not keyword.iskeyword(name) and name not in RESERVED_NAMES:
        return
    if name in RESERVED_NAMES:
        raise UsageError(f"{kind} name {name!r} is kept by specdec for itself; choose another")
    if keyword.iskeyword(name):
        raise UsageError(f"{kind} name {name!r} is a word of Python; choose another, such as {name}_{kind}")
    would_do = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_").lstrip("0123456789_")
    meant = f"; {would_do!r} would do" if would_do else ""
    raise UsageError(
        f"{kind} name {name!r} is not allowed: small letters, digits and _, a letter first{meant}"
    )


def _check_free(kind: str, name: str, distribution: str) -> None:
    """Refuse a name that another distribution uses: it would then need DISTRIBUTION/NAME.

    Raises:
        UsageError: names the other distribution.
    """
    registry = discover()
    for entry in registry.drafters() if kind == "drafter" else registry.verifiers():
        if entry.name == name and normalised(entry.distribution) != distribution:
            raise UsageError(
                f"{kind} name {name!r} is used by {entry.origin}; choose another, or leave that one out"
            )


def _files(kind: str, name: str, distribution: str) -> dict[str, str]:
    """Make the package's files: path -> text."""
    module = f"specdec_{name}"
    values = {
        "kind": kind,
        "name": name,
        "distribution": distribution,
        "entry_point": name.replace("_", "-"),
        "module": module,
        "class_name": _class_name(kind, name),
        "version": metadata.version("specdec-core"),
        "api_version": str(PLUGIN_API_VERSION),
    }
    sources = {
        "pyproject.toml": "both/pyproject.toml.txt",
        ".gitignore": "both/gitignore.txt",
        "README.md": f"{kind}/README.md.txt",
        f"{module}.py": f"{kind}/module.py.txt",
        f"tests/test_{name}.py": f"{kind}/test.py.txt",
    }
    folder = resources.files("specdec_core.cli") / "templates"
    return {
        path: Template((folder / source).read_text(encoding="utf-8")).substitute(values)
        for path, source in sources.items()
    }


def _class_name(kind: str, name: str) -> str:
    """The name in capitals; a name that the module imports gets the kind behind it."""
    capitals = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    imported = {*specdec_core.__all__, "Tensor", "Field", "Callable", "Sequence", "Certain"}
    return capitals + kind.title() if capitals in imported else capitals


def _write(folder: Path, files: dict[str, str]) -> None:
    """Write the files into a folder that is not there yet.

    Raises:
        UsageError: it is there, or cannot be made.
    """
    try:
        folder.mkdir()
        for path, text in files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except FileExistsError:
        raise UsageError(
            f"{folder} is there already; remove it, choose another name, or name another --into FOLDER"
        ) from None
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written: {error.strerror}; name another --into FOLDER"
        ) from error
