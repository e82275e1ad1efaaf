"""Draft a chain with a `CachedModel`, one forward a token: `small_model` and `early_exit`."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from specdec_core import HOLE, Capabilities, Context, Draft, DrafterConfig, DraftLaw
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
    """Drafts one chain a row; every row's own budget, confidence and room end it before a draw."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        law = config.draft.law
        self.capabilities = Capabilities(laws=frozenset({law}), max_depth=config.num_tokens)

    def draft(self, context: Context, depths: list[int], nodes: int) -> Draft:
        """Draft for rows that all have room."""
        depths = [min(depth, nodes) for depth in depths]
        chain = _Chain(self.config, context, depths)
        model, vocab_size = self.source.model, self.source.vocab_size
        logits = model.extend(context)[:, 0]
        while chain.add(aligned(logits, vocab_size)):
            fed = len(chain.tokens) - 1
            logits = model.extend(context, chain.tokens[-1].unsqueeze(1), chain.parents(), fed)[:, 0]
        return chain.finished()


class _Chain:
    """The chains of a batch as they grow."""

    def __init__(self, config: ChainConfig, context: Context, depths: list[int]) -> None:
        self._config, self._context, self._depths = config, context, depths
        self._limits = torch.tensor(depths, device=context.device)
        self._going: Tensor | None = None  # bool [B]: rows that have not stopped
        self._score: Tensor | None = None  # float32 [B]: chance that all so far are accepted
        self.tokens: list[Tensor] = []  # int64 [B] each
        self._parents: list[Tensor] = []  # int64 [B] each
        self._probs: list[Tensor] = []  # float32 [B, V] each
        self._scores: list[Tensor] = []  # float32 [B] each

    def add(self, logits: Tensor) -> bool:
        """Draw one more token from logits [B, V]; say whether the model is to read it."""
        depth = len(self.tokens)
        paths = torch.stack(self.tokens, dim=1) if depth else None
        scores = q_scores(self._context, logits, self._config.temperature, paths)
        sure = confidence(scores)
        going = (self._limits > depth) & (sure >= self._config.min_confidence)
        going = going if self._going is None else going & self._going
        if self._all_stopped(going):
            return False
        self._going, self._score = going, sure if self._score is None else sure * self._score
        self.tokens.append(self._drawn(scores, depth))
        self._parents.append(torch.where(going, depth - 1, HOLE))
        self._scores.append(self._score)
        return depth + 1 < max(self._depths)

    def parents(self) -> Tensor:
        """int64 [B, tokens so far]."""
        return torch.stack(self._parents, dim=1)

    def finished(self) -> Draft:
        """Make the draft."""
        rows, n = len(self._depths), len(self.tokens)
        if not n:
            return Draft.empty(rows, self._context.device)
        parents = self.parents()
        counts = [min(depth, n) for depth in self._depths]
        if self._decides_on_host:
            counts = (parents != HOLE).sum(dim=1).tolist()
        return Draft(
            tokens=torch.stack(self.tokens, dim=1),
            parents=parents,
            laws=torch.full((rows,), self._config.draft.law, dtype=torch.uint8, device=parents.device),
            depth=n,
            width=1,
            probs=torch.stack(self._probs, dim=1) if self._probs else None,
            scores=torch.stack(self._scores, dim=1),
            counts=tuple(counts),
        )

    def _drawn(self, scores: Tensor, depth: int) -> Tensor:
        law, rng = self._config.draft.law, self._context.rng
        if law == DraftLaw.ONE_HOT:
            return scores.argmax(dim=-1)
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

    def _all_stopped(self, going: Tensor) -> bool:
        return self._decides_on_host and not bool(going.any())
