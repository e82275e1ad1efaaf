"""`CachedModel` over an unmodified Hugging Face model: batched rows, trees, and a cache that can forget."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specdec_core.contract.distributions import BlockLogits
from specdec_core.contract.draft import on_device
from specdec_core.contract.errors import UnsupportedModel
from specdec_core.contract.interfaces import Context, Outcome, Rows
from specdec_core.contract.tree import Tree
from specdec_core.model.allowance import Allowance
from specdec_core.model.attention import AttentionPlan, context_limit, name_attention, plan_attention, unwrap
from specdec_core.model.block import Block
from specdec_core.model.cache import SlotCache
from specdec_core.model.faster.compiled import Compiled
from specdec_core.model.graphs import Capture, FixedSteps, Inputs, Outputs
from specdec_core.model.grouped import feeding
from specdec_core.model.layers import BlockStates, blocks_of
from specdec_core.model.layout import Layout, lay_out, lay_out_row
from specdec_core.model.places import Places
from specdec_core.model.prefixes import Prefixes
from specdec_core.model.ragged import Ragged
from specdec_core.model.replica import Replica
from specdec_core.model.shapes import VIEW, Shape

DEFAULT_CHUNK = 512
_MOST_FIXED_COLUMNS = 8  # pending tokens of a block that runs at fixed shapes


@dataclass(frozen=True, eq=False)
class Forward:
    """What one forward gave for its B rows."""

    logits: BlockLogits  # [B, kept, V]
    hidden: dict[int, Tensor]  # layer -> [B, columns + m, H], the pending tokens right-aligned
    columns: int
    pending: tuple[int, ...]  # tokens fed of each row, before the nodes


class Runner:
    """A model, its slots, and how many of them each place holds.

    At the top of a round every place holds exactly a prefix of its row's committed tokens; the rest is
    pending. What is fed of a draft is forgotten by `keep`, but for the leading accepted nodes.

    Args:
        model: of which a replica runs; or a replica; or, with a lender, modules of the lender's replica.
        chunk: most pending tokens of one forward; longer prompts are fed in chunks first.
        lender: the runner whose cache and first layers this one borrows; it writes only behind what the
            lender holds, and what it wrote is forgotten when the lender next feeds or keeps.
        reuse_prefixes: let rows take over slots of rows that began alike.
        max_rows: places are fewer than this; None: no limit is known.
        allowance: shared with the caches that are to keep to one limit with this one.
        hidden_layers: layers (as in HF's `hidden_states`) whose states every forward returns.
    """

    def __init__(
        self,
        model: nn.Module | Replica,
        *,
        chunk: int = DEFAULT_CHUNK,
        capture: Capture = Capture.OFF,
        hidden_layers: Sequence[int] = (),
        lender: Runner | None = None,
        reuse_prefixes: bool = True,
        max_rows: int | None = None,
        allowance: Allowance | None = None,
    ) -> None:
        self._lender, self._borrowers = lender, list[Runner]()
        if lender is None:
            self.replica = model if isinstance(model, Replica) else Replica(unwrap(model))
            self.model: Any = self.replica.model
            self.plan = plan_attention(self.replica)
        else:
            lender._borrowers.append(self)
            self.replica, self.model, self.plan = lender.replica, model, lender.plan
        self._version = self.replica.version
        self.chunk, self.max_rows = chunk, max_rows
        self.compiled: Compiled | None = None  # runs in place of the model at fixed shapes
        self._states = BlockStates(())
        self.hidden_layers = tuple(hidden_layers)
        embedding: Any = self.model.get_input_embeddings()
        self.device: torch.device = embedding.weight.device
        if capture is Capture.GRAPHS and self.device.type != "cuda":
            capture = Capture.OFF  # a CUDA graph would hold nothing, and replay it
        self.steps = FixedSteps(capture)
        self._prefixes = Prefixes(self.model)
        allowance, fixed = allowance or Allowance(), capture is not Capture.OFF
        places = Places(self._prefixes, allowance, fixed=fixed, max_rows=max_rows)
        self.places: Places = places if lender is None else lender.places
        self.cache: SlotCache = self.places.cache
        self._moves = self.cache.moves
        config = self.model.config.get_text_config(decoder=True)
        head: Any = self.model.get_output_embeddings()
        self._embeddings: int = embedding.weight.shape[0]
        self.vocab_size: int = getattr(head, "out_features", config.vocab_size)  # packed weights tell no size
        self.context_limit = context_limit(config)
        self.dtype: torch.dtype = self.model.dtype
        self.trees = True  # until a probe says otherwise
        self.reuses_prefixes = reuse_prefixes
        self._held: dict[int, int] = {}  # place -> slots held
        self._nodes: dict[int, int] = {}  # place -> nodes fed this round
        self._fresh: set[int] = set()  # admitted, and not looked for a known prefix yet

    @property
    def plan(self) -> AttentionPlan:
        """How masks and the cache are handed over; the replica attends as it says."""
        return self._plan

    @plan.setter
    def plan(self, plan: AttentionPlan) -> None:
        self._plan = plan
        if self._lender is None:
            name_attention(self.replica, plan)

    def _gathered(self) -> AbstractContextManager[dict[int, Tensor]]:
        return self._states.gathered() if self._states.layers else nullcontext({})

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers whose states every forward returns."""
        return self._states.layers

    @hidden_layers.setter
    def hidden_layers(self, layers: Sequence[int]) -> None:
        self._states.remove()
        self._states = states = BlockStates(layers)
        if self.compiled is not None:
            self.compiled.forget()
        if not layers:
            return
        if not self.replica.whole:
            raise UnsupportedModel(
                f"the states of {type(self.model).__name__} cannot be gathered: a forward was replaced by "
                "one that holds the model itself"
            )
        self.replica.change("states", lambda: states.install(blocks_of(self.model)))

    @property
    def ragged(self) -> bool:
        """Whether blocks are fed without their padding."""
        return self.plan.ragged and self.steps.capture is Capture.OFF

    @property
    def warm_up(self) -> int:
        """How many uses of a new shape may cost much more than later ones: it is captured, or compiled."""
        return max(self.steps.warm_up, 0 if self.compiled is None else 1)

    def admit(self, rows: Rows, nodes: int) -> None:
        """Reserve room for whole rows and `nodes` drafted nodes behind each."""
        if not self._held:
            self._follow()
        needs: dict[int, int] = {}
        for place, prompt, params in zip(rows.places, rows.prompts, rows.params, strict=True):
            needs[place] = self.slots_for(len(prompt), params.max_new_tokens, nodes)
            self._held[place] = 0 if self._lender is None else self._lender._held.get(place, 0)
            self._nodes[place] = 0
            self._fresh.add(place)
        most = None if self.context_limit is None else self.slots_for(self.context_limit, 0, nodes)
        if self._lender is None:
            self.places.admit(needs, most)
        else:
            self.places.widen(needs, most)
        self._settle(rows.places)

    def _follow(self) -> None:
        """Run the model as it is now; while rows are under way it stays what it was."""
        version = self.replica.refresh() if self._lender is None else self.replica.version
        embedding: Any = self.model.get_input_embeddings()
        now = embedding.weight.device, self.model.dtype, embedding.weight.shape[0]
        if now != (self.device, self.dtype, self._embeddings):
            raise UnsupportedModel(
                "the model was moved, cast or given other embeddings after this decoder was built: build a "
                "new one"
            )
        if self._prefixes.check_weights() or version != self._version:
            self._prefixes.forget()
            self.steps.drop()  # graphs hold the old adapters and weights
        if self.compiled is not None:
            self.compiled.check()
        self._version = version

    def release(self, places: Sequence[int]) -> None:
        """Forget these places; what their slots hold stays for rows that begin alike."""
        for place in places:
            self._held.pop(place, None)
            self._nodes.pop(place, None)
            self._fresh.discard(place)
        if self._lender is None:
            self.places.release(places)
        for borrower in self._borrowers:
            borrower.release(places)

    def slots_for(self, prompt: int, new: int, nodes: int) -> int:
        """Count the slots of a row with such a prompt, so many new tokens at most, and drafts of `nodes`."""
        room = max(prompt + new, 1)
        if self.context_limit is not None:
            room = min(room, self.context_limit)
        # A view as wide as the cache would be compiled by itself.
        return room + nodes + (0 if self.compiled is None else VIEW)

    def bytes_for(self, places: int, slots: int) -> int:
        """Bytes that rows of so many slots each need; a borrower needs none of its own."""
        return self.places.bytes_for(places, slots) if self._lender is None else 0

    def knows(self, tokens: Sequence[int]) -> bool:
        """Whether a row that begins with these tokens would have to feed the last one only."""
        if self.hidden_layers or not self.reuses_prefixes:
            return False
        return self._prefixes.find(tokens)[1] == len(tokens) - 1

    def held(self, place: int) -> int:
        """Count the slots a place holds: a prefix of its row's committed tokens."""
        return self._held[place]

    def prefill(self, context: Context) -> Iterator[tuple[int, Forward, int]]:
        """Feed what exceeds one chunk, row by row; yield (row, forward, tokens fed) after each call."""
        self.adopt(context)
        for i, place in enumerate(context.places):
            while (pending := context.host_lengths[i] - self._held[place]) > self.chunk:
                tokens = self._pending(context, i, min(self.chunk, pending - 1))
                end = self._held[place] + len(tokens)
                yield i, self._feed(Block((place,), [tokens], [end])), len(tokens)

    def extend(
        self, context: Context, tokens: Tensor | None = None, parents: Tensor | None = None, fed: int = 0
    ) -> Tensor:
        """Feed pending tokens and nodes; see `CachedModel.extend`."""
        if not fed:  # else the round's first call has fed what was pending
            for _ in self.prefill(context):
                pass
        tokens = None if tokens is None else tokens.to(self.device)
        parents = None if parents is None else parents.to(self.device)
        return self.forward(context, tokens, parents, fed).logits.whole.to(context.device)

    def forward(
        self,
        context: Context,
        tokens: Tensor | None = None,
        parents: Tensor | None = None,
        fed: int = 0,
        counts: Sequence[int] | None = None,
        tree: Tree | None = None,
    ) -> Forward:
        """Feed what is pending (at most a chunk) and the nodes behind it.

        parents: None for chains. counts: [B], how many of the nodes of each row are to be fed, the first
        ones; behind them it has holes only. tree: of the parents, if it is made already and none was fed;
        at fixed shapes it is made again, inside the captured graph.
        """
        pending = [self._pending(context, i) for i in range(len(context.places))]
        ends = [*context.host_lengths]
        tree = tree if self.steps.capture is Capture.OFF else None
        return self._feed(Block(context.places, pending, ends, tokens, parents, fed, counts, tree))

    def adopt(self, context: Context) -> None:
        """Let rows that hold nothing yet take over the slots of another, or an earlier, row that began alike.

        Not where states of every position are wanted: those of adopted ones would be missing.
        """
        if self._lender is not None:
            return self._lender.adopt(context)
        for i, place in enumerate(context.places):
            if place not in self._fresh:
                continue
            self._fresh.discard(place)
            tokens = context.row_tokens(i)
            [index] = self.places.at([place])
            source, count = -1, 0
            if self.reuses_prefixes and not self.hidden_layers:
                source, count = self._prefixes.find(tokens)
            if count and source != index:
                self.cache.copy(source, index, count)
            self._prefixes.note(index, 0, tokens[:count])
            self.places.wrote(place, count)
            self._held[place] = count
            self._settle([place])
        return None

    def _pending(self, context: Context, i: int, most: int | None = None) -> list[int]:
        held = self._held[context.places[i]]
        return list(context.row_tokens(i)[held : None if most is None else held + most])

    def keep(self, outcome: Outcome) -> None:
        """Keep the leading accepted nodes that were fed; move their slots together."""
        if self._lender is not None:
            return  # the lender fed the same tokens through the same layers, and has kept them
        at, source, target = [], [], []
        indices = self.places.at(outcome.places)
        for place, index, path, said in zip(
            outcome.places, indices, outcome.paths, outcome.tokens, strict=True
        ):
            kept = _leading(path, self._nodes[place])
            base = self._held[place]
            if kept:
                self._prefixes.note(index, base, said[: len(kept)])
            self._held[place] += len(kept)
            self._nodes[place] = 0
            if kept != list(range(len(kept))):
                at.append(index)
                source.append([base + node for node in kept])
                target.append(list(range(base, base + len(kept))))
        if at:
            with torch.no_grad():
                self.cache.move(at, source, target)
        self._settle(outcome.places)

    def _settle(self, places: Sequence[int]) -> None:
        """Let borrowers know what the shared slots hold now."""
        for borrower in self._borrowers:
            borrower._held.update((place, self._held[place]) for place in places)
            borrower._nodes.update((place, 0) for place in places)

    @torch.no_grad()
    def _feed(self, block: Block) -> Forward:
        """Run one block over the contiguous range of the cache that holds its rows."""
        fixed = self._is_fixed(block)
        if not block.fed:
            self.places.gather(block.places, fixed)
        index = self.places.at(block.places)
        first, shape = 0 if fixed else min(index), self._shape(block, index, fixed)
        at = [i - first for i in index]
        ragged = block.without_padding(at, shape, self.device) if self.ragged else None
        # where a row stands must not be part of a captured graph
        span = None if fixed or ragged is not None else block.span()
        outputs = self._run(block.inputs(at, shape, span, self.device), first, shape, span, fixed, ragged)
        for i, place, tokens, end in zip(index, block.places, block.pending, block.ends, strict=True):
            if self._lender is None and tokens:
                self._prefixes.note(i, end - len(tokens), tokens)
            self.places.wrote(place, end + block.fed + block.nodes)
            self._held[place] = end
            self._nodes[place] = block.fed + block.nodes
        self._settle(block.places)
        pending = tuple(map(len, block.pending))
        if at != list(range(shape.rows)):
            own = 0 if ragged is None else 1  # the logits of a ragged block are the members' already
            outputs = (*outputs[:own], *(_rows(output, at) for output in outputs[own:]))
        hidden = dict(zip(self.hidden_layers, outputs[1:], strict=True))
        kept, logits = block.nodes + (1 if shape.columns else 0), outputs[0]
        if ragged is not None:
            return Forward(BlockLogits(logits, ragged.index), hidden, shape.columns, pending)
        logits = logits if logits.shape[1] == kept else logits[:, :kept]
        return Forward(BlockLogits(logits), hidden, shape.columns, pending)

    def _is_fixed(self, block: Block) -> bool:
        """Whether a block runs at fixed shapes: prompts do not, their shapes are many and used once."""
        if self.steps.capture is Capture.OFF:
            return False
        return max(map(len, block.pending)) <= _MOST_FIXED_COLUMNS

    def _shape(self, block: Block, index: list[int], fixed: bool) -> Shape:
        columns = max(map(len, block.pending))
        view = max(block.ends) + block.fed + block.nodes
        tree = block.parents is not None
        rows = max(index) + 1 - (0 if fixed else min(index))
        shape = Shape(rows, columns, block.nodes, block.fed - block.chained, view, tree)
        return shape.bucketed(self.cache.slots, self.max_rows) if fixed else shape

    def _run(
        self,
        inputs: Inputs,
        first: int,
        shape: Shape,
        span: tuple[int, int] | None,
        fixed: bool,
        ragged: Ragged | None,
    ) -> Outputs:
        if self._moves != self.cache.moves:  # graphs hold the addresses of buffers that are gone
            self._moves = self.cache.moves
            self.steps.drop()
        if not fixed:
            return self._model_forward(inputs, first, shape, span, ragged)
        with torch.cuda.device(self.device if self.device.type == "cuda" else -1):  # -1: no change
            # hooks that gather states are new in every forward, and would be compiled anew
            model = self.compiled
            return self.steps.run(
                shape, inputs, lambda x: self._model_forward(x, first, shape, span, compiled=model)
            )

    def _model_forward(
        self,
        x: Inputs,
        first: int,
        shape: Shape,
        span: tuple[int, int] | None,
        ragged: Ragged | None = None,
        compiled: Compiled | None = None,
    ) -> Outputs:
        """Everything a captured graph holds: layout, masks, the model itself."""
        parts = [x["host"][:, 2:]] if shape.columns else []
        parts += [x["tokens"]] if "tokens" in x else []
        ids = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        # A drafter's own model may know fewer tokens than the target says; and a node's token may be any.
        ids = ids.clamp(0, self._embeddings - 1)
        where = self._layout(x, shape, span)
        positions, slots, row = where.positions, where.slots, None
        keep: int | Tensor = shape.nodes + (1 if shape.columns else 0)
        if ragged is not None:
            assert slots is not None
            ids, positions, slots = map(ragged.tokens, (ids, positions, slots))
            row, keep = ragged.row, ragged.kept
        self.cache.aim(first, shape.rows, shape.view, slots, row, span)
        arguments: dict[str, object] = {self.plan.cache_argument: self.cache}
        if self.plan.takes_logits_to_keep:
            arguments["logits_to_keep"] = keep
        with self.replica.exclusive, feeding(ragged), self._gathered() as states:
            output = (compiled or self.model)(
                input_ids=ids,
                position_ids=positions,
                attention_mask=self.plan.mask(where.masks, self.dtype, folded=ragged is None),
                use_cache=True,
                **arguments,
            )
        logits, hidden = output.logits, [states[layer] for layer in self.hidden_layers]
        # Not every model keeps those logits only that it is asked for.
        if ragged is not None:
            logits, hidden = logits[0], [ragged.rectangle(x.to(self.device)) for x in hidden]
            if logits.shape[0] != ragged.kept.shape[0]:
                logits = logits.index_select(0, ragged.kept.to(logits.device))
        elif logits.shape[1] != keep:
            logits = logits[:, -keep:]
        return tuple(tensor.to(self.device) for tensor in (logits, *hidden))

    def _layout(self, x: Inputs, shape: Shape, span: tuple[int, int] | None) -> Layout:
        windows = self.plan.distinct
        if span is not None:
            return lay_out_row(*span, windows, self.device)
        columns, tree = shape.columns, None
        if shape.tree:
            tree = Tree.of(x["parents"]) if "parents" in x else Tree(x["ancestors"], x["depths"], x["real"])
        else:
            columns += shape.nodes
        held, behind = x["host"][:, 0], x["host"][:, 1]
        trash, limit = self.cache.trash, self.context_limit
        return lay_out(held, behind, tree, columns, shape.fed, shape.view, windows, trash, limit)


def _leading(path: list[int], fed: int) -> list[int]:
    return list(itertools.takewhile(lambda node: node < fed, path))


def _rows(x: Tensor, at: list[int]) -> Tensor:
    """Select rows by their index; a view where they are the first ones."""
    return x[: len(at)] if at == list(range(len(at))) else x.index_select(0, on_device(at, x.device))
