"""Options that several commands take, in groups: a command takes a dataclass, typer sees its fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from specdec_core.cli import options
from specdec_core.contract.sampling_params import SamplingParams


@dataclass(frozen=True)
class Model:
    """What is loaded, and how."""

    target: options.Target = None
    device: options.Device = "auto"
    dtype: options.Dtype = "auto"
    revision: options.Revision = None
    offline: options.Offline = False
    trust_remote_code: options.TrustRemoteCode = False
    optimize: options.Optimize = "auto"

    @property
    def loading(self) -> dict[str, Any]:
        """What `load_model` takes."""
        names = {field.name for field in fields(self)} - {"target", "optimize"}
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Drafting:
    """What proposes tokens, and what accepts them."""

    drafter: options.Drafter = "prompt_lookup"
    verifier: options.Verifier = "auto"
    draft_tokens: options.DraftTokens = "auto"
    no_plugin: options.NoPlugin = None


@dataclass(frozen=True)
class Sampling:
    """What is generated, by the names of `SamplingParams`."""

    max_new_tokens: options.MaxNewTokens = 128
    min_new_tokens: options.MinNewTokens = 0
    temperature: options.Temperature = 0.0
    top_k: options.TopK = 0
    top_p: options.TopP = 1.0
    min_p: options.MinP = 0.0
    repetition_penalty: options.RepetitionPenalty = 1.0
    presence_penalty: options.PresencePenalty = 0.0
    frequency_penalty: options.FrequencyPenalty = 0.0
    no_repeat_ngram_size: options.NoRepeatNgramSize = 0
    seed: options.Seed = None
    stop: options.Stop = None
    include_stop: options.IncludeStop = False
    ignore_eos: options.IgnoreEos = False

    def params(self, **more: Any) -> SamplingParams:
        """Check them; `more` are fields of `SamplingParams` too."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return SamplingParams(**{**given, "stop": tuple(self.stop or ()), **more})


@dataclass(frozen=True)
class ChatSampling(Sampling):
    """The same, with longer answers."""

    max_new_tokens: options.MaxNewTokens = 1024


@dataclass(frozen=True)
class Many:
    """Many prompts from a file."""

    input: options.Input = None
    output: options.Output = None
    max_batch: options.MaxBatch = None
    overwrite: options.Overwrite = False


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command to typer in which each group of options is replaced by its options."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += _options(groups[name]) if name in groups else [parameter]

    def flat(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    flat.__name__, flat.__doc__ = command.__name__, command.__doc__
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    flat.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return flat


def _options(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
