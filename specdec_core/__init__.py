"""Pluggable, provably lossless speculative decoding for Hugging Face causal language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdec_core.contract.constraints import Constraint, Matcher
    from specdec_core.contract.distributions import TargetDistributions, top_token, top_tokens
    from specdec_core.contract.draft import HOLE, ROOT, Draft, DraftLaw, Verdict, on_device
    from specdec_core.contract.errors import (
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
    from specdec_core.contract.interfaces import (
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
    from specdec_core.contract.sampling_params import FinishReason, SamplingParams
    from specdec_core.drafting.row_drafter import RowDrafter, RowDrafterConfig
    from specdec_core.engine.decoder import SpecDecoder
    from specdec_core.engine.dropin import generate
    from specdec_core.engine.handles import Event, Handle, Request
    from specdec_core.engine.session import Session
    from specdec_core.model.graphs import Capture
    from specdec_core.plugins.hookspecs import PLUGIN_API_VERSION, hookimpl
    from specdec_core.plugins.registry import Registry
    from specdec_core.rows.results import GenerationResult, StreamChunk
    from specdec_core.rows.stats import Stats

# Where each public name lives. They are imported on first use: the command line's `--help` and the plugin
# registry must not wait for torch.
_HOMES = {
    "contract.constraints": "Constraint Matcher",
    "engine.decoder": "SpecDecoder",
    "contract.distributions": "TargetDistributions top_token top_tokens",
    "contract.draft": "HOLE ROOT Draft DraftLaw Verdict on_device",
    "engine.dropin": "generate",
    "engine.handles": "Event Handle Request",
    "engine.session": "Session",
    "contract.errors": (
        "AmbiguousPlugin ConstraintError DecoderBusy DraftContractViolation DrafterError IncompatiblePair "
        "InvalidParameter InvalidSpec PluginError SpecdecError UnknownPlugin UnsupportedModel UsageError "
        "VerifierError"
    ),
    "plugins.hookspecs": "PLUGIN_API_VERSION hookimpl",
    "contract.interfaces": (
        "Budget CachedModel Capabilities Context Drafter DrafterConfig Outcome RowRng Rows TargetInfo "
        "Verifier VerifierConfig"
    ),
    "model.graphs": "Capture",
    "plugins.registry": "Registry",
    "rows.results": "GenerationResult StreamChunk",
    "drafting.row_drafter": "RowDrafter RowDrafterConfig",
    "contract.sampling_params": "FinishReason SamplingParams",
    "rows.stats": "Stats",
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
    "Event",
    "FinishReason",
    "GenerationResult",
    "Handle",
    "IncompatiblePair",
    "InvalidParameter",
    "InvalidSpec",
    "Matcher",
    "Outcome",
    "PluginError",
    "Registry",
    "Request",
    "RowDrafter",
    "RowDrafterConfig",
    "RowRng",
    "Rows",
    "SamplingParams",
    "Session",
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
    if name == "grammar":  # a module, for who has the extra
        return import_module(f"{__name__}.sampling.grammar")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
