"""From options to plugins and to a decoder; what is wrong with a drafter shows before a target is loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from specdec_core.cli import options
from specdec_core.cli.quiet import quiet, silent_transformers
from specdec_core.cli.structure import Later
from specdec_core.plugins.spec_string import parse_drafters

if TYPE_CHECKING:
    from specdec_core.cli.groups import Drafting, Model
    from specdec_core.contract.interfaces import Verifier
    from specdec_core.contract.sampling_params import SamplingParams
    from specdec_core.engine.decoder import SpecDecoder
    from specdec_core.plugins.registry import Registry

_DEMO = "specdec: no --target: the demo model runs, which knows little; --target ID_OR_PATH names a real one"

_EARNED = 32  # tokens that packing weights takes to pay for itself, whatever the size of the model


def discover(blocked: Iterable[str] = ()) -> Registry:
    """Load the installed plugins, but for those left out by name."""
    from specdec_core.plugins.registry import Registry

    return Registry.discover(blocked=blocked)


def say_if_demo(model: Model) -> None:
    """Tell, where no target is named, which it is."""
    if not model.target:
        print(_DEMO, file=sys.stderr)


@contextmanager
def opened(
    model: Model,
    drafting: Drafting,
    params: SamplingParams,
    *,
    debug: bool,
    max_batch: int = 1,
    tokens: int | None = None,
) -> Iterator[tuple[SpecDecoder, TextIO]]:
    """Give a decoder, and the real stdout, which libraries do not write to meanwhile.

    tokens: most tokens that it will generate; None: any number.
    """
    optimize = model.optimize
    if optimize == "auto" and tokens is not None and tokens < _EARNED:
        optimize = "none"
    depth = options.depth_of(drafting.draft_tokens)
    target = options.named_target(model.target)
    parse_drafters(drafting.drafter)  # what is no text of one at all shows before anything is imported
    with quiet(offline=model.offline, debug=debug) as out:
        parts = _parts(drafting, params, discover(drafting.no_plugin or ()))
        with silent_transformers(debug=debug):
            from specdec_core.engine.decoder import SpecDecoder

            decoder = SpecDecoder.from_pretrained(
                target,
                draft_tokens=depth,
                strict=debug,
                max_batch=max_batch,
                optimize=optimize,
                **parts,
                **model.loading,
            )
            if isinstance(params.constraint, Later):
                params.constraint.bind(decoder.tokenizer)
            say_if_demo(model)
            yield decoder, out


def _parts(drafting: Drafting, params: SamplingParams, registry: Registry) -> dict[str, Any]:
    """Build the drafter and the verifier: a wrong name shows before transformers is imported."""
    from specdec_core.plugins.choice import build_drafter

    drafter = build_drafter(drafting.drafter, registry)
    verifier = _checked_verifier(drafting.verifier, drafter, params, registry)
    return {"drafter": drafter, "verifier": verifier, "registry": registry}


def _checked_verifier(
    verifier: str, drafter: Any, params: SamplingParams, registry: Registry
) -> str | Verifier:
    """Build a verifier that was named and check that it fits; leave "auto" to the decoder."""
    from specdec_core.plugins.choice import build_verifiers, check_pair, check_params

    if verifier == "auto":
        return verifier
    (built,) = build_verifiers(verifier, registry)
    check_pair(built, drafter.name, drafter.capabilities)
    check_params(built, [params])
    return built
