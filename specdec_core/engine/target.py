"""The target: the model whose output is wanted, as the loop uses it and as drafters see it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from specdec_core.checks.draft_values import CheckedDraft
from specdec_core.contract.distributions import BlockLogits
from specdec_core.contract.draft import HOLE, on_device
from specdec_core.contract.errors import InvalidParameter
from specdec_core.contract.interfaces import CachedModel, Capabilities, Outcome, Rows
from specdec_core.model.allowance import Allowance
from specdec_core.model.attention import unwrap
from specdec_core.model.faster.compiled import Compiled, keep_on_disk, why_not_compiled
from specdec_core.model.faster.optimize import NOTHING, Optimization, Optimizations, Optimized, optimized
from specdec_core.model.graphs import Capture
from specdec_core.model.layers import final_norm, first_layers, head_of
from specdec_core.model.prefixes import LEAST
from specdec_core.model.probe import Probe, probe
from specdec_core.model.replica import Replica
from specdec_core.model.runner import DEFAULT_CHUNK, Forward, Runner
from specdec_core.rows.batch import Batch
from specdec_core.rows.row import Row

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
        offline: bool = False,
        trust_remote_code: bool = False,
        optimize: Optimizations = NOTHING,
    ) -> None:
        device = next(model.parameters()).device
        self._compiles = _compiles(optimize, device)
        if capture is None:
            fixed = Capture.FIXED if self._compiles else Capture.OFF
            capture = Capture.GRAPHS if device.type == "cuda" else fixed
        self._optimize, self._optimized = optimize, list[Optimized]()
        self._allowance = Allowance()
        self.runner = Runner(
            self._faster(model),
            chunk=chunk,
            capture=capture,
            reuse_prefixes=reuse_prefixes,
            max_rows=max_rows,
            allowance=self._allowance,
        )
        self._runners = [self.runner]  # that have a cache of their own
        self.model = self.runner.model
        self.offline, self.trust_remote_code = offline, trust_remote_code
        self.tokenizer, self.max_rows, self.chunk = tokenizer, max_rows, chunk
        self.config = self.model.config.get_text_config(decoder=True)
        self.vocab_size, self.context_limit = self.runner.vocab_size, self.runner.context_limit
        self.device, self.dtype = self.runner.device, self.runner.dtype
        self.input_embeddings: nn.Module = self.model.get_input_embeddings()
        self.output_embeddings: nn.Module = self.model.get_output_embeddings()
        self.companions: Mapping[str, Any] = _companions(self.config)
        self.probed: Probe = probe(self.runner)
        self._compile(self.runner)
        self._top_logits = 0
        self._last: Forward | None = None
        self._scored: Tensor | None = None  # int64 [B, 1 + n]: the token of each scored index

    def _faster(self, model: nn.Module) -> Replica:
        done = optimized(model, self._optimize)
        if done.copied:  # others need not be held
            self._optimized.append(done)
        return done.replica or Replica(unwrap(done.model))

    def _compile(self, runner: Runner) -> None:
        if self._compiles:
            runner.compiled = Compiled(runner.model)

    def check_copies(self) -> None:
        """Insist that no weight was changed of which there are copies; see `Optimized.check`."""
        for done in self._optimized:
            done.check()

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

    def knows(self, prompt: Sequence[int]) -> bool:
        """Whether all of a prompt but its last token is held already, so that a row would not feed it."""
        return self.runner.knows(prompt)

    @property
    def bytes_now(self) -> int:
        """Bytes that the caches take: the target's, and those of drafters' own models."""
        return self._allowance.bytes_now

    @property
    def most_bytes(self) -> int | None:
        """Bytes that the caches keep to together, if what their rows need lets them; None: no limit."""
        return self._allowance.most

    @most_bytes.setter
    def most_bytes(self, most: int | None) -> None:
        self._allowance.most = most

    def bytes_after(self, needs: Sequence[tuple[int, int]], nodes: int) -> int:
        """Bytes that the caches need while these rows are there: all that are, and those to be admitted.

        With a limit (`most_bytes`) of at least that, admitting them keeps to it. Drafters' models are taken
        to read every row, with as many nodes.

        Args:
            needs: prompt tokens and `max_new_tokens` of each row.
            nodes: of the largest draft.
        """
        return sum(
            runner.bytes_for(len(needs), max(runner.slots_for(prompt, new, nodes) for prompt, new in needs))
            for runner in self._runners
            if needs
        )

    def begin(self, batch: Batch) -> None:
        """Let rows that have not been read take over what others that began alike have fed."""
        self.runner.adopt(batch.context)
        for row in batch.rows:
            if not row.stats.target_calls:
                row.stats.reused_tokens = self.runner.held(row.place)

    def pending(self, row: Row) -> int:
        """Count the committed tokens of a row that were not fed yet."""
        return len(row.tokens) - self.runner.held(row.place)

    def read(self, batch: Batch) -> Outcome:
        """Feed the next chunk of a single row's long prompt; return what drafters may observe of it."""
        [row] = batch.rows
        _, forward, fed = next(self.runner.prefill(batch.context))
        row.stats.prefill_calls += 1
        return Outcome(
            rows=(row.id,),
            places=(row.place,),
            tokens=([],),
            paths=([],),
            finished=(None,),
            fed=(fed,),
            # right-aligned where the columns were rounded up
            hidden={layer: states[:, -fed:] for layer, states in forward.hidden.items()},
        )

    def score(self, batch: Batch, checked: CheckedDraft) -> BlockLogits:
        """Run the round's one forward: raw logits."""
        draft = checked.draft
        tokens, parents = (draft.tokens, draft.parents) if draft.nodes else (None, None)
        parents = None if draft.chain else parents
        counts, tree = draft.counts, checked.tree
        self._last = self.runner.forward(batch.context, tokens, parents, counts=counts, tree=tree)
        self._scored = _scored(batch, checked) if self._top_logits else None
        return self._last.logits

    def keep(self, outcome: Outcome) -> Outcome:
        """Keep what was accepted, forget the rest; return the outcome with the states drafters asked for."""
        forward, self._last = self._last, None
        assert forward is not None
        self.runner.keep(outcome)
        if self._top_logits:
            values, ids = forward.logits.top(self._top_logits)
            outcome = replace(outcome, top_logits=(ids, values), scored=self._scored)
        if forward.hidden:
            outcome = _with_hidden(outcome, forward)
        return outcome

    def head(self, hidden: Tensor) -> Tensor:
        """Apply the model's own head; see `TargetInfo.head`."""
        with self.runner.replica.exclusive:
            return self._head(hidden)

    @cached_property
    def _head(self) -> Callable[[Tensor], Tensor]:
        return head_of(self.model)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply what stands before the head; see `TargetInfo.final_norm`."""
        with self.runner.replica.exclusive:
            return self._final_norm(hidden)

    @cached_property
    def _final_norm(self) -> Callable[[Tensor], Tensor]:
        return final_norm(self.model)

    def cached(self, model: nn.Module) -> CachedModel:
        """Wrap a drafter's own model.

        Raises:
            UnsupportedModel: its state cannot be rolled back.
        """
        runner = Runner(
            self._faster(model),
            chunk=self.chunk,
            capture=self.runner.steps.capture,
            reuse_prefixes=self.runner.reuses_prefixes,
            max_rows=self.max_rows,
            allowance=self._allowance,
        )
        runner.trees = probe(runner).trees
        self._compile(runner)
        self._runners.append(runner)
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
        early = Runner(
            short,
            chunk=self.chunk,
            capture=self.runner.steps.capture,
            lender=self.runner,
            max_rows=self.max_rows,
        )
        early.trees = self.probed.trees
        return early


def _compiles(optimize: Optimizations, device: torch.device) -> bool:
    """Whether forwards are compiled; where they cannot be, say why."""
    if Optimization.COMPILE not in optimize.chosen:
        return False
    if reason := why_not_compiled(device):
        logger.warning("optimize=compile has no effect here: %s", reason)
        return False
    keep_on_disk()
    return True


def _scored(batch: Batch, checked: CheckedDraft) -> Tensor:
    """Give the last pending token and the nodes' tokens: int64 [B, 1 + n], -1 where there is no node."""
    last = batch.context.tokens.gather(1, batch.context.lengths.unsqueeze(-1) - 1)
    draft = checked.draft
    return torch.cat([last, draft.tokens.masked_fill(draft.parents == HOLE, -1)], dim=1)


def _with_hidden(outcome: Outcome, forward: Forward) -> Outcome:
    """Line up, row by row, the states of the pending tokens and of the accepted nodes."""
    index = []
    for pending, path in zip(forward.pending, outcome.paths, strict=True):
        columns = range(forward.columns - pending, forward.columns)
        index.append([*columns, *(forward.columns + node for node in path)])
    fed = tuple(map(len, index))
    width = max(fed)
    padded = [row + [0] * (width - len(row)) for row in index]
    at = on_device(padded, next(iter(forward.hidden.values())).device).unsqueeze(-1)
    hidden = {
        layer: states.gather(1, at.expand(-1, -1, states.shape[-1]))
        for layer, states in forward.hidden.items()
    }
    return replace(outcome, fed=fed, hidden=hidden)


def _companions(config: Any) -> Mapping[str, Any]:
    """Read `specdec.json` from the folder the target was loaded from."""
    folder = Path(getattr(config, "_name_or_path", "") or "")
    file = folder / "specdec.json"
    if not config._name_or_path or not file.is_file():
        return {}
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return {name: _placed(folder, part, name == "draft") for name, part in found.items()}


def _placed(folder: Path, part: Any, surely: bool) -> Any:
    """Make the relative path of what lies in the folder whole; leave other values as they are."""
    here = surely or (isinstance(part, str) and part and (folder / part).exists())
    return str(folder / part) if here else part
