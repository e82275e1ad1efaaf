"""Logits processors that look at what was said, vectorised over rows and drafted nodes.

Each takes scores float32 [B, c, V] and gives new ones; a row that did not ask comes out unchanged. Order
and meaning are those of transformers; presence and frequency penalties, which it lacks, are OpenAI's
(they count generated tokens only).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from specdec_core.contract.draft import on_device
from specdec_core.contract.errors import InvalidParameter
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.sampling.history import History, RowFacts

_NEVER = -torch.inf


def process(scores: Tensor, params: Sequence[SamplingParams], history: History) -> Tensor:
    """Apply all processors that any row asks for, in transformers' order; a constraint has the last word."""
    raw = scores
    if any(p.logit_bias for p in params):
        scores = _bias(scores, params)
    if any(p.repetition_penalty != 1 for p in params):
        scores = _repetition(scores, _column(scores, [p.repetition_penalty for p in params]), history)
    if any(p.presence_penalty or p.frequency_penalty for p in params):
        scores = _presence_and_frequency(scores, params, history)
    if any(p.no_repeat_ngram_size for p in params):
        scores = _no_repeat_ngrams(scores, params, history)
    if any(p.bad_words_ids for p in params):
        scores = _bad_words(scores, params, history)
    if any(p.min_new_tokens for p in params):
        scores = _min_new_tokens(scores, params, history)
    if any(p.logits_processors for p in params):
        scores = _custom(scores, params, history)
    if any(p.constraint is not None for p in params):
        scores = constrained(scores, raw, history)
    return scores


def wanted(params: SamplingParams) -> bool:
    """Whether a row asks for any of these."""
    return bool(
        params.logit_bias
        or params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.no_repeat_ngram_size
        or params.bad_words_ids
        or params.min_new_tokens
        or params.logits_processors
        or params.constraint is not None
    )


def constrained(scores: Tensor, raw: Tensor, history: History) -> Tensor:
    """Forbid what a row's constraint does not allow after the very path before an index.

    Where other options forbid all that it allows, they give way. A slow path: masks are made on the host, and
    the drafted paths of these rows are transferred to it. Rows without a constraint take no part.
    """
    rows = [row for row, facts in enumerate(history.facts) if facts.walk is not None]
    masks = torch.ones((len(rows), *scores.shape[1:]), dtype=torch.bool)
    for mask, row, paths in zip(masks, rows, history.host_paths(rows), strict=True):
        facts = history.facts[row]
        with _alone(facts, "the constraint"):
            for at in sorted(range(len(paths)), key=paths.__getitem__):  # in this order a matcher moves least
                allowed = None if facts.walk is None else facts.walk.allowed(paths[at])
                if allowed is not None:
                    mask[at] = allowed
    legal = masks.to(scores.device)
    rest = scores[rows].masked_fill(~legal, _NEVER)
    nothing = (rest == _NEVER).all(dim=-1, keepdim=True)
    lifted = raw[rows].clamp(min=torch.finfo(raw.dtype).min).masked_fill(~legal, _NEVER)
    scores = scores.clone()
    scores[rows] = torch.where(nothing, lifted, rest)
    return scores


def _column(scores: Tensor, values: Sequence[float]) -> Tensor:
    return on_device(values, scores.device, scores.dtype).view(-1, 1, 1)


def _bias(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    bias = torch.zeros((len(params), scores.shape[-1]), dtype=scores.dtype)
    for row, p in enumerate(params):
        for token, value in p.logit_bias.items():
            bias[row, token] = value
    return scores + bias.to(scores.device).unsqueeze(1)


def _counts(scores: Tensor, history: History, start: Tensor | None = None) -> Tensor:
    """How often each token stands in each index's sequence, from `start` on: [B, c, V]."""
    ids, vocab = history.ids, scores.shape[-1]
    counted = (ids >= 0) & (ids < vocab)
    if start is not None:
        counted &= torch.arange(ids.shape[-1], device=ids.device) >= start.view(-1, 1, 1)
    counts = torch.zeros_like(scores)
    return counts.scatter_add_(2, ids.clamp(0, vocab - 1), counted.to(scores.dtype))


def _repetition(scores: Tensor, penalty: Tensor, history: History) -> Tensor:
    """Keskar et al. 2019 (CTRL): prompt and output count."""
    lowered = torch.where(scores < 0, scores * penalty, scores / penalty)
    return torch.where(_counts(scores, history) > 0, lowered, scores)


def _presence_and_frequency(scores: Tensor, params: Sequence[SamplingParams], history: History) -> Tensor:
    counts = _counts(scores, history, start=history.prompt_lengths)
    presence = _column(scores, [p.presence_penalty for p in params])
    frequency = _column(scores, [p.frequency_penalty for p in params])
    return scores - presence * (counts > 0) - frequency * counts


def _tail(history: History, size: int) -> Tensor:
    """The last `size` tokens of each sequence, NOTHING where it is shorter: int64 [B, c, size]."""
    at = history.lengths.unsqueeze(-1) - size + torch.arange(size, device=history.lengths.device)
    found = history.ids.gather(2, at.clamp(min=0, max=history.ids.shape[2] - 1))
    return found.masked_fill(at < 0, -1)


def _no_repeat_ngrams(scores: Tensor, params: Sequence[SamplingParams], history: History) -> Tensor:
    """Ban tokens that would complete an n-gram for the second time (Paulus et al. 2017)."""
    ids = history.ids
    for size in sorted({p.no_repeat_ngram_size for p in params} - {0}):
        if ids.shape[2] < size:
            continue
        rows = on_device([p.no_repeat_ngram_size == size for p in params], scores.device, torch.bool)
        grams = ids.unfold(2, size, 1)  # [B, c, S - size + 1, size]
        same = (grams[..., :-1] == _tail(history, size - 1).unsqueeze(2)).all(dim=-1)
        last = grams[..., -1]
        ban = same & (last >= 0) & rows.view(-1, 1, 1)
        scores = _banned(scores, last, ban)
    return scores


def _bad_words(scores: Tensor, params: Sequence[SamplingParams], history: History) -> Tensor:
    """Ban the last token of each listed sequence wherever the rest of it has just been said."""
    scores = scores.clone()
    for row, p in enumerate(params):
        for word in p.bad_words_ids:
            head = on_device(word[:-1], scores.device)
            said = (_tail(history, len(head))[row] == head).all(dim=-1)  # [c]
            scores[row, :, word[-1]] = scores[row, :, word[-1]].masked_fill(said, _NEVER)
    return scores


def _min_new_tokens(scores: Tensor, params: Sequence[SamplingParams], history: History) -> Tensor:
    """Ban EOS until so many tokens are generated."""
    new = history.lengths - history.prompt_lengths.unsqueeze(1)
    least = on_device([p.min_new_tokens for p in params], scores.device)
    eos = torch.zeros((len(params), scores.shape[-1]), dtype=torch.bool)
    for row, facts in enumerate(history.facts):
        eos[row, [token for token in facts.eos if 0 <= token < scores.shape[-1]]] = True
    early = (new < least.unsqueeze(1)).unsqueeze(-1)
    return scores.masked_fill(early & eos.to(scores.device).unsqueeze(1), _NEVER)


def _custom(scores: Tensor, params: Sequence[SamplingParams], history: History) -> Tensor:
    """Run users' processors: a slow path, with a host transfer and a call for each length.

    Each is called as transformers calls it, `processor(input_ids [k, len], scores [k, V])`, with exactly the
    prompt, the output and the path before an index; it must depend on nothing else.
    """
    scores = scores.clone()
    lengths = history.lengths.tolist()
    for row, p in enumerate(params):
        for length in sorted(set(lengths[row])) if p.logits_processors else ():
            at = [i for i, n in enumerate(lengths[row]) if n == length]
            ids, values = history.ids[row, at, :length], scores[row, at]
            ids = ids.clamp(0, scores.shape[-1] - 1)  # a drafted id may lie outside: then nobody reads this
            with _alone(history.facts[row], "a logits processor"):
                for processor in p.logits_processors:
                    values = processor(ids, values)
                scores[row, at] = values.to(scores.dtype)
    return scores


@contextmanager
def _alone(facts: RowFacts, what: str) -> Iterator[None]:
    """Let what a row brought along fail for that row alone; its scores stay as they were."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever it raises
        if facts.fail is None:
            raise
        failure = InvalidParameter(f"{what} of this request raised {type(error).__name__}: {error}")
        failure.__cause__ = error
        facts.fail(failure)


def _banned(scores: Tensor, tokens: Tensor, ban: Tensor) -> Tensor:
    """Forbid tokens [B, c, k] where `ban` says so."""
    vocab = scores.shape[-1]
    hits = torch.zeros_like(scores).scatter_add_(
        2, tokens.clamp(0, vocab - 1), (ban & (tokens < vocab)).to(scores.dtype)
    )
    return scores.masked_fill(hits > 0, _NEVER)
