"""Pluggable, provably lossless speculative decoding for Hugging Face causal language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec_core.constraints import Constraint, Matcher
    from specdec_core.decoder import SpecDecoder
    from specdec_core.distributions import TargetDistributions
    from specdec_core.draft import HOLE, ROOT, Draft, DraftLaw, Verdict
    from specdec_core.dropin import generate
    from specdec_core.errors import (
        AmbiguousPlugin,
        ConstraintError,
        DecoderBusy,
        DraftContractViolation,
        DrafterError,
        IncompatiblePair,
        InvalidParameter,
        InvalidSpec,
        PluginError,
        SpecdecError,
        UnknownPlugin,
        UnsupportedModel,
        UsageError,
        VerifierError,
    )
    from specdec_core.hookspecs import PLUGIN_API_VERSION, hookimpl
    from specdec_core.interfaces import (
        Budget,
        CachedModel,
        Capabilities,
        Context,
        Drafter,
        DrafterConfig,
        Outcome,
        RowRng,
        Rows,
        TargetInfo,
        Verifier,
        VerifierConfig,
    )
    from specdec_core.largest import top_token, top_tokens
    from specdec_core.model.graphs import Capture
    from specdec_core.registry import Registry
    from specdec_core.results import GenerationResult, StreamChunk
    from specdec_core.row_drafter import RowDrafter, RowDrafterConfig
    from specdec_core.sampling_params import FinishReason, SamplingParams
    from specdec_core.stats import Stats
    from specdec_core.transfer import on_device

# Where each public name lives. They are imported on first use: the command line's `--help` and the plugin
# registry must not wait for torch.
_HOMES = {
    "constraints": "Constraint Matcher",
    "decoder": "SpecDecoder",
    "distributions": "TargetDistributions",
    "draft": "HOLE ROOT Draft DraftLaw Verdict",
    "dropin": "generate",
    "errors": (
        "AmbiguousPlugin ConstraintError DecoderBusy DraftContractViolation DrafterError IncompatiblePair "
        "InvalidParameter InvalidSpec PluginError SpecdecError UnknownPlugin UnsupportedModel UsageError "
        "VerifierError"
    ),
    "hookspecs": "PLUGIN_API_VERSION hookimpl",
    "interfaces": (
        "Budget CachedModel Capabilities Context Drafter DrafterConfig Outcome RowRng Rows TargetInfo "
        "Verifier VerifierConfig"
    ),
    "largest": "top_token top_tokens",
    "model.graphs": "Capture",
    "registry": "Registry",
    "results": "GenerationResult StreamChunk",
    "row_drafter": "RowDrafter RowDrafterConfig",
    "sampling_params": "FinishReason SamplingParams",
    "stats": "Stats",
    "transfer": "on_device",
}
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "HOLE",
    "PLUGIN_API_VERSION",
    "ROOT",
    "AmbiguousPlugin",
    "Budget",
    "CachedModel",
    "Capabilities",
    "Capture",
    "Constraint",
    "ConstraintError",
    "Context",
    "DecoderBusy",
    "Draft",
    "DraftContractViolation",
    "DraftLaw",
    "Drafter",
    "DrafterConfig",
    "DrafterError",
    "FinishReason",
    "GenerationResult",
    "IncompatiblePair",
    "InvalidParameter",
    "InvalidSpec",
    "Matcher",
    "Outcome",
    "PluginError",
    "Registry",
    "RowDrafter",
    "RowDrafterConfig",
    "RowRng",
    "Rows",
    "SamplingParams",
    "SpecDecoder",
    "SpecdecError",
    "Stats",
    "StreamChunk",
    "TargetDistributions",
    "TargetInfo",
    "UnknownPlugin",
    "UnsupportedModel",
    "UsageError",
    "Verdict",
    "Verifier",
    "VerifierConfig",
    "VerifierError",
    "generate",
    "hookimpl",
    "on_device",
    "top_token",
    "top_tokens",
]


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
