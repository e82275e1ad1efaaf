"""From options to plugins and to a decoder; what is wrong with a drafter shows before a target is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from specdec_core.cli import options
from specdec_core.cli.quiet import quiet, silent_transformers
from specdec_core.cli.structure import Later

if TYPE_CHECKING:
    from specdec_core.cli.groups import Drafting, Model
    from specdec_core.decoder import SpecDecoder
    from specdec_core.interfaces import Verifier
    from specdec_core.registry import Registry
    from specdec_core.sampling_params import SamplingParams


def discover(blocked: Iterable[str] = ()) -> Registry:
    """Load the installed plugins, but for those left out by name."""
    from specdec_core.registry import Registry

    return Registry.discover(blocked=blocked)


@contextmanager
def opened(
    model: Model, drafting: Drafting, params: SamplingParams, *, debug: bool, max_batch: int = 1
) -> Iterator[tuple[SpecDecoder, TextIO]]:
    """Give a decoder, and the real stdout, which libraries do not write to meanwhile."""
    depth = options.depth_of(drafting.draft_tokens)
    target = options.named_target(model.target)
    with quiet(offline=model.offline, debug=debug) as out, silent_transformers(debug=debug):
        decoder = load_decoder(
            target,
            drafting.drafter,
            drafting.verifier,
            params,
            draft_tokens=depth,
            registry=discover(drafting.no_plugin or ()),
            strict=debug,
            max_batch=max_batch,
            **model.loading,
        )
        if isinstance(params.constraint, Later):
            params.constraint.bind(decoder.tokenizer)
        yield decoder, out


def load_decoder(
    target: str,
    drafter: str,
    verifier: str,
    params: SamplingParams,
    *,
    draft_tokens: int | None,
    registry: Registry,
    strict: bool,
    max_batch: int = 1,
    **loading: Any,
) -> SpecDecoder:
    """Build the drafter and the verifier, then load the target; `loading` is for `from_pretrained`."""
    from specdec_core.choice import build_drafter
    from specdec_core.decoder import SpecDecoder

    drafting = build_drafter(drafter, registry)
    return SpecDecoder.from_pretrained(
        target,
        drafter=drafting,
        verifier=_checked_verifier(verifier, drafting, params, registry),
        draft_tokens=draft_tokens,
        registry=registry,
        strict=strict,
        max_batch=max_batch,
        **loading,
    )


def _checked_verifier(
    verifier: str, drafter: Any, params: SamplingParams, registry: Registry
) -> str | Verifier:
    """Build a verifier that was named and check that it fits; leave "auto" to the decoder."""
    from specdec_core.choice import build_verifiers, check_pair, check_params

    if verifier == "auto":
        return verifier
    (built,) = build_verifiers(verifier, registry)
    check_pair(built, drafter.name, drafter.capabilities)
    check_params(built, [params])
    return built
