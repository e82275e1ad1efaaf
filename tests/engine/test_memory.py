"""Memory is a budget: what does not fit waits, or is refused with both sizes."""

from __future__ import annotations

import pytest
import torch
from support import base, greedy, ids, tiny_llama

from specdec_core import InvalidParameter, SpecDecoder
from specdec_core.engine import memory as module


def test_free_memory_is_known_here() -> None:
    free = module._free(torch.device("cpu"))
    assert free is None or 10**6 < free < 10**15


def test_a_request_that_never_fits_is_refused_with_both_sizes() -> None:
    """And those beside it are served."""
    model = tiny_llama()
    decoder = SpecDecoder(model, drafter="none", strict=True, memory=100_000)
    with pytest.raises(
        InvalidParameter,
        match=r"9 tokens with max_new_tokens=490 .* needs \d\.\d\d MB, and 0\.10 MB is there",
    ) as caught:
        decoder.generate([ids(5), ids(9)], [greedy(6), greedy(490)])
    results = caught.value.results
    assert results is not None
    assert results[1] is None
    assert results[0].token_ids == base(model, ids(5), 6)  # type: ignore[attr-defined]


def test_rows_wait_until_they_fit() -> None:
    """Few at once, and all are served, in their order."""
    model = tiny_llama()
    prompts = [ids(n, 3) for n in (5, 60, 9, 30, 7)]
    free = SpecDecoder(model, drafter="none", strict=True)
    most = max(len(done.batch.rows) for done in free.rounds(prompts, greedy(40)))
    decoder = SpecDecoder(
        model, drafter="none", strict=True, memory=free.target.bytes_after([(60, 40)] * 2, 0) + 4_000
    )
    together = [len(done.batch.rows) for done in decoder.rounds(prompts, greedy(40))]
    assert (most, max(together)) == (5, 2)
    results = decoder.generate(prompts, greedy(40))
    assert [one.token_ids for one in results] == [base(model, prompt, 40) for prompt in prompts]
