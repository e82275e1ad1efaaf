"""The round loop: draft, one target forward, one verdict, commit.

Leviathan, Kalman and Matias 2023 (arXiv 2211.17192), algorithm 1, for batches and trees.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

from specdec_core.checks.guard import GuardedDrafter
from specdec_core.checks.verdicts import checked_verdict
from specdec_core.contract.draft import Draft
from specdec_core.contract.interfaces import Outcome, Verifier
from specdec_core.engine.scheduler import Scheduler
from specdec_core.engine.target import Target
from specdec_core.length.policy import LengthPolicy
from specdec_core.rows.batch import Batch
from specdec_core.rows.clock import Clock
from specdec_core.sampling.pipeline import distributions


@dataclass(frozen=True, eq=False)
class Round:
    """One round, as streaming, progress and statistics see it."""

    batch: Batch
    draft: Draft
    outcome: Outcome
    seconds: dict[str, float]  # prefill, draft, target


def rounds(
    scheduler: Scheduler,
    target: Target,
    drafter: GuardedDrafter,
    verifier: Verifier,
    length: LengthPolicy,
    clock: Clock,
) -> Generator[Round, None, None]:
    """Generate until every row has ended; rows are released also when the consumer stops early."""
    with scheduler:
        while batch := scheduler.next():
            with clock.part("prefill"):
                for earlier in target.prefill(batch):
                    drafter.observe(earlier)
            plan = length.plan(batch)
            with clock.part("draft"):
                checked = drafter.propose(batch.context, plan.budget, plan.cut)
            with clock.part("prefill" if batch.first else "target"):
                logits = target.score(batch, checked)
            p = distributions(logits, batch.params, batch.history(checked))
            verdict = checked_verdict(verifier, p, checked.draft, batch.rng)
            outcome, flags = batch.commit(checked, verdict, logits)
            drafter.blame(flags)
            outcome = target.keep(outcome)
            with clock.part("draft"):
                drafter.observe(outcome)
            seconds = batch.count_time(clock)
            length.learn(plan, batch, checked.draft, outcome, seconds)
            with clock.away():
                yield Round(batch, checked.draft, outcome, seconds)
