"""Plain decoding, one token at a time and without any cache: what every drafter and verifier must equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec_core.contract.rng import KeyedRng, Purpose
from specdec_core.contract.sampling_params import SamplingParams


@torch.no_grad()
def next_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """Logits after these tokens, [V], by a plain causal pass without any cache."""
    at = torch.tensor([list(tokens)], device=model.device)
    logits: Tensor = model(input_ids=at, use_cache=False).logits[0, -1]
    return logits.float()


_SAID: WeakKeyDictionary[Any, dict[tuple[int, ...], list[int]]] = WeakKeyDictionary()
_DRAWN: WeakKeyDictionary[Any, dict[str, list[int]]] = WeakKeyDictionary()


def base(model: Any, prompt: Sequence[int], n: int, eos: Iterable[int] = ()) -> list[int]:
    """Plain greedy ids, one token at a time, up to and with the first EOS."""
    said = _SAID.setdefault(model, {}).setdefault(tuple(prompt), [])
    while len(said) < n:
        said.append(int(next_logits(model, [*prompt, *said]).argmax()))
    ends = [i for i, token in enumerate(said[:n]) if token in set(eos)]
    return said[: ends[0] + 1] if ends else said[:n]


def warped(scores: Tensor, params: SamplingParams) -> Tensor:
    """Scores of one row as transformers' own warpers leave them: [k, V] -> [k, V]."""
    none: Any = torch.zeros((scores.shape[0], 1), dtype=torch.int64)
    if params.greedy:
        return scores
    scores = TemperatureLogitsWarper(params.temperature)(none, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(none, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(none, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(none, scores)
    return scores


def sampled(model: Any, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Plain sampling with the target's own noise of each position, one token at a time."""
    assert params.seed is not None
    drawn = _DRAWN.setdefault(model, {})
    key = repr((list(prompt), params))
    if key not in drawn:
        tokens = list(prompt)
        for _ in range(params.max_new_tokens):
            scores = warped(next_logits(model, tokens)[None], params)
            rng = KeyedRng([params.seed], [len(tokens)], Purpose.VERIFY, "", scores.device)
            tokens.append(int(rng.target_draw(scores.log_softmax(dim=-1), 0)))
        drawn[key] = tokens[len(prompt) :]
    return drawn[key]


@torch.no_grad()
def greedy_fault(model: Any, prompt: Sequence[int], said: Sequence[int]) -> str:
    """Why this is not what plain greedy decoding says; empty if it is.

    One causal pass over the whole text: if each token is the argmax after those before it, then so says
    decoding token by token.
    """
    if not said:
        return ""
    text = torch.tensor([[*prompt, *said]], device=model.device)
    logits = model(input_ids=text, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    for i, (token, best) in enumerate(zip(said, logits.argmax(dim=-1).tolist(), strict=True)):
        if token != best:
            gap = float(logits[i, best] - logits[i, token])
            return (
                f"token {i} of the output is {token}, and plain decoding says {best} (logits {gap:.2g} apart)"
            )
    return ""


@torch.no_grad()
def law_of_texts(
    model: Any, prompt: Sequence[int], params: SamplingParams, n: int
) -> dict[tuple[int, ...], float]:
    """The exact law of the target's next n tokens, by plain passes: text -> probability."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(n):
        grown = {}
        for text, chance in law.items():
            scores = warped(next_logits(model, [*prompt, *text])[None].double(), params)
            for token, p in enumerate(scores.softmax(dim=-1)[0].tolist()):
                if p > 0:
                    grown[*text, token] = chance * p
        law = grown
    return law
