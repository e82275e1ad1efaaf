"""Drafter `early_exit`: the target's own first layers, and its head, draft a chain."""

from __future__ import annotations

from pydantic import Field

from specdec_core import TargetInfo
from specdec_drafters._cached import early_draft_model
from specdec_drafters._chain import ChainConfig, ChainDrafter


class EarlyExitConfig(ChainConfig):
    """Options of `early_exit`."""

    layer: int | None = Field(
        None,
        description="how many layers draft, 1 to one less than the target has; default: the exit that the "
        "target ships (`exit_layer` in its specdec.json), else a third of its layers",
    )


class EarlyExit(ChainDrafter):
    """Draft with the target's first layers over the target's own cache (LayerSkip, Elhoushi et al. 2024).

    Pays off for targets that were trained to exit early. Weights, cache and prompt are the target's: nothing
    is loaded, and nothing read twice but the tokens of a round.
    """

    name = "early_exit"
    Config = EarlyExitConfig

    def bind(self, target: TargetInfo) -> None:
        """Borrow the layers; refuse an exit that the target does not have."""
        self._draft_model = early_draft_model(target, self.config.layer)
