"""Every contract of a drafter and of a verifier, in the order in which they are tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec_core.plugins.registry import Registry
from specdec_core.plugins.spec_string import parse_drafters
from specdec_core.testing import (
    drafter_drafts,
    drafter_laws,
    drafter_outputs,
    drafter_rows,
    verifier_contracts,
)
from specdec_core.testing.contracts import Contract
from specdec_core.testing.drafter_kit import DrafterKit, Options
from specdec_core.testing.verifier_kit import VerifierKit

DRAFTER: tuple[Contract[DrafterKit], ...] = (
    *drafter_drafts.CONTRACTS.all,
    *drafter_laws.CONTRACTS.all,
    *drafter_rows.CONTRACTS.all,
    *drafter_outputs.CONTRACTS.all,
)
VERIFIER: tuple[Contract[VerifierKit], ...] = tuple(verifier_contracts.CONTRACTS.all)


def kit_of(
    kind: str, spec: str, *, options: Options | None = None, target: str | None = None
) -> tuple[DrafterKit | VerifierKit, Sequence[Contract[Any]]]:
    """The kit of a drafter or verifier that is installed, and its contracts.

    Raises:
        SpecdecError: nothing has this name, or an option is wrong.
    """
    registry = Registry.discover()
    if kind == "verifier":
        return VerifierKit(spec, registry), VERIFIER
    for parsed in parse_drafters(spec):
        registry.drafter(parsed.name)
    return DrafterKit(spec, registry, options=options, target=target), DRAFTER
