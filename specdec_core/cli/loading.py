"""From options to plugins and to a decoder; what is wrong with a drafter shows before a target is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

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
    strict: bool,
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
