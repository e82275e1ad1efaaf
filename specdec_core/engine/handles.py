"""What passes between a session and its callers: requests, handles, and what has happened to them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.engine.loop import Round
from specdec_core.rows.prompts import Prompt
from specdec_core.rows.results import GenerationResult
from specdec_core.rows.row import Row
from specdec_core.rows.stats import Stats


@dataclass(frozen=True, eq=False)
class Request:
    """What is wanted: `params.n` samples behind one prompt."""

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    stream: bool = False  # whether events bring text


@dataclass(frozen=True, eq=False)
class Handle:
    """A request under way."""

    rows: tuple[Row, ...]  # a sample each
    stream: bool = False
    inbox: Inbox | None = None  # of the caller that follows it; None: who steps the session is told

    @property
    def done(self) -> bool:
        """Whether all samples have ended."""
        return all(row.finished for row in self.rows)


@dataclass(frozen=True, eq=False)
class Event:
    """What one step brought for one sample (a row); its last event has a result or an error."""

    handle: Handle
    row: Row
    token_ids: tuple[int, ...]  # committed
    text: str = ""  # complete characters, where the request streams
    result: GenerationResult | None = None
    error: Exception | None = None

    @property
    def last(self) -> bool:
        """Whether the sample has ended."""
        return self.result is not None or self.error is not None


@dataclass(frozen=True, eq=False)
class Step:
    """What one step brought for the requests of one caller."""

    events: list[Event]
    round: Round | None = None


class Inbox:
    """What has happened to the requests of one caller, until it looks.

    `open` as long as more requests may come; `timed` holds the seconds of the rounds they took part in.
    """

    def __init__(self, *, open: bool = False) -> None:
        self.steps: deque[Step] = deque()
        self.open, self.left = open, 0  # samples that have not ended
        self.timed = Stats()
        self.began: float | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return not (self.steps or self.left or self.open)
