"""From prompts and params to rows, checked at the border."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from specdec_core.contract.constraints import Walk
from specdec_core.contract.errors import InvalidParameter
from specdec_core.contract.interfaces import Verifier
from specdec_core.contract.rng import sample_seed
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.engine.target import Target
from specdec_core.rows.prompts import Prompts, check_ids, encode_prompts
from specdec_core.rows.row import Row
from specdec_core.rows.stopping import as_ids, eos_ids
from specdec_core.rows.text import RowText

Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


def make_rows(
    prompts: Prompts,
    params: Params,
    target: Target,
    eos: frozenset[int],
    ids: Iterator[int],
    verifier_for: Callable[[SamplingParams], Verifier],
) -> tuple[list[Row], bool]:
    """Make a row for each sample of each prompt; return whether a list of results is wanted.

    Raises:
        InvalidParameter: a prompt or a parameter is wrong.
        ConstraintError: a constraint allows nothing at all.
    """
    encoded, many = encode_prompts(prompts, target.tokenizer)
    rows = []
    each = params_of_each(params, len(encoded))
    for i, (prompt, row_params) in enumerate(zip(encoded, each, strict=True)):
        check_ids(prompt, target.vocab_size, target.context_limit, i if many else None)
        _check_params(row_params, target)
        many = many or row_params.n > 1
        verifier = verifier_for(row_params)
        seed = secrets.randbits(63) if row_params.seed is None else row_params.seed
        ends = eos_ids(row_params, eos)
        for sample in range(row_params.n):
            row = Row(
                id=next(ids),
                prompt=prompt,
                params=row_params,
                sample=sample,
                seed=sample_seed(seed, sample),
                eos=ends,
                context_limit=target.context_limit,
                verifier=verifier,
                walk=_walk(row_params, ends, target.vocab_size),
            )
            row.text = _watched(row_params, target.tokenizer) if row_params.stop else None
            rows.append(row)
    return rows, many


def params_of_each(params: Params, prompts: int) -> list[SamplingParams]:
    """Give the params of each prompt: one for all, or one each."""
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * prompts
    given: object = params  # whatever a caller passes
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise InvalidParameter(f"params is {type(given).__name__}; pass a SamplingParams, or a list of them")
    for i, one in enumerate(given):
        if not isinstance(one, SamplingParams):
            kind = type(one).__name__
            raise InvalidParameter(f"params {i} is {kind}; pass a SamplingParams for each prompt")
    if len(params) != prompts:
        raise InvalidParameter(f"{len(params)} params for {prompts} prompts; pass one for all, or one each")
    return list(params)


def _watched(params: SamplingParams, tokenizer: Any) -> RowText:
    return RowText(tokenizer, params.stop, include_stop=params.include_stop, least=params.min_new_tokens)


def _walk(params: SamplingParams, eos: frozenset[int], vocab_size: int) -> Walk | None:
    return None if params.constraint is None else Walk(params.constraint, eos, vocab_size)


def _check_params(params: SamplingParams, target: Target) -> None:
    if params.stop and target.tokenizer is None:
        raise InvalidParameter("stop strings need a tokenizer, and this decoder has none; use eos_token_id")
    named: dict[str, Iterable[int]] = {
        "logit_bias": params.logit_bias,
        "bad_words_ids": [token for word in params.bad_words_ids for token in word],
        "eos_token_id": as_ids(params.eos_token_id),
    }
    for field, tokens in named.items():
        for token in tokens:
            if not 0 <= token < target.vocab_size:
                raise InvalidParameter(
                    f"{field} holds the token id {token}; the target's ids are 0 to {target.vocab_size - 1}"
                )
