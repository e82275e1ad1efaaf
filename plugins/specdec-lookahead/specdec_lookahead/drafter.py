"""Drafter `lookahead`: n-grams that the target makes itself, in the same forward that checks the draft."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import Field
from torch import Tensor

from specdec_core import (
    HOLE,
    Budget,
    Capabilities,
    Context,
    Draft,
    DrafterConfig,
    DraftLaw,
    Outcome,
    Rows,
    TargetInfo,
)
from specdec_lookahead.layout import Layout
from specdec_lookahead.pool import Pool


class LookaheadConfig(DrafterConfig):
    """Options of `lookahead`."""

    window: int = Field(
        5, ge=1, le=64, description="columns of the window: places ahead that are guessed at once"
    )
    ngram: int = Field(4, ge=2, le=16, description="tokens of an n-gram, the one that it follows included")
    guesses: int = Field(5, ge=1, le=64, description="most n-grams to check a round")
    pool: int = Field(512, ge=8, le=65536, description="n-grams to remember for each row")
    from_prompt: bool = Field(True, description="put the prompt's own n-grams into the pool at first")


class Lookahead:
    """Draft with the target's own parallel guesses (Fu et al. 2024, arXiv 2402.02057).

    A window of guessed tokens is fed behind the text, in a tree that gives each the context that Jacobi
    iteration wants. What the target says behind the window's last tokens (`Outcome.top_logits`) makes one
    n-gram a column for the pool, and the window's next tokens. The draft proper are those n-grams of the pool
    that follow the last token. The window is part of the draft, checked like the rest: its tokens are fixed
    before the round, as ONE_HOT wants, and are rarely right.
    """

    name = "lookahead"
    Config = LookaheadConfig

    def __init__(self, config: LookaheadConfig) -> None:
        self.config = config
        self._layout = Layout(config.window, config.ngram, config.guesses)
        self.capabilities = Capabilities(
            laws=frozenset({DraftLaw.ONE_HOT}),
            max_depth=self._layout.depth,
            max_nodes=self._layout.nodes,
            makes_trees=True,
            top_logits=1,
        )

    def bind(self, target: TargetInfo) -> None:
        """Make room for every row."""
        config, size, device = self.config, self._layout, target.device
        self._pool = Pool(target.max_rows, max(config.pool, config.window), config.ngram, device)
        self._window = torch.zeros(
            target.max_rows, size.levels, size.window, dtype=torch.int64, device=device
        )
        self._window_parents = size.window_parents.to(device)
        self._depths = size.depths.to(device)

    def admit(self, rows: Rows) -> None:
        """Begin with a window of the prompt's last tokens, over and over."""
        for place, prompt in zip(rows.places, rows.prompts, strict=True):
            columns = range(self._layout.window)
            start = [
                [prompt[(i + level - self._layout.depth) % len(prompt)] for i in columns]
                for level in range(self._layout.levels)
            ]
            self._window[place] = torch.tensor(start).to(self._window.device, non_blocking=True)
            self._pool.begin(place, prompt if self.config.from_prompt else ())

    def propose(self, context: Context, budget: Budget) -> Draft:
        """Put n-grams that follow the last token before the window; a small budget cuts the window first."""
        rows = len(context.rows)
        last = context.tokens.gather(1, context.lengths.unsqueeze(1) - 1).squeeze(1)
        found = self._pool.find(context.places, last, self._layout.guesses)
        window = self._window[_index(context.places, context.device)].flatten(1)
        tokens = torch.cat([found.clamp(min=0).flatten(1), window], dim=1)
        parents = torch.cat([self._layout.guess_parents(found), self._window_parents.expand(rows, -1)], dim=1)
        limits = _index(budget.depth, context.device).unsqueeze(1)
        parents = parents.masked_fill(self._depths > limits, HOLE)
        parents = parents.masked_fill((parents != HOLE).cumsum(dim=1) > budget.nodes, HOLE)
        return Draft.of(
            tokens,
            parents,
            DraftLaw.ONE_HOT,
            depth=self._layout.depth,
            width=self._layout.width,
            counts=tuple(self._layout.nodes if depth else 0 for depth in budget.depth),
        )

    def observe(self, outcome: Outcome) -> None:
        """Take in an n-gram of each column, and move the window to where the text now ends."""
        said = [i for i, tokens in enumerate(outcome.tokens) if tokens]
        if outcome.top_logits is None or outcome.scored is None or not said:
            return
        places = [outcome.places[i] for i in said]
        row, place = _index(said, self._window.device), _index(places, self._window.device)
        window = self._window[place]  # [b, N - 1, W]
        scored, best = (self._of_window(x[row]) for x in (outcome.scored, outcome.top_logits[0][..., 0]))
        fed = scored == window  # not where the budget, or another's draft, left a node out
        valid = fed[:, 0].cumprod(dim=-1).bool() & fed.all(dim=1)  # [b, W]
        new = best[:, -1].where(valid, window[:, -1])  # what the target says behind each column
        grams = torch.cat([window, new.unsqueeze(1)], dim=1)
        self._pool.add(places, grams.transpose(1, 2), valid)
        columns = torch.arange(self._layout.window, device=window.device)
        beyond = _index([len(outcome.tokens[i]) - 1 for i in said], window.device).unsqueeze(1)
        at = (columns + beyond) % self._layout.window  # a column that the text has passed begins anew
        self._window[place] = grams[:, 1:].gather(2, at.unsqueeze(1).expand(-1, self._layout.levels, -1))

    def release(self, rows: Sequence[int]) -> None:
        """Keep nothing: a place is emptied when its next row begins."""

    def _of_window(self, scored: Tensor) -> Tensor:
        """Take the window's part of [b, 1 + n]: [b, N - 1, W], -1 where the draft was narrower."""
        first, levels, window = 1 + self._layout.first, self._layout.levels, self._layout.window
        part = scored[:, first : first + levels * window]
        part = torch.nn.functional.pad(part, (0, levels * window - part.shape[1]), value=-1)
        return part.reshape(-1, levels, window)


def _index(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values).to(device, non_blocking=True)
