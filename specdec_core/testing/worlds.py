"""Toy targets and drafters, every draft they can make, and the law of the text that comes out.

A toy language model maps a context (a tuple of tokens) to a distribution. `drafts` lists every draft that a
drafter with such a q can make after a context, each with its probability under the declared law.
`output_law` runs rounds until a fixed length, an EOS or a cap, and adds up the probability of every text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch

from specdec_core import HOLE, ROOT, Draft, DraftLaw, TargetDistributions, Verifier
from specdec_core.testing.enumeration import Wrap, outcomes

Tokens = tuple[int, ...]
Toy = Callable[[Tokens], np.ndarray]
"""context -> float64 [V]"""
Shape = Callable[[Tokens], int]
"""tokens drafted so far on a path -> how many children are drafted there"""
TextLaw = dict[Tokens, float]


def toy(seed: int, vocab: int, *, zeros: bool = False, sharpness: float = 0.7) -> Toy:
    """Make a random law for every context; `zeros`: with tokens that are never said."""

    @cache
    def law(context: Tokens) -> np.ndarray:
        random = np.random.default_rng([seed, len(context), *context])
        probs = random.dirichlet(np.full(vocab, sharpness)) + 1e-3
        if zeros:
            probs[random.permutation(vocab)[: random.integers(0, vocab)]] = 0.0
        return np.asarray(probs / probs.sum())

    return law


def constant(*probs: float) -> Toy:
    """Make a law that is the same after every context."""
    fixed = np.array(probs) / sum(probs)
    return lambda _: fixed


def chain(k: int) -> Shape:
    """k tokens, one behind the other."""
    return lambda path: int(len(path) < k)


def tree(*widths: int) -> Shape:
    """As many children at each depth."""
    return lambda path: widths[len(path)] if len(path) < len(widths) else 0


# --- drafts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drafted:
    """A draft of one row, and how likely it is made."""

    weight: float = 1.0
    nodes: tuple[tuple[int, int, np.ndarray | None], ...] = ()  # token, parent, the q it was drawn from
    law: DraftLaw = DraftLaw.ONE_HOT

    def path(self, node: int) -> Tokens:
        """The tokens from the root down to a node."""
        token, parent, _ = self.nodes[node]
        return (*(self.path(parent) if parent >= 0 else ()), token)


def drafts(q: Toy, law: DraftLaw, shape: Shape, context: Tokens, *, holes: bool = False) -> list[Drafted]:
    """List every draft; `holes`: with a place that is empty before every node's children.

    q may know more tokens than the target: those are drafted with ids outside the target's vocabulary.
    """
    open_drafts: list[tuple[Drafted, tuple[int, ...]]] = [(Drafted(law=law), (ROOT,))]
    done = []
    while open_drafts:
        draft, frontier = open_drafts.pop()
        if not frontier:
            done.append(draft)
            continue
        parent, *rest = frontier
        path = draft.path(parent) if parent != ROOT else ()
        count = shape(path)
        empty = ((0, HOLE, None),) * holes
        for weight, siblings in _siblings(q((*context, *path)), law, count):
            new = tuple((token, parent, drawn) for token, drawn in siblings)
            missing = ((0, HOLE, None),) * (count - len(new))
            first = len(draft.nodes) + len(empty)
            nodes = draft.nodes + empty + new + missing
            grown = Drafted(draft.weight * weight, nodes, law)
            open_drafts.append((grown, (*rest, *range(first, first + len(new)))))
    return done


def _siblings(
    q: np.ndarray, law: DraftLaw, count: int
) -> Iterator[tuple[float, tuple[tuple[int, np.ndarray | None], ...]]]:
    """Yield what may be drawn as the children of one node: (probability, ((token, its q), ...))."""
    if law == DraftLaw.ONE_HOT:
        top = np.argsort(-q, kind="stable")[:count]
        yield 1.0, tuple((int(token), None) for token in top)
        return
    if count == 0 or not q.any():  # nothing is left to be drawn: fewer siblings
        yield 1.0, ()
        return
    for token in np.flatnonzero(q):
        rest = q.copy()
        if law == DraftLaw.WITHOUT_REPLACEMENT:
            rest[token] = 0.0
            rest = rest / rest.sum() if rest.any() else rest
        for weight, others in _siblings(rest, law, count - 1):
            yield float(q[token]) * weight, ((int(token), q), *others)


def as_draft(rows: Sequence[Drafted], vocab: int, *, always_probs: bool = False) -> Draft:
    """Batch drafts; q of a place without a node, or of a fixed node, is NaN: nobody may read it."""
    n = max(len(row.nodes) for row in rows)
    tokens = np.zeros((len(rows), n), dtype=np.int64)
    parents = np.full((len(rows), n), HOLE, dtype=np.int64)
    probs = np.full((len(rows), n, vocab), np.nan)
    for b, row in enumerate(rows):
        for i, (token, parent, q) in enumerate(row.nodes):
            tokens[b, i], parents[b, i] = token, parent
            if q is not None:
                probs[b, i] = q[:vocab]
    laws = [row.law for row in rows]
    depth, width = _bounds(rows)
    needed = always_probs or any(row.law != DraftLaw.ONE_HOT for row in rows)
    q_all = torch.from_numpy(probs) if needed else None
    nodes = torch.from_numpy(tokens), torch.from_numpy(parents)
    return Draft.of(*nodes, laws, depth=depth, width=width, probs=q_all)


def _bounds(rows: Sequence[Drafted]) -> tuple[int, int]:
    depth = width = 0
    for row in rows:
        parents = [parent for _, parent, _ in row.nodes]
        real = [i for i, parent in enumerate(parents) if parent != HOLE]
        depth = max([depth, *(len(row.path(i)) for i in real)])
        width = max([width, *(parents.count(parents[i]) for i in real)])
    return depth, width


def as_p(
    p: Toy, contexts: Sequence[Tokens], rows: Sequence[Drafted], greedy: Sequence[bool] | None = None
) -> TargetDistributions:
    """Make the target's distributions after each context and after each node of its draft: float64."""
    n = max(len(row.nodes) for row in rows)
    vocab = len(p(contexts[0]))
    probs = np.zeros((len(rows), 1 + n, vocab))
    probs[:, :, 0] = 1.0  # after a place without a node: nobody asks
    for b, (context, row) in enumerate(zip(contexts, rows, strict=True)):
        probs[b, 0] = p(context)
        for i, (_, parent, _) in enumerate(row.nodes):
            if parent != HOLE:  # nothing follows a token outside the vocabulary: any p will do
                inside = tuple(token for token in row.path(i) if token < vocab)
                probs[b, 1 + i] = p((*context, *inside))
    mask = torch.zeros(len(rows), dtype=torch.bool) if greedy is None else torch.tensor(greedy)
    return TargetDistributions(torch.from_numpy(probs).log(), mask)


# --- texts ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """A target, a drafter, and how they are run."""

    p: Toy
    q: Toy
    law: Callable[[Tokens], DraftLaw]  # context -> law of the round's draft
    shape: Callable[[Tokens, int], Shape]  # context, tokens accepted in the round before -> shape
    size: int = 3  # tokens of output, the cap
    eos: int | None = None
    holes: bool = False
    greedy: bool = False
    strict: bool = True
    wrap: Wrap | None = field(default=None, compare=False)
    mutate: Callable[[Drafted], Drafted] = lambda drafted: drafted

    def rounds(self, context: Tokens, accepted: int) -> list[Drafted]:
        """List every draft of a round."""
        shape = self.shape(context, accepted)
        every = drafts(self.q, self.law(context), shape, context, holes=self.holes)
        return [self.mutate(drafted) for drafted in every]

    def ended(self, text: Tokens) -> bool:
        """Whether nothing follows a text."""
        return len(text) >= self.size or (self.eos is not None and self.eos in text)


def world(p: Toy, q: Toy, law: DraftLaw, shape: Shape, **options: object) -> World:
    """Make a world in which every round is drafted alike."""
    return World(p, q, lambda _: law, lambda *_: shape, **options)  # type: ignore[arg-type]


def target_law(w: World) -> TextLaw:
    """The law of the text that the target alone says."""
    law: TextLaw = {}
    todo: list[tuple[Tokens, float]] = [((), 1.0)]
    while todo:
        text, weight = todo.pop()
        if w.ended(text):
            law[text] = weight
            continue
        p = w.p(text)
        if w.greedy:
            p = np.eye(len(p))[p.argmax()]
        todo += [((*text, token), weight * float(p[token])) for token in np.flatnonzero(p).tolist()]
    return law


def output_law(verifier: Verifier, w: World) -> TextLaw:
    """The law of the text that comes out of rounds of drafting and verifying."""
    # A state is a text and how much was accepted last; every round makes a text longer.
    states: list[dict[tuple[Tokens, int], float]] = [defaultdict(float) for _ in range(w.size + 1)]
    states[0][(), 0] = 1.0
    law: TextLaw = defaultdict(float)
    for length in range(w.size):
        for (text, accepted), weight in one_round(verifier, w, states[length]).items():
            if w.ended(text):
                law[text] += weight
            else:
                states[len(text)][text, accepted] += weight
    return dict(law)


def one_round(
    verifier: Verifier, w: World, states: dict[tuple[Tokens, int], float]
) -> dict[tuple[Tokens, int], float]:
    """Draft, verify and commit once after each state, in every way it can go."""
    rows, contexts, weights = [], [], []
    for (text, accepted), weight in states.items():
        for drafted in w.rounds(text, accepted):
            rows.append(drafted)
            contexts.append(text)
            weights.append(weight * drafted.weight)
    after: dict[tuple[Tokens, int], float] = defaultdict(float)
    if not rows:
        return after
    p = as_p(w.p, contexts, rows, [w.greedy] * len(rows))
    draft = as_draft(rows, p.vocab_size)
    every = outcomes(verifier, p, draft, strict=w.strict, wrap=w.wrap)
    blocks = torch.cat([draft.tokens[every.row.unsqueeze(1), every.path.clamp(min=0)], every.path], dim=1)
    packed = torch.cat([every.row.unsqueeze(1), every.next_token.unsqueeze(1), blocks], dim=1)
    depth = every.path.shape[1]
    for (b, last, *block), chance in zip(packed.tolist(), every.weight.tolist(), strict=True):
        path = [node for node in block[depth:] if node >= 0]
        tokens = [*block[: len(path)], last]
        text = _until_end(w, contexts[b], tokens)
        after[text, len(path)] += weights[b] * chance
    return after


def _until_end(w: World, text: Tokens, block: Sequence[int]) -> Tokens:
    """Commit a block, but for what stands behind the end."""
    for token in block:
        if w.ended(text):
            break
        text = (*text, token)
    return text


def error(verifier: Verifier, w: World) -> float:
    """How far the output's law is from the target's: the largest difference of a text's probability."""
    found, wanted = output_law(verifier, w), target_law(w)
    return max(abs(found.get(text, 0.0) - wanted.get(text, 0.0)) for text in found.keys() | wanted.keys())


def accepted(verifier: Verifier, w: World) -> float:
    """How many drafted tokens a first round accepts, in expectation."""
    after = one_round(verifier, w, {((), 0): 1.0})
    return sum(count * weight for (_, count), weight in after.items())
