"""How many tokens to draft, so that tokens a second are the most: `--draft-tokens auto`.

Each round takes the depth and nodes with the largest E / C: E, the tokens that the round is expected to
commit, from `Acceptance`; C, the seconds it is expected to take, from `RoundCosts`. (Leviathan et al. 2023,
section 3, with measured costs, and with acceptance by what is known of each node.) All rows share one block:
what each of them is worth checking is weighed against what the block then costs, by columns of a rectangle,
or row by row where blocks have no padding.

What was made on the host (`Draft.host`) is asked for in full and cut by its scores, and teaches what would
have been accepted also where it was cut: nothing is spent on finding that out. What a model drafts is
decided before it is drawn. Where drafting does not pay, it is tried again in rounds that together may lose a
small share of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from specdec_core.contract.draft import HOLE, ROOT, Draft, HostNodes
from specdec_core.contract.interfaces import Budget, Capabilities, Outcome
from specdec_core.length.acceptance import (
    Acceptance,
    Clue,
    Shifts,
    clue_of_depth,
    clue_of_score,
    clues_of,
    new_row,
)
from specdec_core.length.costs import RoundCosts
from specdec_core.length.cuts import by_columns, by_rows, kept
from specdec_core.length.policy import Plan, deepest
from specdec_core.rows.batch import Batch

_MARGIN = 1.02  # drafting must promise so much more than plain decoding: estimates are noisy
_LOSS = 0.005  # share of the time that trying may lose
_FIRST_LOSS_ON_HOST, _FIRST_LOSS_OF_MODEL = 0.3, 1.0  # and this of a round at once
_LAST = 8  # power of a row's rounds left by which it may be the last to end
_SELDOM = 0.6  # rows whose drafts are accepted are seldom the last
_DOUBT = 1.5  # standard deviations by which chances in large batches are taken to be lower
_UNTRIED = 6  # drafted nodes, of each row in a rectangle, that the first round to be timed may check
_HOPELESS = 0.1  # short of plain pace, shared by the rows: what promises less is not asked for at once
_LONGEST_PAUSE = 3  # rounds
_FAINT = 0.02  # nodes behind one that is less likely are not looked at, ...
_FAINT_SHARE, _FAINT_NODES = 0.5, 8  # nor behind one worth less than this share of what so many cost, each
_PACE = 0.1  # share of the latest round in a row's pace


@dataclass
class _RowState:
    """What is known of a row."""

    shifts: Shifts = field(default_factory=new_row)
    hosted: bool = True  # whether the row's last draft was made on the host
    source: str = ""  # who made it
    proposed: HostNodes | None = None  # in this round
    sure: list[Clue] = field(default_factory=list)  # how sure a model was of each token that it drafted
    reached: float = 1.0  # the chance that all of these are accepted
    clue: Callable[[int], Clue] | None = None  # of each node that was proposed
    pace: float = 1.0  # tokens that its latest rounds committed, on the average
    weight: float = 1.0  # what a token of this row is worth in this round; of a single row 1
    drafted: int = 0  # nodes checked before this round


class AdaptiveLength:
    """The length policy of one call; only `costs` outlives it.

    Args:
        capabilities: of the drafter; its own depth and nodes are never exceeded.
        costs: what rounds cost.
        now: a clock in seconds that stands still while the loop's consumer works.
        asks: whether the drafter will ask how far to go on (`Budget.goes_on`).
    """

    def __init__(
        self, capabilities: Capabilities, costs: RoundCosts, now: Callable[[], float], *, asks: bool = False
    ) -> None:
        self.depth, self.nodes = capabilities.max_depth, capabilities.nodes
        self._sizes = _level_ends(self.depth, self.nodes if capabilities.makes_trees else self.depth)
        self._acceptance, self._costs, self._now = Acceptance(), costs, now
        self._rows: dict[int, _RowState] = {}
        self._on_host, self._asks, self._ragged = capabilities.on_host, asks, costs.ragged
        self._pace = 0.0  # tokens a row commits in a second, of late
        self._states: list[_RowState] = []  # of this round
        self._depths: list[int] = []
        self._pauses, self._left = 0, 0  # rounds without a question: how many, and how many more
        self._paused = False  # in this round
        self._first = False
        self._since: float | None = None  # when the last round ended
        self._catching_up = True  # a model that did not draft in the last round reads more than it will next
        self._allowed, self._lost = 0.0, 0.0  # seconds, of trying
        costs.begin()

    # --- before the draft

    def plan(self, batch: Batch) -> Plan:
        """Ask for all that the host drafts, and of what a model drafts for what pays."""
        self._first = batch.first
        self._states = [self._state(row.id) for row in batch.rows]
        for row, state in zip(batch.rows, self._states, strict=True):
            state.proposed, state.drafted = None, row.stats.drafted_tokens
            state.sure, state.reached = [], 1.0
        self._paused = self._left > 0 and not self._first and all(state.hosted for state in self._states)
        if self._paused:
            self._left -= 1
            self._depths = [0] * len(self._states)
            return Plan(Budget(self._depths, 0), self._cut)
        self._weigh(batch)
        rooms = [deepest(row, self.depth) for row in batch.rows]
        most = self.depth
        if not all(state.hosted for state in self._states):
            most = self._model_depth(rooms)
        pairs = list(zip(rooms, self._states, strict=True))
        self._depths = [room if state.hosted else min(room, most) for room, state in pairs]
        hosted = any(state.hosted for _, state in pairs)
        budget = Budget(
            self._depths,
            max(self.nodes if hosted else self._sizes[most], *self._depths),
            self._goes_on if self._asks else None,
        )
        return Plan(budget, self._cut)

    def _state(self, row: int) -> _RowState:
        if row not in self._rows:
            self._rows[row] = _RowState(hosted=self._on_host)
        return self._rows[row]

    def _weigh(self, batch: Batch) -> None:
        """Let the rows count most that will be the last to end: the batch takes as long as they do.

        A row that ends earlier saves what it adds to the rounds of the others: little where a block of all
        rows costs hardly more than one token. While others wait for their places, all count alike.
        """
        if batch.others_wait:
            for state in self._states:
                state.weight = 1.0
            return
        rounds = [
            (row.left / state.pace) ** _LAST for row, state in zip(batch.rows, self._states, strict=True)
        ]
        mean = sum(rounds) / len(rounds)
        shared = 1.0 - self._costs.curve(1) / self._costs.curve(len(rounds))
        for left, state in zip(rounds, self._states, strict=True):
            state.weight = shared + (1.0 - shared) * (_SELDOM if len(rounds) > 1 else 1.0) * left / mean

    def _model_depth(self, rooms: Sequence[int]) -> int:
        """Choose the depth that a model drafts to; 0 where it does not pay."""
        rows, most = len(rooms), max(rooms)
        wide = sum(not state.hosted for state in self._states) if self._ragged else rows
        options = [(wide * self._sizes[depth], self._model_gain(rooms, depth)) for depth in range(most + 1)]
        drafting = [self._costs.draft(rows, depth) for depth in range(most + 1)]
        best, _ = self._best(options, drafting)
        if best or not most:
            return most if best and self._asks else best  # who asks ends it where it pays no more
        hoped = self._model_gain(rooms, 1, optimism=1.0)
        least = wide * self._sizes[1]
        return int(self._may_try(least, hoped, drafting[1], self._costs.round, _FIRST_LOSS_OF_MODEL))

    def _model_gain(self, rooms: Sequence[int], depth: int, optimism: float = 0.0) -> float:
        """Expect how many tokens of a model's draft are accepted, all rows together, weighed."""
        gain = 0.0
        for room, state in zip(rooms, self._states, strict=True):
            reached = 1.0
            for d in range(1, min(depth, room) + 1):
                reached *= self._acceptance.chance(state.shifts, clue_of_depth(state.source, d), optimism)
                gain += state.weight * reached
        return gain

    def _goes_on(self, rows: Sequence[int], sure: Tensor) -> bool:
        """Tell whether a model's next step pays: against the pace that is kept without it.

        What a model is sure of is known before its token is drawn, so the law allows to end there.
        """
        hoped = 0.0
        for row, confidence in zip(rows, sure.tolist(), strict=True):
            state = self._rows[row]
            state.sure.append(clue_of_score(state.source, confidence))
            state.reached *= self._acceptance.chance(state.shifts, state.sure[-1])
            depth = len(state.sure) + 1
            chance = self._acceptance.chance(state.shifts, clue_of_depth(state.source, depth))
            hoped += state.weight * state.reached * chance
        everyone, depth = len(self._states), len(self._rows[rows[0]].sure)
        plain = self._costs.round(everyone, 0)
        pace = everyone * max(self._pace, 1.0 / plain)
        wider = len(rows) if self._ragged else everyone
        step = self._costs.draft(everyone, 1)
        step += self._costs.round(everyone, wider * (depth + 1)) - self._costs.round(everyone, wider * depth)
        return hoped > pace * step

    # --- behind the draft, before anything is checked

    def _cut(self, draft: Draft) -> Draft:
        """Keep what pays, of what was made on the host: by what the host knows alone."""
        if draft.host is None:
            return draft
        rows = len(self._states)
        worth: list[list[float]] = [[] for _ in range(rows)]
        cost = self._costs.round(rows, _FAINT_NODES) / self._costs.round(rows, 0) - 1.0
        faint = max(_FAINT, _FAINT_SHARE * rows * cost / _FAINT_NODES)
        least = [0] * rows  # nodes of rows that a model drafted, which were decided upon before
        sources = draft.sources or ("",) * rows
        for i, (state, nodes) in enumerate(zip(self._states, draft.host, strict=True)):
            if nodes is None:
                least[i] = draft.nodes if draft.counts is None else draft.counts[i]
                continue
            state.proposed, state.hosted, state.source = nodes, True, sources[i]
            state.clue = clues_of(state.source, nodes)
            worth[i] = self._worth(state, nodes, state.clue, faint)
        steps = by_rows(worth) if self._ragged else by_columns(worth)
        options = [(sum(least) if self._ragged else 0, 0.0)]
        # What larger ones cost is a mere guess.
        trusted = 2 * self._costs.timed(rows) + _UNTRIED * (1 if self._ragged else rows)
        trusted = max(trusted, sum(least) + _UNTRIED if self._ragged else rows * max(least))
        for step in steps:
            drafted, gain = options[-1]
            if drafted + step.nodes > trusted:
                break
            options.append((drafted + step.nodes, gain + step.gain))
        best, promise = self._best(options, [0.0] * len(options))
        hopeless = len(options) > 1 and promise < 1.0 - _HOPELESS / rows
        self._pauses = self._left = min(2 * self._pauses + 1, _LONGEST_PAUSE) if hopeless else 0
        if not best and not self._first and not self._costs.timed(rows):
            best = self._try_size(options)
        counts = kept(steps[:best], least)
        return draft.cut(counts if self._ragged else max(counts))

    def _try_size(self, options: Sequence[tuple[int, float]]) -> int:
        """Choose how many nodes to time, while what drafts cost is a mere guess."""
        rows = len(self._states)
        if len(options) == 1:
            return 0
        pace = [(rows + gain) / self._costs.hoped(rows, drafted) for drafted, gain in options[1:5]]
        best = 1 + pace.index(max(pace))
        may = self._may_try(*options[best], 0.0, self._costs.hoped, _FIRST_LOSS_ON_HOST)
        return best if may else 0

    def _worth(
        self, state: _RowState, nodes: HostNodes, clue: Callable[[int], Clue], faint: float
    ) -> list[float]:
        """Expect of each node whether it is accepted, all before it included, times what its row counts.

        Behind one that is worth less than `faint` nothing is looked at.
        """
        # The more rows, the likelier it is that some look better than they are, and those decide.
        doubt = _DOUBT * (1.0 - 1.0 / len(self._states))
        worth: list[float] = []
        for node, parent in enumerate(nodes.parents):
            above = state.weight if parent == ROOT else 0.0 if parent == HOLE else worth[parent]
            chance = self._acceptance.chance(state.shifts, clue(node), -doubt) if above > faint else 0.0
            worth.append(above * chance)
        while worth and not worth[-1]:
            worth.pop()
        return worth

    # --- the choice

    def _best(self, options: Sequence[tuple[int, float]], drafting: Sequence[float]) -> tuple[int, float]:
        """Find the best of (drafted columns of all rows, expected accepted tokens), the first being no more.

        Returns:
            Its index, 0 where no draft pays, and the pace of the best draft relative to none.
        """
        rows = len(self._states)
        cost = self._costs.beside_prompts if self._first else self._costs.round
        plain = (rows + options[0][1]) / (cost(rows, options[0][0]) + drafting[0])
        best, most = 0, 0.0
        for i, ((drafted, gain), seconds) in enumerate(zip(options, drafting, strict=True)):
            rate = (rows + gain) / (cost(rows, drafted) + seconds)
            if i and rate > most:
                best, most = i, rate
        return best if most > _MARGIN * plain else 0, most / plain

    def _may_try(
        self,
        drafted: int,
        hoped: float,  # accepted tokens, at best
        drafting: float,
        cost: Callable[[int, int], float],  # at best
        first: float,
    ) -> bool:
        """Tell whether a draft that seems not to pay may be tried: if it could, and time for it is left."""
        rows = len(self._states)
        plain = self._costs.round(rows, 0)
        if (rows + hoped) / (cost(rows, drafted) + drafting) <= _MARGIN * rows / plain:
            return False
        loss = self._costs.round(rows, drafted) + drafting - plain  # if nothing is accepted
        if self._lost + loss > self._allowed + first * plain:
            return False
        self._lost += loss
        return True

    # --- after the round

    def learn(
        self, plan: Plan, batch: Batch, draft: Draft, outcome: Outcome, seconds: dict[str, float]
    ) -> None:
        """Learn from a round: what was drafted and committed, and the seconds of its parts."""
        self._time(len(batch.rows), draft, seconds, outcome)
        shown = False
        for i, (row, state) in enumerate(zip(batch.rows, self._states, strict=True)):
            drafted = row.stats.drafted_tokens - state.drafted
            state.pace += _PACE * (max(len(outcome.tokens[i]), 1) - state.pace)
            if state.proposed is not None:
                self._learn_nodes(state, state.proposed, outcome.tokens[i])
            elif drafted:
                state.hosted = False
                state.source = draft.sources[i] if draft.sources else ""
                depth = min(draft.depth, self._depths[i], drafted)
                self._learn_depths(state, len(outcome.paths[i]), depth, ended=row.finished is not None)
            elif not self._paused:
                for shift in state.shifts.values():
                    shift.fade()
            shown |= drafted > 0 or state.proposed is not None
            if row.finished is not None:
                self._rows.pop(row.id, None)
        if not shown and not self._paused:
            self._acceptance.fade()

    def _time(self, rows: int, draft: Draft, seconds: dict[str, float], outcome: Outcome) -> None:
        now = self._now()
        since, self._since = self._since, now
        if since is None or self._first:  # prompts are fed in rows' first rounds
            return
        self._allowed += _LOSS * (now - since)
        said = sum(s.weight * len(tokens) for s, tokens in zip(self._states, outcome.tokens, strict=True))
        pace = said / rows / max(now - since, 1e-9)
        self._pace += _PACE * (pace - self._pace) if self._pace else pace
        drafting = seconds.get("draft", 0.0)
        counts = draft.counts if self._ragged and draft.counts is not None else [draft.nodes] * rows
        self._costs.add(rows, sum(counts), now - since - drafting)
        by_model = draft.nodes > 0 and any(state.proposed is None for state in self._states)
        if by_model and not self._catching_up:
            self._costs.add_draft(rows, draft.depth, drafting)
        self._catching_up = not by_model

    def _learn_nodes(self, state: _RowState, nodes: HostNodes, said: Sequence[int]) -> None:
        """Compare what was proposed with what was said, whether or not it was checked."""
        at, end, clue = ROOT, len(nodes.tokens), state.clue
        assert clue is not None
        for token in said:
            right = None
            for node in range(at + 1, end):  # children come behind their parent
                if nodes.parents[node] != at:
                    continue
                accepted = right is None and nodes.tokens[node] == token
                right = node if accepted else right
                self._acceptance.learn(state.shifts, clue(node), accepted=accepted)
            if right is None:
                return
            at = right

    def _learn_depths(self, state: _RowState, accepted: int, depth: int, *, ended: bool) -> None:
        """Learn from a model's draft: what was accepted, and the depth at which it ended."""
        for d in range(1, min(accepted + 1, depth) + 1):
            if d <= accepted or not ended:
                clues = [clue_of_depth(state.source, d), *state.sure[d - 1 : d]]
                for clue in clues:
                    self._acceptance.learn(state.shifts, clue, accepted=d <= accepted)


def _level_ends(depth: int, nodes: int) -> list[int]:
    """Count the nodes down to each level, 0 first, of a tree that branches alike on all levels.

    Of a chain that is the depth itself.
    """
    low, high = 1.0, float(max(nodes, 1))
    for _ in range(60):
        branching = (low + high) / 2
        low, high = (
            (branching, high) if sum(branching**d for d in range(1, depth + 1)) < nodes else (low, branching)
        )
    return [min(round(sum(high**d for d in range(1, level + 1))), nodes) for level in range(depth + 1)]
