"""The target: the model whose output is wanted, as the loop uses it and as drafters see it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec_core.errors import InvalidParameter
from specdec_core.guard import CheckedDraft
from specdec_core.interfaces import CachedModel, Capabilities, Outcome, Rows
from specdec_core.model.graphs import Capture
from specdec_core.model.layers import apply_head, first_layers
from specdec_core.model.prefixes import LEAST
from specdec_core.model.probe import Probe, probe
from specdec_core.model.runner import DEFAULT_CHUNK, Forward, Runner
from specdec_core.rows import Batch

logger = logging.getLogger("specdec")


class Target:
    """Serves the loop (`prefill`, `score`, `keep`) and drafters (`TargetInfo`).

    Raises:
        UnsupportedModel: the model's state cannot be rolled back.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any | None,
        *,
        max_rows: int,
        chunk: int = DEFAULT_CHUNK,
        reuse_prefixes: bool = True,
        capture: Capture | None = None,
    ) -> None:
        if capture is None:
            capture = Capture.GRAPHS if next(model.parameters()).is_cuda else Capture.OFF
        self.runner = Runner(model, chunk=chunk, capture=capture, reuse_prefixes=reuse_prefixes)
        self.model = self.runner.model
        self.tokenizer, self.max_rows, self.chunk = tokenizer, max_rows, chunk
        self.config = self.model.config.get_text_config(decoder=True)
        self.vocab_size, self.context_limit = self.runner.vocab_size, self.runner.context_limit
        self.device, self.dtype = self.runner.device, self.runner.dtype
        self.input_embeddings: nn.Module = self.model.get_input_embeddings()
        self.output_embeddings: nn.Module = self.model.get_output_embeddings()
        self.companions: Mapping[str, Any] = _companions(self.config)
        self.probed: Probe = probe(self.runner)
        self._top_logits = 0
        self._last: Forward | None = None

    def serve(self, capabilities: Capabilities) -> None:
        """Gather in every forward what a drafter needs.

        Raises:
            InvalidParameter: it asks for a layer that the target does not have.
        """
        layers = self.config.num_hidden_layers
        for layer in capabilities.hidden_layers:
            if not 0 <= layer <= layers:
                raise InvalidParameter(f"hidden layer {layer} does not exist: the target has 0 to {layers}")
        self.runner.hidden_layers = capabilities.hidden_layers
        self._top_logits = capabilities.top_logits

    def admit(self, rows: Rows, nodes: int) -> None:
        """Reserve room for rows and the largest draft behind each."""
        self.runner.admit(rows, nodes)

    def release(self, places: Sequence[int]) -> None:
        """Forget these places."""
        self.runner.release(places)

    def shares(self, prompt: int) -> bool:
        """Whether rows of one prompt of this length feed it only once."""
        return prompt > LEAST and self.runner.reuses_prefixes and not self.runner.hidden_layers

    def prefill(self, batch: Batch) -> Iterator[Outcome]:
        """Feed the earlier chunks of long prompts; yield what drafters may observe of each call."""
        self.runner.adopt(batch.context)
        for row in batch.rows:
            if not row.stats.rounds:
                row.stats.reused_tokens = self.runner.held(row.place)
        for i, forward, fed in self.runner.prefill(batch.context):
            row = batch.rows[i]
            row.stats.prefill_calls += 1
            yield Outcome(
                rows=(row.id,),
                places=(row.place,),
                tokens=([],),
                paths=([],),
                finished=(None,),
                fed=(fed,),
                # right-aligned where the columns were rounded up
                hidden={layer: states[:, -fed:] for layer, states in forward.hidden.items()},
            )

    def score(self, batch: Batch, checked: CheckedDraft) -> Tensor:
        """Run the round's one forward: raw logits [B, 1 + n, V]."""
        tokens = checked.draft.tokens if checked.tree is not None else None
        self._last = self.runner.forward(batch.context, tokens, checked.tree)
        return self._last.logits

    def keep(self, outcome: Outcome) -> Outcome:
        """Keep what was accepted, forget the rest; return the outcome with the states drafters asked for."""
        forward, self._last = self._last, None
        assert forward is not None
        self.runner.keep(outcome)
        if self._top_logits:
            values, ids = forward.logits.topk(self._top_logits, dim=-1)
            outcome = replace(outcome, top_logits=(ids, values))
        if forward.hidden:
            outcome = _with_hidden(outcome, forward)
        return outcome

    def head(self, hidden: Tensor) -> Tensor:
        """Apply the model's own head; see `TargetInfo.head`."""
        return apply_head(self.model, hidden)

    def cached(self, model: nn.Module) -> CachedModel:
        """Wrap a drafter's own model.

        Raises:
            UnsupportedModel: its state cannot be rolled back.
        """
        runner = Runner(
            model,
            chunk=self.chunk,
            capture=self.runner.steps.capture,
            reuse_prefixes=self.runner.reuses_prefixes,
        )
        runner.trees = probe(runner).trees
        return runner

    def early_layers(self, exit_layer: int) -> CachedModel:
        """Give the target's first layers and head as a model that borrows the target's cache.

        Raises:
            InvalidParameter: there is no such exit.
            UnsupportedModel: the list of layers is not found.
        """
        last = self.config.num_hidden_layers - 1
        if not 1 <= exit_layer <= last:
            raise InvalidParameter(f"layer={exit_layer} is no early exit of this target; use 1 to {last}")
        short = first_layers(self.model, exit_layer)
        early = Runner(short, chunk=self.chunk, capture=self.runner.steps.capture, lender=self.runner)
        early.trees = self.probed.trees
        return early


def _with_hidden(outcome: Outcome, forward: Forward) -> Outcome:
    """Line up, row by row, the states of the pending tokens and of the accepted nodes."""
    index = []
    for pending, path in zip(forward.pending, outcome.paths, strict=True):
        columns = range(forward.columns - pending, forward.columns)
        index.append([*columns, *(forward.columns + node for node in path)])
    fed = tuple(map(len, index))
    width = max(fed)
    at = torch.tensor([row + [0] * (width - len(row)) for row in index])
    hidden = {}
    for layer, states in forward.hidden.items():
        where = at.to(states.device)[:, :, None].expand(-1, -1, states.shape[-1])
        hidden[layer] = states.gather(1, where)
    return replace(outcome, fed=fed, hidden=hidden)


def _companions(config: Any) -> Mapping[str, Any]:
    """Read `specdec.json` from the folder the target was loaded from."""
    folder = Path(getattr(config, "_name_or_path", "") or "")
    file = folder / "specdec.json"
    if not config._name_or_path or not file.is_file():
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {name: str(folder / part) if name == "draft" else part for name, part in found.items()}
