"""`generate`: takes what transformers' `model.generate` takes, and returns what it returns.

The keywords that change what is said are either honoured or refused by name; none is dropped in silence.
`docs/migration.md` lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specdec_core.contract.errors import InvalidParameter
from specdec_core.contract.interfaces import Drafter, Verifier
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.engine.decoder import SpecDecoder
from specdec_core.length.policy import DraftTokens
from specdec_core.rows.results import GenerationResult

Settings: TypeAlias = dict[str, Any]

# Values a keyword may have; any other asks for something that is not done here.
_ONLY: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "diversity_penalty": (None, 0),
    "constraints": (None,),
    "force_words_ids": (None,),
    "top_h": (None,),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "renormalize_logits": (None, False),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "remove_invalid_values": (None, False),
    "exponential_decay_length_penalty": (None,),
    "begin_suppress_tokens": (None,),
    "token_healing": (None, False),
    "guidance_scale": (None, 1, 1.0),
    "watermarking_config": (None,),
    "max_time": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "use_mtp": (None, False),
    "assistant_early_exit": (None,),
    "speculation_type": (None,),
}
# They choose how tokens are made, not which; here the drafter, the runtime and its cache do.
_WITHOUT_EFFECT = frozenset(
    "use_cache cache_implementation cache_config max_cache_len return_legacy_cache early_stopping "
    "length_penalty bos_token_id decoder_start_token_id is_assistant num_assistant_tokens "
    "num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind target_lookbehind "
    "assistant_ensemble_weight max_matching_ngram_size compile_config disable_compile "
    "continuous_batching_config low_memory prefill_chunk_size transformers_version".split()
)
_HONOURED = frozenset(
    "max_length max_new_tokens min_length min_new_tokens stop_strings do_sample temperature top_k top_p "
    "min_p repetition_penalty no_repeat_ngram_size bad_words_ids suppress_tokens sequence_bias "
    "num_return_sequences pad_token_id eos_token_id return_dict_in_generate prompt_lookup_num_tokens".split()
)
_NEW_TOKENS = 20  # where neither max_length nor max_new_tokens is set
_DEFAULTS: Settings = {
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.0,
}

_decoders: WeakKeyDictionary[nn.Module, dict[Any, SpecDecoder]] = WeakKeyDictionary()


def generate(
    model: nn.Module,
    inputs: Tensor | None = None,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: Sequence[Any] | None = None,
    streamer: Any | None = None,
    tokenizer: Any | None = None,
    drafter: str | Drafter | None = None,
    verifier: str | Verifier = "auto",
    draft_tokens: DraftTokens = "auto",
    assistant_model: nn.Module | None = None,
    seed: int | None = None,
    **keywords: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Generate as `model.generate(...)` does, speculatively.

    Args:
        inputs: int64 [B, L] prompt ids, left-padded where `attention_mask` is 0; `input_ids` is the same.
        drafter: None: `prompt_lookup`, or what `assistant_model` and `prompt_lookup_num_tokens` ask for.
        seed: of every prompt; None: fresh entropy (torch's global generator is neither read nor moved).
        keywords: those of GenerationConfig.

    Returns:
        int64 [B * num_return_sequences, L + new], right-padded; or, with `return_dict_in_generate`, a
        GenerateDecoderOnlyOutput with these `sequences`.

    Raises:
        InvalidParameter: a keyword is unknown, or asks for something that is not done here.
    """
    ids = input_ids if inputs is None else inputs
    if ids is None or ids.dim() != 2:
        raise InvalidParameter(
            "generate needs prompt ids of shape [batch, length] as `inputs` or `input_ids`"
        )
    settings = _settings(model, generation_config, keywords)
    prompts = _prompts(ids, attention_mask)
    drafter = _drafter(drafter, assistant_model, settings)
    decoder = _decoder(model, tokenizer, drafter, verifier, draft_tokens)
    params = [
        _params(settings, ids.shape[1], len(prompt), logits_processor, seed, model.config)
        for prompt in prompts
    ]
    if streamer is not None:
        results = _stream(decoder, ids, prompts, params, streamer)
    else:
        results = decoder.generate(prompts, params)
    sequences = _sequences(ids, results, params[0].n, _pad_id(settings))
    if settings.get("return_dict_in_generate"):
        return GenerateDecoderOnlyOutput(sequences=sequences)  # type: ignore[arg-type]
    return sequences


def _settings(model: Any, config: GenerationConfig | None, keywords: Settings) -> Settings:
    """Merge defaults, the model's own generation config, the one given and keywords; check every one."""
    known = _HONOURED | _WITHOUT_EFFECT | set(_ONLY)
    for name in keywords:
        if name not in known:
            raise InvalidParameter(f"generate has no keyword {name!r}; docs/migration.md lists what there is")
    settings = dict(_DEFAULTS)
    for source in (
        model.generation_config.to_dict(),
        config.to_dict() if config is not None else {},
        keywords,
    ):
        settings.update((name, value) for name, value in source.items() if value is not None)
    for name, allowed in _ONLY.items():
        value = settings.get(name)
        if value not in allowed:
            raise InvalidParameter(
                f"{name}={value!r} is not supported here; leave it out, or use model.generate"
            )
    return settings


def _prompts(ids: Tensor, mask: Tensor | None) -> list[list[int]]:
    if mask is None:
        return [list(row) for row in ids.tolist()]
    prompts = []
    for row, kept in zip(ids.tolist(), mask.tolist(), strict=True):
        start = kept.index(1) if 1 in kept else len(kept)
        if 0 in kept[start:]:
            raise InvalidParameter("attention_mask has zeros behind ones; prompts must be padded on the left")
        prompts.append(row[start:])
    return prompts


def _drafter(given: str | Drafter | None, assistant: nn.Module | None, settings: Settings) -> str | Drafter:
    lookup = settings.get("prompt_lookup_num_tokens")
    if given is not None:
        return given
    if assistant is not None:
        from specdec_core.engine.decoder import installed_plugins

        return installed_plugins().build_drafter("small_model", {"model": assistant})
    return "prompt_lookup" if lookup is None else f"prompt_lookup:num_tokens={lookup}"


def _decoder(
    model: nn.Module,
    tokenizer: Any,
    drafter: str | Drafter,
    verifier: str | Verifier,
    draft_tokens: DraftTokens,
) -> SpecDecoder:
    """Build a decoder, or take the one an earlier call with the same model and options built."""
    key = (drafter, verifier, draft_tokens, id(tokenizer))
    decoders = _decoders.setdefault(model, {})
    reusable = isinstance(drafter, str) and isinstance(verifier, str)
    if key not in decoders or not reusable:
        decoder = SpecDecoder(model, tokenizer, drafter=drafter, verifier=verifier, draft_tokens=draft_tokens)
        if not reusable:
            return decoder
        decoders[key] = decoder
    return decoders[key]


def _params(
    settings: Settings,
    padded: int,
    length: int,
    processors: Sequence[Any] | None,
    seed: int | None,
    config: Any,
) -> SamplingParams:
    cap = settings.get("max_new_tokens")
    if cap is None:
        cap = max(settings["max_length"] - padded, 0) if "max_length" in settings else _NEW_TOKENS
    least = settings.get("min_new_tokens")
    eos = settings.get("eos_token_id", getattr(config.get_text_config(decoder=True), "eos_token_id", None))
    never = [*(settings.get("bad_words_ids") or ()), *([t] for t in settings.get("suppress_tokens") or ())]
    stops = settings.get("stop_strings") or ()
    sampling: Settings = {}
    if settings.get("do_sample"):
        sampling = {
            name: settings[name] for name in ("temperature", "top_k", "top_p", "min_p") if name in settings
        }
    return SamplingParams(
        max_new_tokens=cap,
        min_new_tokens=max((settings.get("min_length") or 0) - padded, 0) if least is None else least,
        repetition_penalty=settings["repetition_penalty"],
        no_repeat_ngram_size=settings.get("no_repeat_ngram_size") or 0,
        bad_words_ids=tuple(map(tuple, never)),
        logit_bias=_token_bias(settings.get("sequence_bias")),
        logits_processors=tuple(processors or ()),
        eos_token_id=tuple(eos) if isinstance(eos, list | tuple) else eos,
        ignore_eos=eos is None,
        stop=stops if isinstance(stops, str) else tuple(stops),
        include_stop=True,
        n=settings.get("num_return_sequences") or 1,
        seed=seed,
        **sampling,
    )


def _token_bias(bias: Any) -> dict[int, float]:
    """Read a sequence_bias of single tokens.

    Raises:
        InvalidParameter: it holds a sequence of several tokens.
    """
    pairs = bias.items() if isinstance(bias, dict) else (bias or ())
    found = {}
    for sequence, value in pairs:
        if len(sequence) != 1:
            raise InvalidParameter(
                f"sequence_bias for {tuple(sequence)}: only single tokens are supported here"
            )
        found[int(sequence[0])] = float(value)
    return found


def _stream(
    decoder: SpecDecoder, ids: Tensor, prompts: list[list[int]], params: list[SamplingParams], streamer: Any
) -> list[GenerationResult]:
    """Feed a transformers streamer token by token, as transformers does."""
    if len(prompts) > 1 or params[0].n > 1:
        raise InvalidParameter("a streamer takes one prompt and num_return_sequences=1")
    streamer.put(ids.cpu())
    result: GenerationResult | None = None
    for chunk in decoder.stream(prompts[0], params[0]):
        for token in chunk.token_ids:
            streamer.put(torch.tensor([token]))
        result = chunk.result
    streamer.end()
    assert result is not None
    return [result]


def _pad_id(settings: Settings) -> int:
    pad, eos = settings.get("pad_token_id"), settings.get("eos_token_id")
    if pad is None:
        pad = eos[0] if isinstance(eos, list | tuple) else eos
    return 0 if pad is None else int(pad)


def _sequences(ids: Tensor, results: list[GenerationResult], samples: int, pad: int) -> Tensor:
    width = max((len(result.token_ids) for result in results), default=0)
    new = [result.token_ids + [pad] * (width - len(result.token_ids)) for result in results]
    tail = torch.tensor(new, dtype=ids.dtype, device=ids.device).reshape(len(results), width)
    return torch.cat([ids.repeat_interleave(samples, dim=0), tail], dim=1)
