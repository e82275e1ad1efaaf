"""The command `specdec`. One file a command; nothing here imports torch before a command needs it."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process and exit with its code."""
    try:
        from specdec_core.cli.app import command

        command().main(prog_name="specdec")
    except KeyboardInterrupt:  # while the command line itself was being imported
        sys.exit(130)
