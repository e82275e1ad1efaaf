"""Drafter `suffix`: what followed the longest suffixes of the text, in it and in earlier outputs."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import Field, model_validator

from specdec_core import (
    Budget,
    Capabilities,
    Context,
    Draft,
    DrafterConfig,
    DraftLaw,
    Outcome,
    Rows,
    TargetInfo,
    UsageError,
)
from specdec_suffix.expand import Limits, Nodes, Occurrence, expand
from specdec_suffix.history import History
from specdec_suffix.index import ContextIndex
from specdec_suffix.store import check_place, load, save, save_at_the_end, vocabulary


class SuffixConfig(DrafterConfig):
    """Options of `suffix`."""

    num_tokens: int = Field(16, ge=0, description="most tokens to draft a round; deepest node of a tree")
    alpha: float = Field(4.0, gt=0, description="tokens to draft for each token of the match")
    min_probability: float = Field(0.1, ge=0, le=1, description="least estimated probability of a path")
    max_match: int = Field(64, ge=1, le=256, description="longest suffix to look for")
    window: int = Field(16, ge=1, le=1024, description="latest occurrences of a suffix that count")
    tree: bool = Field(False, description="draft a tree, the likeliest paths first, instead of a chain")
    nodes: int = Field(32, ge=1, le=512, description="most nodes of a tree")
    shared: bool = Field(True, description="learn from rows that have ended; false: from the row alone")
    max_history: int = Field(100_000, ge=1000, description="most tokens of ended rows; the oldest go first")
    path: Path | None = Field(None, description="file that keeps the history between runs")

    @model_validator(mode="after")
    def _consistent(self) -> SuffixConfig:
        if self.path is not None and not self.shared:
            raise UsageError(f"path={self.path} keeps what rows share, and shared=false: leave one out")
        return self


class Suffix:
    """Draft by suffix decoding (Oliaro et al. 2024, arXiv 2411.04975).

    The longest suffix of the row that stood earlier in it (prompt or output), and the longest that stood in
    the output of a row that has ended, are looked up; how often which tokens followed gives a chain or a
    tree, with `Draft.scores`. Drafts are a function of committed tokens: those of the row and, with `shared`,
    of rows that ended before. They change how many rounds there are, never the law of the output.
    """

    name = "suffix"
    Config = SuffixConfig

    def __init__(self, config: SuffixConfig) -> None:
        self.config = config
        self.history = History(config.max_history, config.window, config.max_match)
        self.capabilities = Capabilities(
            laws=frozenset({DraftLaw.ONE_HOT}),
            max_depth=config.num_tokens,
            max_nodes=config.nodes if config.tree else None,
            makes_trees=config.tree,
            learns=config.shared,
        )
        self._rows: dict[int, _Row] = {}
        self._place: tuple[Path, str] | None = None  # the file, and whose vocabulary is in it

    def bind(self, target: TargetInfo) -> None:
        """Read the history, and write it when the drafter, or the process, ends.

        Raises:
            UsageError: the file is damaged, foreign, or could not be written.
        """
        path = self.config.path
        if path is None:
            return
        path = path.expanduser().absolute()
        words = vocabulary(target)
        check_place(path)
        if path.exists():
            load(path, self.history, words, target.vocab_size)
            self.capabilities = replace(self.capabilities, next_row=self.history.next_row)
        self._place = (path, words)
        weakref.finalize(self, save_at_the_end, path, self.history, words)

    def save(self) -> None:
        """Write the history now.

        Raises:
            UsageError: there is no `path`, or no target yet.
            OSError: it cannot be written.
        """
        if self._place is None:
            raise UsageError("there is no file to save to: build the drafter with path=FILE")
        path, words = self._place
        save(path, self.history, words)
        self.history.changes = 0

    def admit(self, rows: Rows) -> None:
        """Index the prompts."""
        for row, prompt in zip(rows.ids, rows.prompts, strict=True):
            self._rows[row] = _Row(prompt, self.config)
            self.history.next_row = max(self.history.next_row, row + 1)

    def propose(self, context: Context, budget: Budget) -> Draft:
        """Draft for each row in turn."""
        drafts = [
            self._nodes(context, i, Budget([depth], budget.nodes)) if depth else Nodes()
            for i, depth in enumerate(budget.depth)
        ]
        return Draft.trees(
            [nodes.tokens for nodes in drafts],
            [nodes.parents for nodes in drafts],
            context.device,
            [nodes.scores for nodes in drafts],
        )

    def observe(self, outcome: Outcome) -> None:
        """Add what was committed."""
        for row, tokens in zip(outcome.rows, outcome.tokens, strict=True):
            self._rows[row].extend(tokens)

    def release(self, rows: Sequence[int]) -> None:
        """Keep the outputs for later rows, and forget the rest."""
        for row in rows:
            ended = self._rows.pop(row, None)
            if ended is not None and self.config.shared:
                self.history.learn(ended.tokens[1:], ended.prompt)

    def _nodes(self, context: Context, i: int, budget: Budget) -> Nodes:
        row = self._rows[context.rows[i]]
        row.catch_up(context.row_tokens(i))
        constrained = context.params[i].constraint is not None
        limits = Limits(
            depth=budget.depth[0],
            nodes=min(budget.nodes, self.capabilities.nodes),
            branches=self.config.nodes if self.config.tree and not constrained else 1,
            alpha=self.config.alpha,
            floor=self.config.min_probability,
        )
        nodes = expand(self._occurrences(row), limits)
        return _legal(nodes, context, i, budget.depth[0]) if constrained else nodes

    def _occurrences(self, row: _Row) -> list[Occurrence]:
        """Find the row's last tokens in itself, and in the history; the latest first."""
        found: list[Occurrence] = []
        for index in (row.index, self.history.index):
            positions, length = index.find(row.tokens)
            if length:
                found += [(index.tokens, index.at(position), length) for position in reversed(positions)]
        return found


class _Row:
    """A row's own text: prompt and output."""

    def __init__(self, prompt: Sequence[int], config: SuffixConfig) -> None:
        self.index = ContextIndex(config.window, config.max_match)
        self.prompt = len(prompt)
        self.extend(prompt)

    @property
    def tokens(self) -> array[int]:
        """A GAP, and all that is committed."""
        return self.index.tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Add what was committed."""
        for token in tokens:
            self.index.add(token)

    def catch_up(self, tokens: Sequence[int]) -> None:
        """Add what was committed and not observed."""
        known = len(self.tokens) - 1
        if known < len(tokens):
            self.extend(tokens[known:])


def _legal(nodes: Nodes, context: Context, i: int, depth: int) -> Nodes:
    """Cut a chain where the row's constraint forbids it; where it forces another, draft that."""
    chain = nodes.tokens[: context.legal(i, nodes.tokens)]
    forced = context.forced(i, depth) if chain else []
    if chain[: len(forced)] == forced:
        return Nodes(chain, nodes.parents[: len(chain)], nodes.scores[: len(chain)])
    return Nodes(forced, list(range(-1, len(forced) - 1)), [1.0] * len(forced))
