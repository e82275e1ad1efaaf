"""What the tests of the loop share: tiny models, reference decoding, a drafter that does as it is told."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from pydantic import Field
from tiny import VOCAB, tiny_model
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MinPLogitsWarper,
    PreTrainedModel,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec_core import (
    HOLE,
    ROOT,
    Budget,
    Capabilities,
    Context,
    Draft,
    Drafter,
    DrafterConfig,
    DraftLaw,
    Outcome,
    Registry,
    Rows,
    SamplingParams,
    SpecdecError,
    SpecDecoder,
    TargetInfo,
)
from specdec_core.rng import KeyedRng, Purpose

Node = tuple[int, int]  # token, index of the parent
Ahead = Callable[[list[int], int], list[int]]
Script = Callable[["Ask"], "Sequence[int] | Sequence[Node]"]


# --- models ---------------------------------------------------------------------------------------


@functools.cache
def tiny_llama(context: int = 512, device: str = "cpu") -> PreTrainedModel:
    """A random llama without special tokens, shared: not to be changed."""
    return tiny_model("llama", context=context, fresh=True).to(device)  # type: ignore[arg-type]


def markov_llama(log_p: Tensor, context: int = 512) -> LlamaForCausalLM:
    """A llama whose next token depends on the current one alone: log_p, [current, next]."""
    vocab = log_p.shape[0]
    hidden = -(-vocab // 4) * 4
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab, hidden))
        # the final norm makes the one-hot state sqrt(hidden) high
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :vocab] = log_p.T / hidden**0.5
    return model


def copier(follows: Mapping[int, int], vocab: int = VOCAB) -> LlamaForCausalLM:
    """A llama that always says `follows[current]`."""
    log_p = torch.zeros(vocab, vocab)
    for current, following in follows.items():
        log_p[current, following] = 20.0
    return markov_llama(log_p)


def ids(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """A prompt of random tokens."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(vocab, (length,), generator=generator).tolist()


# --- reference decoding ---------------------------------------------------------------------------


@torch.no_grad()
def next_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """Logits after these tokens, [V], by a plain causal pass without any cache."""
    at = torch.tensor([list(tokens)], device=model.device)
    logits: Tensor = model(input_ids=at, use_cache=False).logits[0, -1]
    return logits.float()


_SAID: WeakKeyDictionary[Any, dict[tuple[int, ...], list[int]]] = WeakKeyDictionary()
_DRAWN: WeakKeyDictionary[Any, dict[str, list[int]]] = WeakKeyDictionary()


def base(model: Any, prompt: Sequence[int], n: int, eos: Iterable[int] = ()) -> list[int]:
    """Plain greedy ids, one token at a time, up to and with the first EOS."""
    said = _SAID.setdefault(model, {}).setdefault(tuple(prompt), [])
    while len(said) < n:
        said.append(int(next_logits(model, [*prompt, *said]).argmax()))
    ends = [i for i, token in enumerate(said[:n]) if token in set(eos)]
    return said[: ends[0] + 1] if ends else said[:n]


@functools.cache
def varied_prompt(length: int, n: int) -> list[int]:
    """A prompt after which `tiny_llama()` says n different tokens, so that each of them can be an EOS."""
    tries = (ids(length, seed) for seed in range(1000))
    return next(prompt for prompt in tries if len(set(base(tiny_llama(), prompt, n))) == n)


def warped(scores: Tensor, params: SamplingParams) -> Tensor:
    """Scores of one row as transformers' own warpers leave them: [k, V] -> [k, V]."""
    none = torch.zeros((scores.shape[0], 1), dtype=torch.int64)
    if params.greedy:
        return scores
    scores = TemperatureLogitsWarper(params.temperature)(none, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(none, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(none, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(none, scores)
    return scores


def sampled(model: Any, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    """Plain sampling with the target's own noise of each position, one token at a time."""
    assert params.seed is not None
    drawn = _DRAWN.setdefault(model, {})
    key = repr((list(prompt), params))
    if key not in drawn:
        tokens = list(prompt)
        for _ in range(params.max_new_tokens):
            scores = warped(next_logits(model, tokens)[None], params)
            rng = KeyedRng([params.seed], [len(tokens)], Purpose.VERIFY, "", scores.device)
            tokens.append(int(rng.target_draw(scores.log_softmax(dim=-1), 0)))
        drawn[key] = tokens[len(prompt) :]
    return drawn[key]


# --- the scripted drafter -------------------------------------------------------------------------


class Ask:
    """What a script is asked for: one row of one round."""

    def __init__(self, call: int, i: int, row: int, tokens: list[int], depth: int) -> None:
        self.call, self.i, self.row, self.tokens, self.depth = call, i, row, tokens, depth


class ScriptedConfig(DrafterConfig):
    """Options of the scripted drafter."""

    num_tokens: int = Field(8, ge=0, description="deepest node")


class ScriptedDrafter:
    """Proposes what its script says for each row: token ids (a chain), or (token, parent) nodes.

    `calls` records every call and its rows, `outcomes` all that was observed; `now` are the rows it has.
    """

    name = "scripted"
    Config = ScriptedConfig

    def __init__(
        self,
        script: Script,
        *,
        depth: int = 8,
        nodes: int | None = None,
        trees: bool = False,
        laws: Iterable[DraftLaw] = (DraftLaw.ONE_HOT,),
    ) -> None:
        self.config = ScriptedConfig(num_tokens=depth)
        self.capabilities = Capabilities(
            laws=frozenset(laws), max_depth=depth, max_nodes=nodes, makes_trees=trees
        )
        self.script = script
        self.proposals = 0
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.outcomes: list[Outcome] = []
        self.now: set[int] = set()

    def bind(self, target: TargetInfo) -> None:
        self.calls.append(("bind", ()))

    def admit(self, rows: Rows) -> None:
        self.calls.append(("admit", rows.ids))
        self.now.update(rows.ids)

    def propose(self, context: Context, budget: Budget) -> Draft:
        self.calls.append(("propose", context.rows))
        drafts = [
            nodes_of(self.script(Ask(self.proposals, i, row, list(context.row_tokens(i)), budget.depth[i])))
            for i, row in enumerate(context.rows)
        ]
        self.proposals += 1
        return tree_draft(drafts, context.device)

    def observe(self, outcome: Outcome) -> None:
        self.calls.append(("observe", outcome.rows))
        self.outcomes.append(outcome)

    def release(self, rows: Sequence[int]) -> None:
        self.calls.append(("release", tuple(rows)))
        self.now.difference_update(rows)


def nodes_of(said: Sequence[Any]) -> list[Node]:
    """A script's answer as nodes: a list of bare ids is a chain."""
    return [(said_, i - 1) if isinstance(said_, int) else said_ for i, said_ in enumerate(said)]


def tree_draft(rows: list[list[Node]], device: Any = "cpu", law: DraftLaw = DraftLaw.ONE_HOT) -> Draft:
    """A draft of one tree a row, of any sizes."""
    n = max(map(len, rows), default=0)
    if n == 0:
        return Draft.empty(len(rows), device)
    tokens = [[token for token, _ in row] + [0] * (n - len(row)) for row in rows]
    parents = [[parent for _, parent in row] + [HOLE] * (n - len(row)) for row in rows]
    children = [[up.count(parent) for parent in set(up) - {HOLE}] for up in parents]
    return Draft(
        torch.tensor(tokens, device=device),
        torch.tensor(parents, device=device),
        torch.full((len(rows),), law, dtype=torch.uint8, device=device),
        depth=max(depth_of(up) for up in parents),
        width=max(max(one, default=0) for one in children),
    )


def depth_of(parents: Sequence[int]) -> int:
    """Depth of a tree in parents' notation; holes count nothing."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent == HOLE else 1 if parent == ROOT else depths[parent] + 1)
    return max(depths, default=0)


def following(*texts: Sequence[int]) -> Ahead:
    """Look up what comes next in known texts, prompt and output together: (tokens, k) -> k ids."""

    def ahead(tokens: list[int], k: int) -> list[int]:
        for text in texts:
            if list(text[: len(tokens)]) == tokens:
                return list(text[len(tokens) : len(tokens) + k])
        return []

    return ahead


def oracle(model: Any, *prompts: Sequence[int], n: int = 80) -> Ahead:
    """Know what plain greedy decoding says after these prompts."""
    return following(*([*prompt, *base(model, prompt, n)] for prompt in prompts))


def wrong(token: int, by: int = 1) -> int:
    """Another token of the vocabulary."""
    return (token + by) % VOCAB


def accepting(ahead: Ahead, counts: Sequence[int], k: int) -> Script:
    """A chain of k tokens a round, of which the first counts[round] are right and the rest wrong."""

    def script(ask: Ask) -> list[int]:
        right = ahead(ask.tokens, min(k, ask.depth))
        good = counts[ask.call % len(counts)]
        return [token if i < good else wrong(token) for i, token in enumerate(right)]

    return script


def planted(parents: Sequence[int], path: Sequence[int], ahead: Ahead) -> Script:
    """A tree of this shape with the right tokens along `path` and wrong, distinct ones elsewhere."""

    def script(ask: Ask) -> list[Node]:
        right = ahead(ask.tokens, len(path))
        nodes: list[Node] = []
        for node, parent in enumerate(parents):
            at = path.index(node) if node in path else None
            if at is not None and at < len(right):
                nodes.append((right[at], parent))
            else:
                depth = depth_of(list(parents[: node + 1]))
                avoid = right[depth - 1] if depth <= len(right) else 0
                nodes.append((wrong(avoid, node + 1), parent))
        return pruned(nodes, ask.depth)

    return script


def pruned(nodes: list[Node], depth: int) -> list[Node]:
    """Leave out nodes deeper than allowed; parents keep their meaning."""
    depths: dict[int, int] = {ROOT: 0}
    renamed = {ROOT: ROOT}
    kept: list[Node] = []
    for node, (token, parent) in enumerate(nodes):
        depths[node] = depths[parent] + 1
        if depths[node] <= depth:
            renamed[node] = len(kept)
            kept.append((token, renamed[parent]))
    return kept


# --- drafters and decoders ------------------------------------------------------------------------


@functools.cache
def plugins() -> Registry:
    """All that is installed."""
    return Registry.discover()


def registered_drafters() -> list[str]:
    """Names of all registered drafters, as `--drafter` takes them."""
    return sorted({entry.name for entry in plugins().drafters()})


def needs_options(name: str) -> str:
    """Why a drafter cannot be built from its bare name; empty if it can."""
    try:
        plugins().build_drafter(name)
    except SpecdecError as error:
        return str(error)
    return ""


def decoder_for(model: Any, drafter: str | Drafter = "prompt_lookup", **options: Any) -> SpecDecoder:
    """Build a decoder; a drafter that refuses to be built or bound without options skips the test."""
    if isinstance(drafter, str):
        reason = needs_options(drafter)
        if reason:
            pytest.skip(f"drafter {drafter!r} needs options: {reason}")
    try:
        return SpecDecoder(model, drafter=drafter, **{"strict": True, **options})
    except SpecdecError as error:
        if not isinstance(drafter, str):
            raise
        pytest.skip(f"drafter {drafter!r} does not fit: {error}")


def greedy(n: int, **options: Any) -> SamplingParams:
    """Greedy params."""
    return SamplingParams(max_new_tokens=n, **options)


# --- text -----------------------------------------------------------------------------------------


class ByteTokenizer:
    """One token a byte, 256 of them; a special token of id 256 prints as nothing."""

    eos_token_id: int | None = None
    chat_template = None
    vocab_size = 257

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def __len__(self) -> int:
        return self.vocab_size

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = True,
    ) -> str:
        text = bytes(token for token in token_ids if token < 256).decode(errors="replace")
        return text if skip_special_tokens else text + "<end>" * list(token_ids).count(256)


def writer(text: str) -> LlamaForCausalLM:
    """A byte-level llama that goes round in `text`, whose bytes must all differ."""
    raw = text.encode()
    assert len(set(raw)) == len(raw)
    return copier({byte: raw[(i + 1) % len(raw)] for i, byte in enumerate(raw)}, ByteTokenizer.vocab_size)
