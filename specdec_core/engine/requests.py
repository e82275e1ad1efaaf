"""From prompts and params to rows, checked at the border."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from threading import Lock
from typing import Any, TypeAlias

from specdec_core.contract.constraints import Walk
from specdec_core.contract.errors import InvalidParameter
from specdec_core.contract.interfaces import Capabilities, Verifier
from specdec_core.contract.rng import row_seed, sample_seed
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.engine.target import Target
from specdec_core.plugins.choice import check_params, choose
from specdec_core.rows.prompts import Prompts, check_ids, encode_prompts
from specdec_core.rows.row import Row
from specdec_core.rows.stopping import as_ids, eos_ids
from specdec_core.rows.text import RowText

Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


class RowMaker:
    """Makes rows of requests; from any thread.

    Args:
        drafter: name and capabilities of the drafter that serves them.
        verifiers: those that a row's is chosen from; one, where it was named.
        forced_depth: how deep a row is drafted whose constraint forces tokens.
        eos: the model's own EOS ids.
        learns: whether what is drafted for a row may follow from other rows' draws.
    """

    def __init__(
        self,
        target: Target,
        drafter: tuple[str, Capabilities],
        verifiers: Sequence[Verifier],
        *,
        auto: bool,
        forced_depth: int,
        eos: frozenset[int],
        learns: bool,
    ) -> None:
        self._target, self._eos = target, eos
        (self._drafter, can), self._verifiers, self._auto = drafter, verifiers, auto
        self._forced_depth, self._learns = forced_depth, learns
        self._ids = count(can.next_row)
        self._can = can
        self._encoding = Lock()  # tokenizers are not made for several threads

    def verifier_for(self, params: Sequence[SamplingParams]) -> Verifier:
        """Give the verifier that rows with such params get.

        Raises:
            IncompatiblePair: none fits.
            InvalidParameter: the one that was named does not sample, and a row does.
        """
        verifier = self._verifiers[0]
        if self._auto:
            verifier = choose(self._verifiers, self._drafter, self._can, params)
        check_params(verifier, params)
        return verifier

    def rows(self, prompts: Prompts, params: Params) -> tuple[list[Row], bool]:
        """Make a row for each sample of each prompt; return whether a list of results is wanted.

        Raises:
            InvalidParameter: a prompt or a parameter is wrong.
            ConstraintError: a constraint allows nothing at all.
        """
        target = self._target
        with self._encoding:
            encoded, many = encode_prompts(prompts, target.tokenizer)
        rows: list[Row] = []
        each = params_of_each(params, len(encoded))
        for i, (prompt, row_params) in enumerate(zip(encoded, each, strict=True)):
            check_ids(prompt, target.vocab_size, target.context_limit, i if many else None)
            _check_params(row_params, target)
            many = many or row_params.n > 1
            rows += self._samples(prompt, row_params)
        return rows, many

    def _samples(self, prompt: tuple[int, ...], params: SamplingParams) -> Iterator[Row]:
        verifier, ends = self.verifier_for([params]), eos_ids(params, self._eos)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        for sample in range(params.n):
            row = Row(
                id=next(self._ids),
                prompt=prompt,
                params=params,
                sample=sample,
                seed=sample_seed(seed, sample),
                eos=ends,
                context_limit=self._target.context_limit,
                verifier=verifier,
                walk=_walk(params, ends, self._target.vocab_size),
                forced=0 if params.constraint is None else self._forced_depth,
                text=_watched(params, self._target.tokenizer) if params.stop else None,
            )
            if self._learns and not verifier.drafter_invariant:
                # What is learned from a row depends on its draws: it shares none with another of its seed.
                row.own_seed = row_seed(row.seed, row.id)
            yield row


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
