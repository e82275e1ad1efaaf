"""Which drafter and verifier: from their texts, and by their declared capabilities only."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

from specdec_core.contract.errors import IncompatiblePair, InvalidParameter, SpecdecError
from specdec_core.contract.interfaces import Capabilities, Drafter, Verifier
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.drafting.combination import Combination
from specdec_core.plugins.registry import Registry
from specdec_core.plugins.spec_string import parse_drafters, parse_verifier


def build_drafter(drafter: str | Drafter, registry: Registry) -> Drafter:
    """Build a drafter from its text, `name:option=value,...`; several names make a `Combination`.

    Raises:
        UsageError: the name, an option or a value is wrong.
    """
    if not isinstance(drafter, str):
        return drafter
    specs = parse_drafters(drafter)
    members = [registry.build_drafter(spec.name, spec.options) for spec in specs]
    return members[0] if len(members) == 1 else Combination(members)


_decoders: WeakValueDictionary[int, object] = WeakValueDictionary()  # id of a drafter -> whom it serves


def claim(drafter: Drafter, decoder: object) -> None:
    """Remember whom a drafter, and each member of a combination, serves."""
    _decoders.update((id(part), decoder) for part in _parts(drafter))


def check_unclaimed(drafter: Drafter) -> None:
    """Refuse a drafter that serves another decoder: it keeps the state of that one's rows.

    Raises:
        InvalidParameter: it does.
    """
    if any(id(part) in _decoders for part in _parts(drafter)):
        gc.collect()  # one that nobody uses any more may still be in memory
    for part in _parts(drafter):
        if id(part) in _decoders:
            raise InvalidParameter(
                f"this drafter {part.name!r} already serves another decoder; make a new one for each, or "
                "give its text, such as drafter='prompt_lookup'"
            )


def _parts(drafter: Drafter) -> list[Drafter]:
    return [drafter, *drafter.members] if isinstance(drafter, Combination) else [drafter]


def build_verifiers(verifier: str | Verifier, registry: Registry) -> list[Verifier]:
    """Build a verifier from its text, or for "auto" every one there is.

    Raises:
        UsageError: the name, an option or a value is wrong.
    """
    if not isinstance(verifier, str):
        return [verifier]
    if verifier == "auto":
        return _all_verifiers(registry)
    spec = parse_verifier(verifier)
    return [registry.build_verifier(spec.name, spec.options)]


def _all_verifiers(registry: Registry) -> list[Verifier]:
    """Build every verifier that needs no options; one that cannot be built is simply not chosen."""
    built = []
    for entry in registry.verifiers():
        with suppress(SpecdecError):
            built.append(registry.build_verifier(entry.qualified))
    return built


def misfit(verifier: Verifier, drafter: str, can: Capabilities) -> str:
    """Say why a verifier cannot judge a drafter's drafts; empty if it can."""
    unknown = sorted(law.name for law in can.laws - verifier.laws)
    if unknown:
        known = ", ".join(sorted(law.name for law in verifier.laws))
        return (
            f"verifier {verifier.name!r} treats {known}, but drafter {drafter!r} drafts {', '.join(unknown)}"
        )
    if can.makes_trees and not verifier.handles_trees:
        return f"verifier {verifier.name!r} judges chains, but drafter {drafter!r} drafts trees"
    return ""


def check_pair(verifier: Verifier, drafter: str, can: Capabilities) -> None:
    """Refuse a pair that does not fit.

    Raises:
        IncompatiblePair: names both sides.
    """
    reason = misfit(verifier, drafter, can)
    if reason:
        raise IncompatiblePair(f"{reason}; use --verifier auto, or another drafter option")


def check_params(verifier: Verifier, params: Sequence[SamplingParams]) -> None:
    """Refuse rows that a verifier cannot treat.

    Raises:
        InvalidParameter: a row has a temperature above 0 and the verifier does not sample.
    """
    for row in params:
        if not row.greedy and not verifier.samples:
            raise InvalidParameter(
                f"temperature={row.temperature} needs a verifier that samples, and {verifier.name!r} is "
                "greedy only; use --verifier auto, or temperature 0"
            )


def choose(
    verifiers: Sequence[Verifier], drafter: str, can: Capabilities, params: Sequence[SamplingParams]
) -> Verifier:
    """Take the most preferred lossless verifier that fits laws, shape and temperature (`auto`).

    A row with a seed is promised one text whatever drafts, and a draft without a q loses nothing by it: both
    narrow the choice to drafter-invariant verifiers.

    Raises:
        IncompatiblePair: no verifier fits.
    """
    fits = [v for v in verifiers if v.lossless and not misfit(v, drafter, can)]
    if any(not row.greedy for row in params):
        fits = [v for v in fits if v.samples]
    seeded = any(row.seed is not None for row in params)
    if seeded or not any(law.needs_q for law in can.laws):
        fits = [v for v in fits if v.drafter_invariant] or fits
    if not fits:
        laws = ", ".join(sorted(law.name for law in can.laws))
        shape = "trees" if can.makes_trees else "chains"
        raise IncompatiblePair(f"no verifier treats the {shape} of drafter {drafter!r} ({laws})")
    return max(fits, key=lambda v: v.preference)
