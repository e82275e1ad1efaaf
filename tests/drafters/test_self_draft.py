"""A draft model that is the target itself is accepted all but always, however it draws (B04)."""

from __future__ import annotations

import pytest
from support import decoder_for, ids, plugins, tiny_llama

from specdec_core import SamplingParams, Stats


def run(drawing: str, verifier: str, params: SamplingParams, rows: int) -> Stats:
    model = tiny_llama(1024)
    drafter = plugins().build_drafter("small_model", {"model": model, "draft": drawing, "num_tokens": 4})
    decoder = decoder_for(model, drafter, verifier=verifier, max_batch=rows)
    results = decoder.generate([ids(5, seed) for seed in range(rows)], params)
    pooled: Stats = results.stats
    return pooled


@pytest.mark.parametrize("verifier", ["rejection", "block", "match"])
def test_ten_thousand_sampled_tokens_meet_at_most_one_rejection_in_a_thousand(verifier: str) -> None:
    """`match` draws anew, so there the draft must draw with the target's noise."""
    drawing = "coupled" if verifier == "match" else "sampled"
    params = SamplingParams(max_new_tokens=320, temperature=1.0, top_p=0.95, seed=11)
    stats = run(drawing, verifier, params, rows=32)
    assert stats.new_tokens == 10_240
    assert stats.drafted_tokens - stats.accepted_tokens <= stats.drafted_tokens / 1000
    assert stats.tokens_per_target_call > 4.9


def test_greedy_acceptance_is_exactly_one() -> None:
    stats = run("greedy", "greedy", SamplingParams(max_new_tokens=32), rows=3)
    assert stats.acceptance_rate == 1.0
    assert stats.rounds == 3 * 7
