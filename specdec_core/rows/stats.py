"""What a run counted and where its time went.

Every round counts, also one without a draft. (vLLM leaves those out of its means.) A forward over a
prompt's earlier chunks is a prefill call, not a round.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any


@dataclass
class MemberStats:
    """What one member of a combination of drafters did."""

    rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def add(self, other: MemberStats) -> None:
        """Add another's counts."""
        self.rounds += other.rounds
        self.drafted_tokens += other.drafted_tokens
        self.accepted_tokens += other.accepted_tokens


@dataclass
class Stats:
    """Counts and seconds of one row, or of several pooled.

    Seconds are wall-clock. A row's are those of the forwards and drafts it took part in; `other_seconds`
    is what is left of its total, waiting for other rows included. Time that a consumer of a stream takes
    is in none.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt, whose states were there from another row or call
    new_tokens: int = 0
    rounds: int = 0
    prefill_calls: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # as verified, before an EOS or a cap in mid-block cut the row
    acceptance_histogram: list[int] = field(default_factory=list)  # index: tokens accepted in the round
    by_drafter: dict[str, MemberStats] = field(default_factory=dict)  # of a combination: what each did
    prefill_seconds: float = 0.0  # target forwards that fed prompt tokens, a row's first round included
    draft_seconds: float = 0.0  # the drafter, proposing and observing
    target_seconds: float = 0.0  # all other target forwards; what the verifier takes is in `other_seconds`
    total_seconds: float = 0.0
    time_to_first_token: float | None = None

    @property
    def target_calls(self) -> int:
        """Forwards of the target: rounds and prefill calls."""
        return self.rounds + self.prefill_calls

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 where nothing was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens over rounds: tokens a round emits, its own token included."""
        return 1 + self.accepted_tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_target_call(self) -> float:
        """New tokens over rounds; calls that only prefill are left out, as in the literature."""
        return self.new_tokens / self.rounds if self.rounds else 0.0

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Share of all rounds that accepted a token at depth 1, 2, ..."""
        counts = self.acceptance_histogram
        return [sum(counts[depth:]) / self.rounds for depth in range(1, len(counts))]

    @property
    def other_seconds(self) -> float:
        """What is neither drafting nor a target forward."""
        return max(self.total_seconds - self.prefill_seconds - self.draft_seconds - self.target_seconds, 0.0)

    @property
    def tokens_per_second(self) -> float:
        """New tokens over total seconds."""
        return self.new_tokens / self.total_seconds if self.total_seconds else 0.0

    def count_round(self, drafted: int, accepted: int, new: int, source: str = "") -> None:
        """Count one round of a row; source: the member of a combination that drafted it."""
        self.rounds += 1
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        self.new_tokens += new
        self.acceptance_histogram += [0] * (accepted + 1 - len(self.acceptance_histogram))
        self.acceptance_histogram[accepted] += 1
        if source:
            self.by_drafter.setdefault(source, MemberStats()).add(MemberStats(1, drafted, accepted))

    def add_seconds(self, seconds: dict[str, float]) -> None:
        """Add the seconds of a round by part: prefill, draft, target."""
        self.prefill_seconds += seconds.get("prefill", 0.0)
        self.draft_seconds += seconds.get("draft", 0.0)
        self.target_seconds += seconds.get("target", 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Give every field and figure by name, as `--json` prints them."""
        names = (
            "prompt_tokens reused_tokens new_tokens rounds target_calls drafted_tokens accepted_tokens "
            "acceptance_rate mean_acceptance_length tokens_per_target_call acceptance_histogram "
            "acceptance_by_depth prefill_seconds time_to_first_token draft_seconds target_seconds "
            "other_seconds total_seconds tokens_per_second"
        )
        figures: dict[str, Any] = {name: getattr(self, name) for name in names.split()}
        if self.by_drafter:
            figures["by_drafter"] = {label: asdict(share) for label, share in self.by_drafter.items()}
        return figures

    @classmethod
    def pooled(cls, parts: Iterable[Stats], timed: Stats | None = None) -> Stats:
        """Add the counts of rows; seconds are those of `timed`, the run as a whole, or else added too."""
        parts = list(parts)
        total = cls()
        for part in parts:
            for name in _COUNTS:
                setattr(total, name, getattr(total, name) + getattr(part, name))
            pairs = zip_longest(total.acceptance_histogram, part.acceptance_histogram, fillvalue=0)
            total.acceptance_histogram = [a + b for a, b in pairs]
            for label, share in part.by_drafter.items():
                total.by_drafter.setdefault(label, MemberStats()).add(share)
        for name in _SECONDS:
            values = (getattr(part, name) for part in parts)
            setattr(total, name, sum(values) if timed is None else getattr(timed, name))
        firsts = [p.time_to_first_token for p in parts if p.time_to_first_token is not None]
        total.time_to_first_token = min(firsts, default=None)
        return total


_COUNTS = "prompt_tokens reused_tokens new_tokens rounds prefill_calls drafted_tokens accepted_tokens".split()
_SECONDS = ["prefill_seconds", "draft_seconds", "target_seconds", "total_seconds"]
