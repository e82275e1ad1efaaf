"""Drafter `small_model`: a smaller model of the target's family drafts a chain."""

from __future__ import annotations

from specdec_core import TargetInfo
from specdec_drafters._cached import own_draft_model
from specdec_drafters._chain import ChainConfig, ChainDrafter
from specdec_drafters._loading import OwnModelConfig


class SmallModelConfig(ChainConfig, OwnModelConfig):
    """Options of `small_model`."""


class SmallModel(ChainDrafter):
    """Draft with a model of its own that shares the target's tokenizer (Leviathan et al. 2023).

    By default each token is the likeliest one under q: a fixed function of the context, exact under every
    verifier. `draft=sampled` draws from q and gives it to the verifier; `draft=coupled` draws with the noise
    that the target will draw with, for the verifiers `greedy` and `match`.
    """

    name = "small_model"
    Config = SmallModelConfig

    def bind(self, target: TargetInfo) -> None:
        """Load the model; refuse another vocabulary, or a state that cannot be rolled back."""
        self._draft_model = own_draft_model(target, self.config, self.name)
