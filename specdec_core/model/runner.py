"""`CachedModel` over an unmodified Hugging Face model: batched rows, trees, and a cache that can forget."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from specdec_core.interfaces import Context, Outcome, Rows
from specdec_core.model.attention import AttentionPlan, context_limit, plan_attention, unwrap
from specdec_core.model.cache import SlotCache
from specdec_core.model.graphs import Capture, FixedSteps, Inputs, Outputs
from specdec_core.model.layers import block_states, blocks_of
from specdec_core.model.prefixes import Prefixes
from specdec_core.model.shapes import Shape
from specdec_core.model.tree import Tree, lay_out

DEFAULT_CHUNK = 512
_MOST_FIXED_COLUMNS = 8  # pending tokens of a block that runs at fixed shapes


@dataclass(frozen=True, eq=False)
class Forward:
    """What one forward gave for its B rows."""

    logits: Tensor  # [B, kept, V]
    hidden: dict[int, Tensor]  # layer -> [B, columns + m, H], the pending tokens right-aligned
    columns: int
    pending: tuple[int, ...]  # tokens fed of each row, before the nodes


@dataclass(frozen=True, eq=False)
class _Block:
    """What one forward feeds, one entry a member row."""

    places: tuple[int, ...]
    pending: list[list[int]]
    ends: list[int]  # slots held once the pending tokens are fed
    tokens: Tensor | None = None  # int64 [B, m]
    tree: Tree | None = None  # of fed + m nodes
    fed: int = 0

    @property
    def nodes(self) -> int:
        return 0 if self.tokens is None else self.tokens.shape[1]

    def span(self) -> tuple[int, int] | None:
        """The range of slots that a single row without nodes fills, so that a copy can write it."""
        if len(self.places) > 1 or self.nodes or self.fed:
            return None
        return self.ends[0] - len(self.pending[0]), self.ends[0]


class Runner:
    """A model, its slots, and how many of them each place holds.

    At the top of a round every place holds exactly a prefix of its row's committed tokens; the rest is
    pending. What is fed of a draft is forgotten by `keep`, but for the leading accepted nodes.

    Args:
        chunk: most pending tokens of one forward; longer prompts are fed in chunks first.
        lender: the runner whose cache and first layers this one borrows; it writes only behind what the
            lender holds, and what it wrote is forgotten when the lender next feeds or keeps.
        reuse_prefixes: let rows take over slots of rows that began alike.
        hidden_layers: layers (as in HF's `hidden_states`) whose states every forward returns.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        chunk: int = DEFAULT_CHUNK,
        capture: Capture = Capture.OFF,
        hidden_layers: Sequence[int] = (),
        lender: Runner | None = None,
        reuse_prefixes: bool = True,
    ) -> None:
        self.model = unwrap(model)
        self.plan: AttentionPlan = plan_attention(self.model) if lender is None else lender.plan
        self.chunk = chunk
        self.hidden_layers = tuple(hidden_layers)
        self.cache: SlotCache = SlotCache() if lender is None else lender.cache
        embedding: Any = self.model.get_input_embeddings()
        self.device: torch.device = embedding.weight.device
        if capture is Capture.GRAPHS and self.device.type != "cuda":
            capture = Capture.OFF  # a CUDA graph would hold nothing, and replay it
        self.steps = FixedSteps(capture)
        self._moves = self.cache.moves
        self._lender, self._borrowers = lender, list[Runner]()
        if lender is not None:
            lender._borrowers.append(self)
        config = self.model.config.get_text_config(decoder=True)
        head: Any = self.model.get_output_embeddings()
        self._embeddings: int = embedding.weight.shape[0]
        self.vocab_size: int = getattr(head, "out_features", config.vocab_size)  # packed weights tell no size
        self.context_limit = context_limit(config)
        self.dtype: torch.dtype = self.model.dtype
        self.trees = True  # until a probe says otherwise
        self.reuses_prefixes = reuse_prefixes
        self._prefixes = Prefixes(self.model)
        self._held: dict[int, int] = {}  # place -> slots held
        self._nodes: dict[int, int] = {}  # place -> nodes fed this round
        self._fresh: set[int] = set()  # admitted, and not looked for a known prefix yet
        self.calls = 0

    def admit(self, rows: Rows, nodes: int) -> None:
        """Reserve room for whole rows and `nodes` drafted nodes behind each."""
        if not self._held and self._prefixes.check_weights():
            self.steps.drop()  # graphs hold the old adapters and weights
        room = 1
        for place, prompt, params in zip(rows.places, rows.prompts, rows.params, strict=True):
            room = max(room, len(prompt) + params.max_new_tokens)
            self._held[place] = 0 if self._lender is None else self._lender._held.get(place, 0)
            self._nodes[place] = 0
            self._fresh.add(place)
        if self.context_limit is not None:
            room = min(room, self.context_limit)
        self.cache.reserve(max(rows.places, default=0) + 1, room + nodes)
        self._settle(rows.places)

    def release(self, places: Sequence[int]) -> None:
        """Forget these places."""
        for place in places:
            self._held.pop(place, None)
            self._nodes.pop(place, None)

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
                yield i, self._feed(_Block((place,), [tokens], [end])), len(tokens)

    def extend(
        self, context: Context, tokens: Tensor | None = None, parents: Tensor | None = None, fed: int = 0
    ) -> Tensor:
        """Feed pending tokens and nodes; see `CachedModel.extend`."""
        for _ in self.prefill(context):
            pass
        tokens = None if tokens is None else tokens.to(self.device)
        tree = None if parents is None else Tree.of(parents.to(self.device))
        return self.forward(context, tokens, tree, fed).logits.to(context.device)

    def forward(self, context: Context, tokens: Tensor | None, tree: Tree | None, fed: int = 0) -> Forward:
        """Feed what is pending (at most a chunk) and the nodes behind it."""
        pending = [self._pending(context, i) for i in range(len(context.places))]
        ends = [*context.host_lengths]
        return self._feed(_Block(context.places, pending, ends, tokens, tree, fed))

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
            source, count = -1, 0
            if self.reuses_prefixes and not self.hidden_layers:
                source, count = self._prefixes.find(tokens)
            if count and source != place:
                self.cache.copy(source, place, count)
            self._prefixes.note(place, 0, tokens[:count])
            self._held[place] = count
            self._settle([place])
        return None

    @cached_property
    def _blocks(self) -> list[nn.Module]:
        return blocks_of(self.model)

    def _pending(self, context: Context, i: int, most: int | None = None) -> list[int]:
        held = self._held[context.places[i]]
        return list(context.row_tokens(i)[held : None if most is None else held + most])

    def keep(self, outcome: Outcome) -> None:
        """Keep the leading accepted nodes that were fed; move their slots together."""
        if self._lender is not None:
            return  # the lender fed the same tokens through the same layers, and has kept them
        places, source, target = [], [], []
        for place, path, said in zip(outcome.places, outcome.paths, outcome.tokens, strict=True):
            kept = _leading(path, self._nodes[place])
            base = self._held[place]
            if kept:
                self._prefixes.note(place, base, said[: len(kept)])
            self._held[place] += len(kept)
            self._nodes[place] = 0
            if kept != list(range(len(kept))):
                places.append(place)
                source.append([base + node for node in kept])
                target.append(list(range(base, base + len(kept))))
        if places:
            with torch.no_grad():
                self.cache.move(places, source, target)
        self._settle(outcome.places)

    def _settle(self, places: Sequence[int]) -> None:
        """Let borrowers know what the shared slots hold now."""
        for borrower in self._borrowers:
            borrower._held.update((place, self._held[place]) for place in places)
            borrower._nodes.update((place, 0) for place in places)

    @torch.no_grad()
    def _feed(self, block: _Block) -> Forward:
        """Run one block over the contiguous range of places that holds its rows."""
        fixed = self._is_fixed(block)
        first, shape = 0 if fixed else min(block.places), self._shape(block, fixed)
        if fixed:
            self.cache.reserve(shape.rows, 0)
        at = [place - first for place in block.places]
        span = None if fixed else block.span()  # where a row stands must not be part of a captured graph
        outputs = self._run(self._inputs(block, at, shape), first, shape, span, fixed)
        for place, tokens, end in zip(block.places, block.pending, block.ends, strict=True):
            if self._lender is None:
                self._prefixes.note(place, end - len(tokens), tokens)
            self._held[place] = end
            self._nodes[place] = block.fed + block.nodes
        self._settle(block.places)
        self.calls += 1
        if at == list(range(len(at))):
            outputs = tuple(output[: len(at)] for output in outputs)
        else:
            outputs = tuple(output[at] for output in outputs)
        kept = block.nodes + (1 if shape.columns else 0)
        hidden = dict(zip(self.hidden_layers, outputs[1:], strict=True))
        fed = tuple(map(len, block.pending))
        return Forward(outputs[0][:, :kept], hidden, shape.columns, fed)

    def _is_fixed(self, block: _Block) -> bool:
        """Whether a block runs at fixed shapes: prompts do not, their shapes are many and used once."""
        short = max(map(len, block.pending)) <= _MOST_FIXED_COLUMNS
        return short and self.steps.capture is not Capture.OFF

    def _shape(self, block: _Block, fixed: bool) -> Shape:
        rows = max(block.places) + 1 - min(block.places)
        columns = max(map(len, block.pending))
        view = max(block.ends) + block.fed + block.nodes
        shape = Shape(rows, columns, block.nodes, block.fed, view)
        if not fixed:
            return shape
        return replace(shape, rows=max(block.places) + 1).bucketed(self.cache.slots)

    def _inputs(self, block: _Block, at: list[int], shape: Shape) -> Inputs:
        """Make the block's tensors, [rows of the range, ...]; rows that are not members are padding."""
        pending = [[0] * shape.columns for _ in range(shape.rows)]
        held, counts = [0] * shape.rows, [0] * shape.rows
        for row, tokens, end in zip(at, block.pending, block.ends, strict=True):
            pending[row][shape.columns - len(tokens) :] = tokens
            held[row], counts[row] = end - len(tokens), len(tokens)
        host = torch.tensor([[*h, *ids] for *h, ids in zip(held, counts, pending, strict=True)])
        host = host.to(self.device, non_blocking=True)
        # A drafter's own model may know fewer tokens than the target says.
        ids = host[:, 2:].clamp(max=self._embeddings - 1)
        inputs = {"held": host[:, 0], "pending": host[:, 1], "ids": ids}
        if block.tree is not None and block.tokens is not None:
            inputs |= _spread(block.tokens.clamp(0, self._embeddings - 1), block.tree, at, shape)
        return inputs

    def _run(
        self, inputs: Inputs, first: int, shape: Shape, span: tuple[int, int] | None, fixed: bool
    ) -> Outputs:
        def forward(tensors: Inputs) -> Outputs:
            return self._model_forward(tensors, first, shape, span)

        if self._moves != self.cache.moves:  # graphs hold the addresses of buffers that are gone
            self._moves = self.cache.moves
            self.steps.drop()
        if not fixed:
            return forward(inputs)
        with torch.cuda.device(self.device if self.device.type == "cuda" else -1):  # -1: no change
            return self.steps.run(shape, inputs, forward)

    def _model_forward(self, x: Inputs, first: int, shape: Shape, span: tuple[int, int] | None) -> Outputs:
        """Everything a captured graph holds: layout, masks, the model itself."""
        tree, ids = None, x["ids"]
        if "tokens" in x:
            tree = Tree(x["ancestors"], x["depths"], x["real"])
            ids = torch.cat([ids, x["tokens"]], dim=1)
        windows, trash = self.plan.distinct, self.cache.trash
        where = lay_out(x["held"], x["pending"], tree, shape.columns, shape.fed, shape.view, windows, trash)
        self.cache.aim(first, where.slots, shape.view, span)
        keep = shape.nodes + (1 if shape.columns else 0)
        arguments: dict[str, object] = {self.plan.cache_argument: self.cache}
        if self.plan.takes_logits_to_keep:
            arguments["logits_to_keep"] = keep
        with block_states(self._blocks if self.hidden_layers else (), self.hidden_layers) as states:
            output = self.model(
                input_ids=ids,
                position_ids=where.positions,
                attention_mask=self.plan.mask(where.masks, self.dtype),
                use_cache=True,
                **arguments,
            )
        wanted = (output.logits[:, -keep:], *(states[layer] for layer in self.hidden_layers))
        return tuple(tensor.to(self.device) for tensor in wanted)


def _leading(path: list[int], fed: int) -> list[int]:
    return list(itertools.takewhile(lambda node: node < fed, path))


def _spread(tokens: Tensor, tree: Tree, at: list[int], shape: Shape) -> Inputs:
    """Pad nodes and rows to the shape: what is not there is a hole."""
    nodes, total = shape.nodes - tokens.shape[1], shape.fed + shape.nodes - tree.real.shape[1]
    pads = {
        "tokens": (tokens, (0, nodes)),
        "ancestors": (tree.ancestors, (0, total, 0, total)),
        "depths": (tree.depths, (0, total)),
        "real": (tree.real, (0, total)),
    }
    inputs = {name: torch.nn.functional.pad(x, pad) if any(pad) else x for name, (x, pad) in pads.items()}
    if at == list(range(shape.rows)):
        return inputs
    return {
        name: x.new_zeros((shape.rows, *x.shape[1:])).index_copy_(0, torch.tensor(at, device=x.device), x)
        for name, x in inputs.items()
    }
