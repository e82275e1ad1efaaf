"""The commands, put together."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer
from typer.core import TyperGroup
from typer.main import get_group

from specdec_core.cli.bench import bench
from specdec_core.cli.chat import chat
from specdec_core.cli.compare import compare
from specdec_core.cli.exits import SpecdecGroup
from specdec_core.cli.models import models
from specdec_core.cli.new import new
from specdec_core.cli.parts import drafters, verifiers
from specdec_core.cli.plugins import plugins
from specdec_core.cli.run import run
from specdec_core.cli.theory import theory

app = typer.Typer(
    name="specdec",
    cls=SpecdecGroup,
    add_completion=False,
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(run)
app.command()(chat)
app.command()(bench)
app.command()(compare)
app.add_typer(drafters)
app.add_typer(verifiers)
app.command()(plugins)
app.add_typer(new)
app.command()(theory)
app.command()(models)


def command() -> TyperGroup:
    """Make the command that `specdec` runs."""
    return get_group(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specdec {metadata.version('specdec-core')}")
        raise typer.Exit


@app.callback()
def specdec(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Make a Hugging Face causal language model generate faster without changing what it says."""
    if context.invoked_subcommand is None:
        print(context.get_help())
