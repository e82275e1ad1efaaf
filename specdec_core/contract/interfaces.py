"""The contracts: what a drafter and a verifier are, and what they are given.

B is the number of rows of one call, n the width of a draft, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict
from torch import Tensor, device, dtype, nn

from specdec_core.contract.distributions import TargetDistributions
from specdec_core.contract.draft import Draft, DraftLaw, Verdict, on_device
from specdec_core.contract.sampling_params import FinishReason, SamplingParams

T = TypeVar("T")


class PluginConfig(BaseModel):
    """Options of a drafter or verifier, as on the command line: `name:option=value`."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class DrafterConfig(PluginConfig):
    """Base of a drafter's options."""


class VerifierConfig(PluginConfig):
    """Base of a verifier's options."""


@dataclass(frozen=True)
class Capabilities:
    """What a configured drafter can make and what it needs."""

    laws: frozenset[DraftLaw]
    max_depth: int  # deepest node it ever proposes; the draft length when none is asked for
    max_nodes: int | None = None  # most nodes a row; None: as many as max_depth, a chain
    makes_trees: bool = False
    on_host: bool = False  # drafts from tokens alone, at next to no cost, and gives `Draft.host`
    hidden_layers: tuple[int, ...] = ()  # l as in HF's hidden_states[l]; wanted in every Outcome
    top_logits: int = 0  # k largest raw logits of every scored index, wanted in every Outcome
    learns: bool = False  # drafts may depend on other rows of the same decoder, ended ones too
    asks: bool = False  # asks `Budget.goes_on`, where there is one, before every further step of a chain
    next_row: int = 0  # ids of rows begin here: above those that a history it has loaded comes from

    @cached_property
    def nodes(self) -> int:
        """Most nodes of one row."""
        return self.max_depth if self.max_nodes is None else self.max_nodes


@dataclass(frozen=True)
class Rows:
    """Rows that begin: one entry a row in every field."""

    ids: tuple[int, ...]  # stable and never reused
    places: tuple[int, ...]  # below max_rows, fixed for a row's life: to index tensors of one's own by
    prompts: tuple[tuple[int, ...], ...]  # committed so far: more, where a row begins again
    params: tuple[SamplingParams, ...]

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Budget:
    """How much may be drafted this round."""

    depth: list[int]  # [B] deepest node of each row; 0: nothing
    nodes: int  # most nodes of a row
    goes_on: Callable[[Sequence[int], Tensor], bool] | None = None
    """Whether another step pays. It is told the ids of the rows that draft and how probable the likeliest
    choice for each one's latest token was, float32 [rows], which was known before that token was drawn."""
    forced: tuple[int, ...] = ()  # [B] how deep the core itself may draft what constraints force; or none

    def for_rows(self, index: Sequence[int]) -> Budget:
        """Select rows by their index in this budget."""
        forced = tuple(self.forced[i] for i in index) if self.forced else ()
        return Budget([self.depth[i] for i in index], self.nodes, self.goes_on, forced)

    def clipped(self, capabilities: Capabilities) -> Budget:
        """Lower it to what a drafter can make, where others in its place could make more."""
        depths = [min(depth, capabilities.max_depth) for depth in self.depth]
        return Budget(depths, min(self.nodes, capabilities.nodes), self.goes_on, self.forced)

    @property
    def whole(self) -> Budget:
        """What a draft may be, of a drafter or of forced tokens."""
        if not self.forced:
            return self
        depths = list(map(max, self.depth, self.forced))
        return Budget(depths, max(self.nodes, *self.forced), self.goes_on, self.forced)


class RowRng(Protocol):
    """Keyed randomness of the rows of one round; purpose and owner are bound by the core.

    A draw is keyed by (row seed, purpose, owner, the row's committed length at the start of the round,
    node, draw): two draws that may both happen must differ in node or draw. A draw that does not apply
    to a row is made with p = 0.
    """

    def bernoulli(self, p: Tensor, node: Tensor | int, draw: int) -> Tensor:
        """Draw True with probability p: float [B] -> bool [B]; node: one for all, or int64 [B]."""

    def categorical(self, weights: Tensor, node: Tensor | int, draw: int) -> Tensor:
        """Draw an index with probability proportional to weights: [B, V] -> int64 [B]."""

    def target_draw(self, logits: Tensor, depth: Tensor | int) -> Tensor:
        """Draw with the target's own noise of a position: argmax(logits + Gumbel noise).

        logits: [B, V] with depth an int or int64 [B], or [B, c, V] with depth int64 [B, c]; depth 0 is the
        position right after the committed tokens. The noise depends on (row seed, absolute position,
        token id) alone. Returns int64 [B] or [B, c].
        """

    def child(self, name: str) -> RowRng:
        """Make the generator of a member, which shares no key with this one."""


class Context(Protocol):
    """The rows to draft for, as they stand at the top of a round. Read-only."""

    @property
    def rows(self) -> tuple[int, ...]:
        """Ids of the B rows."""

    @property
    def places(self) -> tuple[int, ...]:
        """Place of each row; see `Rows`."""

    @property
    def params(self) -> tuple[SamplingParams, ...]:
        """Params of each row."""

    @property
    def host_lengths(self) -> tuple[int, ...]:
        """Committed length of each row, prompt included."""

    def row_tokens(self, i: int) -> Sequence[int]:
        """Give row i's committed tokens, prompt included, on the host; not to be changed or kept."""

    @property
    def tokens(self) -> Tensor:
        """The same on the device: int64 [B, L], right-padded with 0."""

    @property
    def lengths(self) -> Tensor:
        """Committed lengths on the device: int64 [B]."""

    @property
    def device(self) -> device:
        """Where `tokens` and drafts live."""

    @property
    def rng(self) -> RowRng:
        """Randomness bound to this drafter."""

    def distributions(self, logits: Tensor, paths: Tensor | None = None) -> Tensor:
        """Process logits exactly as p is made: [B, V] -> float32 [B, V], log q up to a constant.

        paths: int64 [B, d] tokens drafted before this one, -1 padded on the right; None where there are none.
        Rows at temperature 0 come out unwarped: q is then the point mass on their argmax.
        """

    def masked(self, scores: Tensor, paths: Tensor | None = None) -> Tensor:
        """Forbid what the rows' constraints do, which `distributions` does too: [B, V] -> float [B, V].

        For a drafter that makes q in its own way, before it draws.
        """

    def legal(self, i: int, tokens: Sequence[int]) -> int:
        """How many of these tokens row i's constraint allows, one after another; all without a constraint.

        Host only. To cut what is a fixed function of the context (ONE_HOT), never what was drawn.
        """

    def forced(self, i: int, limit: int) -> list[int]:
        """At most `limit` tokens that row i's constraint lets follow as the only ones. Host only."""

    def for_rows(self, index: Sequence[int]) -> Context:
        """Select rows by their index in this context; one may be selected several times."""

    def for_member(self, name: str) -> Context:
        """Give the same rows to a member of a combination: `rng` is `rng.child(name)`."""


@dataclass(frozen=True)
class Outcome:
    """What one target forward led to, for the rows of that call. Valid during `observe`."""

    rows: tuple[int, ...]
    places: tuple[int, ...]
    tokens: tuple[list[int], ...]  # committed; empty after a call that only prefilled
    paths: tuple[list[int], ...]  # accepted nodes of the receiver's own draft, from the root
    finished: tuple[FinishReason | None, ...]
    fed: tuple[int, ...] = ()  # how many positions `hidden` holds for each row
    hidden: Mapping[int, Tensor] = field(default_factory=dict)
    # layer -> [B, max(fed), H]: output of that block for the positions fed and kept, right-padded
    top_logits: tuple[Tensor, Tensor] | None = None
    # (ids int64, raw values) [B, 1 + n, k]: index 0 is the last pending token, 1 + j node j
    scored: Tensor | None = None
    # int64 [B, 1 + n], beside `top_logits`: the token each index follows, whoever drafted it; -1: no node

    def for_rows(self, index: Sequence[int], *, own_draft: bool | Sequence[bool] = True) -> Outcome:
        """Select rows by their index.

        own_draft: whether the receiver drafted them, all or each; the paths of another's draft are emptied.
        """
        at = list(index)
        own = [own_draft] * len(at) if isinstance(own_draft, bool) else own_draft
        paths = tuple(self.paths[i] if mine else [] for i, mine in zip(at, own, strict=True))
        if at == list(range(len(self.rows))):
            return replace(self, paths=paths)
        top = self.top_logits
        return Outcome(
            rows=_pick(self.rows, at),
            places=_pick(self.places, at),
            tokens=_pick(self.tokens, at),
            paths=paths,
            finished=_pick(self.finished, at),
            fed=_pick(self.fed, at),
            hidden={layer: _rows(states, at) for layer, states in self.hidden.items()},
            top_logits=None if top is None else (_rows(top[0], at), _rows(top[1], at)),
            scored=None if self.scored is None else _rows(self.scored, at),
        )


class CachedModel(Protocol):
    """A model with a cache that can forget: a drafter's own model, or the target's first layers."""

    vocab_size: int
    context_limit: int | None
    trees: bool  # False: chains only, the model's attention cannot follow a tree

    def admit(self, rows: Rows, nodes: int) -> None:
        """Reserve room for these rows and up to `nodes` drafted nodes of each."""

    def release(self, places: Sequence[int]) -> None:
        """Forget these places."""

    def extend(
        self, context: Context, tokens: Tensor | None = None, parents: Tensor | None = None, fed: int = 0
    ) -> Tensor:
        """Feed what is pending and then nodes; return the logits after them.

        tokens: int64 [B, m], the nodes to feed; parents: int64 [B, fed + m], of all nodes of this round so
        far, of which the first `fed` were fed before; None where they are chains, whose holes, if any, come
        last: that spares the model a general tree. A round's first call feeds the pending tokens too and
        returns [B, 1 + m, V], index 0 after the last pending token; later calls return [B, m, V].

        What is returned is valid until the model's next call, which may overwrite it: captured graphs share
        their memory.
        """

    def keep(self, outcome: Outcome) -> None:
        """Keep the leading accepted nodes that were fed, and forget all others."""


class TargetInfo(Protocol):
    """The target, as a drafter sees it when it is bound."""

    config: Any  # the HF config of its text model
    tokenizer: Any | None
    vocab_size: int
    device: device
    dtype: dtype
    context_limit: int | None
    max_rows: int  # most rows at once; places are 0 .. max_rows - 1
    companions: Mapping[str, Any]  # parts shipped beside the target: `specdec.json` in its folder
    offline: bool  # whether a model that a drafter loads must come from local files
    trust_remote_code: bool  # whether code that comes with such a model may run
    input_embeddings: nn.Module
    output_embeddings: nn.Module

    def head(self, hidden: Tensor) -> Tensor:
        """Apply the model's own head (final norm, head, scale, soft cap): [..., H] -> logits [..., V]."""

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Turn the last layer's output into what `output_embeddings` reads: [..., H] -> [..., H]."""

    def cached(self, model: nn.Module) -> CachedModel:
        """Wrap a drafter's own model, with the same places, chunks and graphs as the target.

        While the decoder runs, the model is in evaluation mode; in between it is as it was.
        """

    def early_layers(self, exit_layer: int) -> CachedModel:
        """Give the target's first layers and head as a model that borrows the target's cache."""


class Drafter(Protocol):
    """Proposes tokens. Constructed with its Config; one instance serves one decoder."""

    # class attributes:
    name: str
    Config: Any  # a subclass of DrafterConfig

    @property
    def config(self) -> Any:
        """The options it was built with: an instance of `Config`."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can make and needs, as configured."""

    def bind(self, target: TargetInfo) -> None:
        """Meet the target, once; raise a SpecdecError with a reason to refuse it."""

    def admit(self, rows: Rows) -> None:
        """Begin these rows; at any round, not only the first."""

    def propose(self, context: Context, budget: Budget) -> Draft:
        """Draft for any subset of the admitted rows, never more than the budget; empty is fine."""

    def observe(self, outcome: Outcome) -> None:
        """Learn what was committed; also after a call that only prefills."""

    def release(self, rows: Sequence[int]) -> None:
        """Forget these rows; perhaps without a last observe."""


class Verifier(Protocol):
    """Decides how much of a draft is kept: a pure function."""

    # class attributes:
    name: str
    Config: Any  # a subclass of VerifierConfig
    laws: frozenset[DraftLaw]  # those it can treat
    handles_trees: bool
    lossless: bool
    samples: bool  # False: rows with temperature > 0 are refused
    drafter_invariant: bool  # a seed gives one text, whatever drafts
    preference: int  # `auto` takes the most preferred verifier that fits

    @property
    def config(self) -> Any:
        """The options it was built with: an instance of `Config`."""

    def verify(self, p: TargetDistributions, draft: Draft, rng: RowRng) -> Verdict:
        """Judge the draft without a model, a cache or a host transfer."""


def _rows(x: Tensor, at: Sequence[int]) -> Tensor:
    return x.index_select(0, on_device(at, x.device))


def _pick(values: tuple[T, ...], index: Sequence[int]) -> tuple[T, ...]:
    return tuple(values[i] for i in index) if values else values
