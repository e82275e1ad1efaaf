"""How many tokens to draft, so that tokens a second are the most: `--draft-tokens auto`.

Each round takes what promises the largest E / C: E, the tokens that it is expected to commit, from the rows'
`Belief`s; C, the seconds that it is expected to take, from `RoundCosts`. (Leviathan et al. 2023, section 3,
with measured costs, and with acceptance by what is known of each node.) It drafts nothing unless that
promises 2% more than plain decoding.

What was made on the host (`Draft.host`) is asked for in full and cut by its scores, and teaches what would
have been accepted also where it was cut: nothing is spent on finding that out. What a model drafts is
decided before it is drawn. Where it does not pay, it is tried again in rounds that together may lose a small
share of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from specdec_core.contract.draft import HOLE, ROOT, Draft, HostNodes
from specdec_core.contract.interfaces import Budget, Capabilities, Outcome
from specdec_core.length.acceptance import GUESS_OF_MODEL, Belief, bounded, guesses_of
from specdec_core.length.costs import Line, RoundCosts
from specdec_core.length.cuts import by_columns, by_rows, kept
from specdec_core.length.policy import Plan
from specdec_core.rows.batch import Batch

_MARGIN, _MARGIN_OF_MANY = 1.02, 1.06  # drafting must promise so much more than plain decoding: estimates are
# noisy, and of several rows some look better than they are
_LAST = 8  # power of a row's rounds left by which it may be the last to end
_SELDOM = 0.6  # rows whose drafts are accepted are seldom the last
_LOSS = 0.004  # share of the time that trying a model again may lose
_LONGEST_PAUSE = 3  # rounds in which a drafter on the host that has nothing that pays is not asked
_HOPELESS = 0.1  # short of plain pace, shared by the rows: what promises less pauses
_FAINT = 0.02  # nodes behind one that is less likely are not looked at
_PACE = 0.1  # share of the latest round in the pace of late
_ROWS = 1024  # that are remembered


class _RowState:
    """What is known of a row."""

    __slots__ = ("beliefs", "hosted", "pace", "source")

    def __init__(self, hosted: bool) -> None:
        self.hosted = hosted  # whether its last draft was made on the host
        self.source = ""  # who made it
        self.pace = 1.0  # tokens that its latest rounds committed, on the average
        self.beliefs: dict[tuple[str, bool], Belief] = {}


@dataclass(eq=False)
class _Row:
    """One row of one round."""

    state: _RowState
    drafted: int  # nodes checked before
    weight: float = 1.0
    nodes: HostNodes | None = None  # proposed by the host
    guesses: Sequence[float] = ()  # of these, or how sure a model was of each token
    reached: float = 1.0  # the chance that all of a model's tokens so far are accepted


@dataclass(frozen=True, eq=False)
class AdaptivePlan(Plan):
    """A plan, and what it was made from: all that `cut` and `learn` need of its round."""

    rows: dict[int, _Row] = field(default_factory=dict)
    risked: float = 0.0  # seconds, if a model was only tried
    line: Line = field(kw_only=True)
    began: float = field(kw_only=True)  # on the clock


class AdaptiveLength:
    """The length policy of a decoder, for as long as that lives; rows join and leave at any round.

    Args:
        capabilities: of the drafter; its own depth and nodes are never exceeded.
        costs: what rounds cost.
        now: a clock in seconds that stands still while nobody decodes.
        asks: whether the drafter will ask how far to go on (`Budget.goes_on`).
    """

    def __init__(
        self, capabilities: Capabilities, costs: RoundCosts, now: Callable[[], float], *, asks: bool = False
    ) -> None:
        self.depth, self.nodes = capabilities.max_depth, capabilities.nodes
        self._sizes = _level_ends(self.depth, self.nodes if capabilities.makes_trees else self.depth)
        self._costs, self._now = costs, now
        self._on_host, self._asks, self._ragged = capabilities.on_host, asks, costs.ragged
        self._rows: dict[int, _RowState] = {}
        self._beliefs: dict[tuple[str, bool], Belief] = {}  # of all rows: a new one begins with a share
        self._pace = 0.0  # tokens a row commits in a second, of late
        self._pauses = self._left = 0  # rounds in which the host is not asked: how many, and how many more
        self._allowed = 0.0  # seconds that trying a model again may lose
        self._caught_up = False  # a model that did not draft in the last round reads more than it will next

    def begin(self) -> None:
        """Begin again after a time in which nobody decoded: other requests, so nothing is hopeless."""
        self._pauses = self._left = 0

    def forget(self, rows: Iterable[int]) -> None:
        """Forget rows that are gone."""
        for row in rows:
            self._rows.pop(row, None)

    # --- before the draft

    def plan(self, batch: Batch) -> AdaptivePlan:
        """Ask for all that the host drafts, and of what a model drafts for what pays."""
        began, rows = self._now(), batch.rows
        line = self._costs.line(batch.kind, len(rows))
        known = {
            row.id: _Row(self._rows.get(row.id) or self._state(row.id), row.stats.drafted_tokens)
            for row in rows
        }
        if len(rows) > 1 and not batch.others_wait:
            self._weigh(batch, known.values(), line)
        hosted = [row.state.hosted for row in known.values()]
        if self._left > 0 and not batch.first and all(hosted):
            self._left -= 1
            return AdaptivePlan(
                Budget([0] * len(rows), 0, None, batch.forced()), None, known, line=line, began=began
            )
        depths, nodes, risked = batch.deepest(self.depth), self.nodes, 0.0
        if not all(hosted):
            most, risked = self._model_depth(known, line, self._costs.step(batch.kind, len(rows)), depths)
            depths = [own if host else min(own, most) for own, host in zip(depths, hosted, strict=True)]
            nodes = nodes if any(hosted) else self._sizes[most]
        step = self._costs.step(batch.kind, len(rows)) if self._asks else 0.0

        def goes_on(ids: Sequence[int], sure: Tensor) -> bool:
            return self._goes_on(known, line, step, ids, sure)

        def cut(draft: Draft) -> Draft:
            return draft if draft.host is None else self._cut(list(known.values()), line, draft)

        budget = Budget(depths, nodes, goes_on if self._asks else None, batch.forced())
        return AdaptivePlan(budget, cut, known, risked, line=line, began=began)

    @staticmethod
    def _weigh(batch: Batch, known: Iterable[_Row], line: Line) -> None:
        """Let the rows count most that will be the last to end: the batch takes as long as they do.

        A row that ends earlier saves what it adds to the rounds of the others: little where a block of all
        rows costs hardly more than one token. While others wait for their places, all count alike.
        """
        rounds = [(row.left / its.state.pace) ** _LAST for row, its in zip(batch.rows, known, strict=True)]
        shared = min((len(rounds) - 1) * line.token / line.plain, 1.0)
        for its, left in zip(known, rounds, strict=True):
            its.weight = shared + (1.0 - shared) * _SELDOM * left * len(rounds) / sum(rounds)

    def _state(self, row: int) -> _RowState:
        if len(self._rows) >= _ROWS:  # of rows that were never said to have gone
            del self._rows[next(iter(self._rows))]
        state = self._rows[row] = _RowState(self._on_host)
        return state

    def _belief(self, state: _RowState, sure: bool) -> Belief:
        """Give what is believed of a row's drafter, of its scores or of what it tells nothing of."""
        key = (state.source, sure)
        known = state.beliefs.get(key)
        if known is None:
            known = state.beliefs[key] = Belief(self._beliefs.get(key), scored=sure)
        return known

    def _model_depth(
        self, known: dict[int, _Row], line: Line, step: float, depths: Sequence[int]
    ) -> tuple[int, float]:
        """Choose the depth that a model drafts to, 0 where it does not pay; and what trying it risks."""
        rows = len(depths)
        drafting = [
            (own, self._belief(row.state, False).chance(GUESS_OF_MODEL))
            for own, row in zip(depths, known.values(), strict=True)
            if not row.state.hosted
        ]
        wide = len(drafting) if self._ragged else rows
        tokens, best, most = float(rows), 0, _margin(rows) * rows / line.plain
        deepest = max((own for own, _ in drafting), default=0)
        for depth in range(1, deepest + 1):
            tokens += sum(chance**depth for own, chance in drafting if own >= depth)
            rate = tokens / (line(wide * self._sizes[depth]) + depth * step)
            if rate > most:
                best, most = depth, rate
        if best:
            return deepest if self._asks else best, 0.0  # who asks ends it where it pays no more
        loss = line(wide * self._sizes[1]) - line.plain + step
        could = (rows + wide) / (line.plain + loss) > _margin(rows) * rows / line.plain
        return (1, loss) if deepest and could and loss <= self._allowed else (0, 0.0)

    def _goes_on(
        self, known: dict[int, _Row], line: Line, step: float, ids: Sequence[int], sure: Tensor
    ) -> bool:
        """Tell whether a model's next step pays: against the pace that is kept without it.

        What a model is sure of is known before its token is drawn, so the law allows to end there.
        """
        hoped = 0.0
        for id_, confidence in zip(ids, sure.tolist(), strict=True):
            row = known[id_]
            guess = bounded(confidence)
            row.guesses = (*row.guesses, guess)
            row.reached *= self._belief(row.state, True).chance(guess)
            hoped += row.reached * self._belief(row.state, False).chance(GUESS_OF_MODEL)
        pace = len(known) * max(self._pace, 1.0 / line.plain)
        wider = len(ids) if self._ragged else len(known)
        more = line(wider * (len(row.guesses) + 1)) - line(wider * len(row.guesses))
        return hoped > pace * (step + more)

    # --- behind the draft, before anything is checked

    def _cut(self, rows: list[_Row], line: Line, draft: Draft) -> Draft:
        """Keep what pays, of what was made on the host: by what the host knows alone."""
        assert draft.host is not None
        worth: list[list[float]] = [[] for _ in rows]
        least = [0] * len(rows)  # nodes of rows that a model drafted, which were decided upon before
        for i, (row, nodes) in enumerate(zip(rows, draft.host, strict=True)):
            if nodes is None:
                least[i] = draft.nodes if draft.counts is None else draft.counts[i]
                continue
            row.state.hosted, row.state.source = True, draft.sources[i] if draft.sources else ""
            row.nodes, row.guesses = nodes, guesses_of(nodes)
            worth[i] = self._worth(row, nodes)
        steps = by_rows(worth) if self._ragged else by_columns(worth)
        columns = sum(least) if self._ragged else len(rows) * max(least)
        tokens, floor, seconds = float(len(rows)), line.plain, line.draft + line.token * columns
        plain = tokens / line(columns)
        best, most = 0, 0.0
        for i, (gain, wider, _) in enumerate(steps, start=1):
            tokens += gain * wider
            seconds += line.token * wider
            if tokens > most * (seconds if seconds > floor else floor):
                best, most = i, tokens / max(seconds, floor)
        hopeless = bool(steps) and most < plain * (1.0 - _HOPELESS / len(rows))
        self._pauses = self._left = min(2 * self._pauses + 1, _LONGEST_PAUSE) if hopeless else 0
        counts = kept(steps[: best if most > _margin(len(rows)) * plain else 0], least)
        return draft.cut(counts if self._ragged else max(counts))

    def _worth(self, row: _Row, nodes: HostNodes) -> list[float]:
        """Expect of each node whether it is accepted, all before it included."""
        odds, worth = self._belief(row.state, bool(nodes.scores)).odds, list[float]()
        for parent, guess in zip(nodes.parents, row.guesses, strict=True):
            above = row.weight if parent == ROOT else 0.0 if parent == HOLE else worth[parent]
            worth.append(above * odds * guess / (1.0 - guess + odds * guess) if above > _FAINT else 0.0)
        while worth and not worth[-1]:
            worth.pop()
        return worth

    # --- after the round

    def learn(
        self, plan: Plan, batch: Batch, draft: Draft, outcome: Outcome, seconds: dict[str, float]
    ) -> None:
        """Learn from a round: what was drafted and committed, and the seconds of its parts."""
        assert isinstance(plan, AdaptivePlan)
        by_model = False
        for i, row in enumerate(batch.rows):
            its = plan.rows[row.id]
            drafted = row.stats.drafted_tokens - its.drafted
            its.state.pace += _PACE * (max(len(outcome.tokens[i]), 1) - its.state.pace)
            if its.nodes is not None:
                self._learn_nodes(its, its.nodes, outcome.tokens[i])
            elif drafted:
                by_model, its.state.hosted = True, False
                its.state.source = draft.sources[i] if draft.sources else ""
                ended = row.finished is not None
                self._learn_depths(its, len(outcome.paths[i]), min(draft.depth, drafted), ended=ended)
            if row.finished is not None:
                self._rows.pop(row.id, None)
        if plan.risked and by_model and not any(outcome.paths):
            self._allowed -= plan.risked
        if not batch.first:  # prompts are fed in rows' first rounds
            self._time(plan, batch, draft, outcome, seconds.get("draft", 0.0), by_model=by_model)

    def _time(
        self,
        plan: AdaptivePlan,
        batch: Batch,
        draft: Draft,
        outcome: Outcome,
        drafting: float,
        *,
        by_model: bool,
    ) -> None:
        took, rows = self._now() - plan.began, len(batch.rows)
        self._allowed = min(self._allowed + _LOSS * took, 4.0 * plan.line.plain)
        pace = sum(map(len, outcome.tokens)) / rows / max(took, 1e-9)
        self._pace += _PACE * (pace - self._pace) if self._pace else pace
        counts = draft.counts if self._ragged and draft.counts is not None else [draft.nodes] * rows
        self._costs.add(batch.kind, rows, sum(counts), took - drafting)
        if by_model and self._caught_up:
            self._costs.add_draft(batch.kind, rows, draft.depth, drafting)
        self._caught_up = by_model

    def _learn_nodes(self, row: _Row, nodes: HostNodes, said: Sequence[int]) -> None:
        """Compare what was proposed with what was said, whether or not it was checked."""
        tokens, parents, at, end = nodes.tokens, nodes.parents, ROOT, len(nodes.tokens)
        outcomes: list[tuple[float, bool]] = []
        for token in said:
            right = None
            for node in range(at + 1, end):  # children come behind their parent
                if parents[node] == at:
                    accepted = right is None and tokens[node] == token
                    right = node if accepted else right
                    outcomes.append((row.guesses[node], accepted))
                elif parents[node] > at and right is not None:
                    break
            if right is None:
                break
            at = right
        self._learn(row.state, outcomes, sure=bool(nodes.scores))

    def _learn_depths(self, row: _Row, accepted: int, depth: int, *, ended: bool) -> None:
        """Learn from a model's draft: what was accepted, and the depth at which it ended."""
        found = [True] * min(accepted, depth) + [False] * (accepted < depth and not ended)
        self._learn(row.state, [(GUESS_OF_MODEL, right) for right in found], sure=False)
        if row.guesses:
            self._learn(row.state, list(zip(row.guesses, found, strict=False)), sure=True)

    def _learn(self, state: _RowState, outcomes: list[tuple[float, bool]], *, sure: bool) -> None:
        self._belief(state, sure).learn(outcomes)
        key = (state.source, sure)
        if key not in self._beliefs:
            self._beliefs[key] = Belief(scored=sure)
        self._beliefs[key].learn(outcomes)


def _margin(rows: int) -> float:
    return _MARGIN if rows == 1 else _MARGIN_OF_MANY


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
