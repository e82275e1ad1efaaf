"""Draft a chain with a `CachedModel`, one forward a token: `small_model` and `early_exit`."""

from __future__ import annotations

from functools import cached_property
from typing import Any

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
    on_device,
    top_token,
)
from specdec_drafters._cached import CachedDrafter
from specdec_drafters._law import Drawing, Temperature, confidence, q_mask, q_scores
from specdec_drafters._vocabulary import aligned


class ChainConfig(DrafterConfig):
    """Options of a drafter of chains."""

    num_tokens: int = Field(5, ge=0, description="most tokens to draft a round")
    draft: Drawing = Field(
        Drawing.GREEDY,
        description="greedy: the likeliest token; sampled: drawn from q; coupled: drawn with the target's "
        "own noise, for the verifiers greedy and match",
    )
    temperature: Temperature = None
    min_confidence: float = Field(
        0.0, ge=0, le=1, description="stop before a token whose likeliest choice is less probable; 0: never"
    )


class ChainDrafter(CachedDrafter):
    """Drafts one chain a row; every row's own budget and confidence end it before a draw."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        law = config.draft.law
        self.capabilities = Capabilities(laws=frozenset({law}), max_depth=config.num_tokens, asks=True)

    def draft(self, context: Context, budget: Budget) -> Draft:
        """Draft for rows that all have a depth."""
        chain = _Chain(self.config, context, budget)
        model, vocab_size = self.draft_model.cached, self.draft_model.vocab_size
        logits = model.extend(context)[:, 0]
        while chain.add(aligned(logits, vocab_size)):
            fed = len(chain.tokens) - 1
            logits = model.extend(context, chain.tokens[-1].unsqueeze(1), None, fed)[:, 0]
        return chain.finished()


class _Chain:
    """The chains of a batch as they grow."""

    def __init__(self, config: ChainConfig, context: Context, budget: Budget) -> None:
        self._config, self._context, self._goes_on = config, context, budget.goes_on
        self._depths = [min(depth, budget.nodes) for depth in budget.depth]
        self._going: list[Tensor] = []  # bool [B] each: rows that have not stopped; where any may stop early
        self.tokens: list[Tensor] = []  # int64 [B] each
        self._probs: list[Tensor] = []  # float32 [B, V] each
        self._sure: list[Tensor] = []  # float32 [B] each

    def add(self, logits: Tensor) -> bool:
        """Draw one more token from logits [B, V]; say whether the model is to read it."""
        depth = len(self.tokens)
        paths = torch.stack(self.tokens, dim=1) if depth else None
        scores = q_scores(self._context, logits, self._config.temperature, paths)
        asks = self._goes_on is not None or self._config.min_confidence > 0
        sure = confidence(scores) if asks else None
        if sure is not None and self._config.min_confidence > 0:
            going = sure >= self._config.min_confidence
            going = going & self._going[-1] if depth else going
            if self._decides_on_host and not self._any_left(going):
                return False
            self._going.append(going)
        self.tokens.append(self._drawn(scores, depth))
        if sure is not None:
            self._sure.append(sure)
        if depth + 1 >= max(self._depths):
            return False
        return self._goes_on is None or sure is None or self._goes_on(self._context.rows, sure)

    def finished(self) -> Draft:
        """Make the draft."""
        rows, n = len(self._depths), len(self.tokens)
        if not n:
            return Draft.empty(rows, self._context.device)
        parents = self._parents(n)
        counts = [min(depth, n) for depth in self._depths]
        if self._decides_on_host:
            counts = (parents != HOLE).sum(dim=1).tolist()
        return Draft.of(
            torch.stack(self.tokens, dim=1),
            parents,
            self._config.draft.law,
            probs=torch.stack(self._probs, dim=1) if self._probs else None,
            scores=torch.stack(self._sure, dim=1).cumprod(dim=1) if self._sure else None,
            counts=tuple(counts),
            chain=True,
        )

    def _parents(self, n: int) -> Tensor:
        """Hang each node on the one before, up to its row's limit and first doubt: int64 [B, n]."""
        index = torch.arange(n, device=self._context.device)
        parents = (index - 1).repeat(len(self._depths), 1)
        if min(self._depths) < n:
            parents = parents.masked_fill(index >= self._limits.unsqueeze(1), HOLE)
        if self._going:
            parents = parents.masked_fill(~torch.stack(self._going, dim=1), HOLE)
        return parents

    def _drawn(self, scores: Tensor, depth: int) -> Tensor:
        law, rng = self._config.draft.law, self._context.rng
        if law == DraftLaw.ONE_HOT:
            return top_token(scores)
        scores = q_mask(self._context, scores, self._config.temperature)
        if law == DraftLaw.COUPLED:
            return rng.target_draw(scores, depth)
        q = scores.softmax(dim=-1)
        self._probs.append(q)
        return rng.categorical(q, node=depth, draw=0)

    @property
    def _decides_on_host(self) -> bool:
        """Whether forwards are skipped for want of confidence: only where a look at it costs no transfer."""
        return self._config.min_confidence > 0 and self._context.device.type == "cpu"

    @cached_property
    def _limits(self) -> Tensor:
        """int64 [B]."""
        return on_device(self._depths, self._context.device)

    def _any_left(self, going: Tensor) -> bool:
        return bool((going & (self._limits > len(self.tokens))).any())
