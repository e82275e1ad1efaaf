"""One round: draft, one target forward, one verdict, commit.

Leviathan, Kalman and Matias 2023 (arXiv 2211.17192), algorithm 1, for batches and trees.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec_core.checks.guard import GuardedDrafter
from specdec_core.checks.verdicts import CheckedVerdict, checked_verdict
from specdec_core.contract.distributions import TargetDistributions
from specdec_core.contract.draft import Draft
from specdec_core.contract.errors import VerifierError
from specdec_core.contract.interfaces import Outcome, Verifier
from specdec_core.engine.target import Target
from specdec_core.length.policy import LengthPolicy
from specdec_core.rows.batch import Batch
from specdec_core.rows.clock import Clock


@dataclass(frozen=True, eq=False)
class Round:
    """One round, as streaming, progress and statistics see it."""

    batch: Batch
    draft: Draft
    outcome: Outcome
    seconds: dict[str, float]  # prefill, draft, target


def play(batch: Batch, target: Target, drafter: GuardedDrafter, length: LengthPolicy, clock: Clock) -> Round:
    """Play one round: each of these rows commits at least one token, or ends."""
    plan = length.plan(batch)
    with clock.part("draft"):
        checked = drafter.propose(batch.context, plan.budget, plan.cut)
    with clock.part("prefill" if batch.first else "target"):
        logits = target.score(batch, checked)
    p = batch.distributions(checked, logits)
    verdict = _verdict(batch, p, checked.draft)
    outcome, flags = batch.commit(checked, verdict, logits)
    drafter.blame(flags)
    outcome = target.keep(outcome)
    with clock.part("draft"):
        drafter.observe(outcome)
    seconds = batch.count_time(clock)
    length.learn(plan, batch, checked.draft, outcome, seconds)
    return Round(batch, checked.draft, outcome, seconds)


def _verdict(batch: Batch, p: TargetDistributions, draft: Draft) -> CheckedVerdict:
    """Let each row's own verifier judge it."""
    if len(batch.judges) == 1:
        verifier, rows = batch.judges[0]
        return _of_one(verifier, batch, rows, p, draft)
    return CheckedVerdict.merged(
        [
            (_of_one(verifier, batch, rows, p.for_rows(rows), draft.for_rows(rows)), rows)
            for verifier, rows in batch.judges
        ]
    )


def _of_one(
    verifier: Verifier, batch: Batch, rows: list[int], p: TargetDistributions, draft: Draft
) -> CheckedVerdict:
    """Let a verifier judge the rows that are its; where it fails, these end, and no others."""
    try:
        return checked_verdict(
            verifier, p, draft, batch.rng if len(rows) == len(batch.rows) else batch.rng.for_rows(rows)
        )
    except VerifierError as error:
        for i in rows:
            batch.rows[i].fail(error)
        return CheckedVerdict.none(len(rows), draft.tokens.device)
