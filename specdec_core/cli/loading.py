"""From options to plugins and to a decoder; what is wrong with a drafter shows before a target is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from specdec_core.cli.quiet import silent_transformers

if TYPE_CHECKING:
    from specdec_core.decoder import SpecDecoder
    from specdec_core.interfaces import Verifier
    from specdec_core.registry import Registry
    from specdec_core.sampling_params import SamplingParams


def discover(blocked: Iterable[str] = ()) -> Registry:
    """Load the installed plugins, but for those left out by name."""
    from specdec_core.registry import Registry

    return Registry.discover(blocked=blocked)


def load_decoder(
    target: str,
    drafter: str,
    verifier: str,
    params: SamplingParams,
    *,
    draft_tokens: int | None,
    registry: Registry,
    debug: bool,
    **loading: Any,
) -> SpecDecoder:
    """Build the drafter and the verifier, then load the target; `loading` is for `from_pretrained`."""
    with nullcontext() if debug else silent_transformers():
        from specdec_core.choice import build_drafter
        from specdec_core.decoder import SpecDecoder

        drafting = build_drafter(drafter, registry)
        verifying = _checked_verifier(verifier, drafting, params, registry)
        return SpecDecoder.from_pretrained(
            target,
            drafter=drafting,
            verifier=verifying,
            draft_tokens=draft_tokens,
            registry=registry,
            strict=debug,
            max_batch=1,
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
