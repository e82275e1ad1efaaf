"""transformers' own generation: greedy and sampled, with prompt lookup, with an assistant model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from specdec_core.bench.methods import MethodSpec, Run
from specdec_core.bench.ours import settle
from specdec_core.bench.stand import Stand, device_of
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.model.attention import unwrap
from specdec_core.model.loading import load_model
from specdec_core.rows.stopping import eos_ids, model_eos_ids


class Reference:
    """`model.generate` on the same model, with the same options."""

    def __init__(self, spec: MethodSpec, stand: Stand) -> None:
        self.name, self._spec = spec.text, spec
        self._model: Any = unwrap(stand.plain)
        self._device = device_of(self._model)
        self._eos = model_eos_ids(self._model, stand.tokenizer)
        cache = getattr(self._model.generation_config, "cache_implementation", None)
        self._config = GenerationConfig(cache_implementation=cache)
        self._options: dict[str, Any] = {}
        if spec.drafter == "prompt_lookup":
            self._options["prompt_lookup_num_tokens"] = int(spec.options.get("num_tokens", "10"))
            if "max_ngram" in spec.options:
                self._options["max_matching_ngram_size"] = int(spec.options["max_ngram"])
        elif spec.drafter == "assistant":
            assistant = self._options["assistant_model"] = _assistant(
                spec, self._model, self._device, stand.loading
            )
            self._drafted = assistant.generation_config.num_assistant_tokens

    def renew(self) -> None:
        """transformers learns nothing from call to call, but for the schedule of an assistant."""
        assistant = self._options.get("assistant_model")
        if assistant is not None:
            assistant.generation_config.num_assistant_tokens = self._drafted

    def unfit(self, batch: int) -> str:
        """transformers speculates for one prompt at a time."""
        if self._spec.drafter != "hf" and batch > 1:
            return "transformers speculates for one prompt at a time"
        return ""

    def run(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Run:
        """Generate for left-padded prompts; the counts are read from the shapes of the target's forwards."""
        ends = eos_ids(params[0], self._eos)
        ids, mask = _padded(prompts, self._device)
        options = {**self._options, **_keywords(params[0], ends)}
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices), self._watched() as seen:
            if params[0].seed is not None:
                torch.manual_seed(params[0].seed)
            settle(self._device)
            began = seen.start()
            output: Tensor = self._model.generate(input_ids=ids, attention_mask=mask, **options)
            new = output[:, ids.shape[1] :].tolist()
            seconds = time.perf_counter() - began
        return _run(seconds, [_until_end(row, ends) for row in new], seen, ids.shape[1], self._device)

    @contextmanager
    def _watched(self) -> Iterator[_Seen]:
        """Watch the target, without the settings that come with it: what is not said would be filled in."""
        seen, own = _Seen(self._device), self._model.generation_config
        hooks = [
            self._model.register_forward_pre_hook(seen.before, with_kwargs=True),
            self._model.register_forward_hook(seen.after),
        ]
        self._model.generation_config = self._config
        try:
            yield seen
        finally:
            self._model.generation_config = own
            for hook in hooks:
                hook.remove()


class _Seen:
    """The target's forwards during a run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.widths: list[int] = []
        self.seconds: list[float] = []
        self.prompt_seconds = 0.0  # from the call on: what it prepares is the prompt's, too
        self._called = self._began = 0.0

    def start(self) -> float:
        """Note when the call begins."""
        self._called = time.perf_counter()
        return self._called

    def before(self, module: object, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        fed = keywords.get("input_ids", args[0] if args else None)
        fed = keywords.get("inputs_embeds") if fed is None else fed
        self.widths.append(1 if fed is None else fed.shape[1])
        self._began = time.perf_counter()

    def after(self, module: object, args: object, output: object) -> None:
        if not self.seconds:  # the prompt's; later ones are not waited for
            settle(self._device)
            self.prompt_seconds = time.perf_counter() - self._called
        self.seconds.append(time.perf_counter() - self._began)


def _run(seconds: float, token_ids: list[list[int]], seen: _Seen, prompt: int, device: torch.device) -> Run:
    """Put a run together; a batch takes part in every forward until its last row has ended."""
    forwards, rows = len(seen.widths), len(token_ids)
    later = seen.widths[1:]
    drafted = seen.widths[0] - prompt + sum(width - 1 for width in later)
    new = sum(map(len, token_ids))
    rounds = forwards if rows == 1 else new  # without drafts a row's rounds are its tokens
    timed = device.type != "cuda"  # there a forward returns before it is done
    return Run(
        seconds,
        token_ids,
        forwards,
        rounds=rounds,
        drafted=drafted,
        accepted=new - rounds if drafted else 0,
        widths={width: later.count(width) for width in sorted(set(later))},
        block_rows=rows * len(later),
        first_tokens=None if drafted else rows,
        prefill_seconds=seen.prompt_seconds,
        target_seconds=sum(seen.seconds[1:]) if timed else None,
    )


def _keywords(params: SamplingParams, ends: frozenset[int]) -> dict[str, Any]:
    sampling: dict[str, Any] = {"do_sample": False}
    if not params.greedy:
        sampling = {
            "do_sample": True,
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
            **({"min_p": params.min_p} if params.min_p else {}),
        }
    return {
        **sampling,
        "max_new_tokens": params.max_new_tokens,
        "repetition_penalty": params.repetition_penalty,
        "no_repeat_ngram_size": params.no_repeat_ngram_size,
        "num_beams": 1,
        "use_cache": True,
        "eos_token_id": sorted(ends) or None,
        "pad_token_id": min(ends, default=0),
        "return_dict_in_generate": False,
    }


def _padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad on the left: ids and mask, int64 [B, longest]."""
    width = max(map(len, prompts))
    ids = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def _until_end(tokens: list[int], ends: frozenset[int]) -> list[int]:
    """Leave out the padding behind a row's end."""
    for i, token in enumerate(tokens):
        if token in ends:
            return tokens[: i + 1]
    return tokens


def _assistant(spec: MethodSpec, target: Any, device: torch.device, loading: dict[str, Any]) -> Any:
    """Load an assistant in the target's dtype, and set how much it drafts."""
    dtype = str(target.dtype).removeprefix("torch.")
    model: Any = load_model(spec.options["model"], device=str(device), dtype=dtype, **loading)[0]
    if "num_tokens" in spec.options:
        model.generation_config.num_assistant_tokens = int(spec.options["num_tokens"])
    if "schedule" in spec.options:
        model.generation_config.num_assistant_tokens_schedule = spec.options["schedule"]
    return model
