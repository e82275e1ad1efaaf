"""What a verifier promises: a valid verdict, a pure function, and the target's law."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from specdec_core.contract.draft import HOLE, Draft, DraftLaw, Verdict
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.engine.decoder import SpecDecoder
from specdec_core.testing.contracts import Broken, Contracts, Untried, must
from specdec_core.testing.enumeration import KeyReused
from specdec_core.testing.models import ids
from specdec_core.testing.reference import base, greedy_fault
from specdec_core.testing.scripted import Ask, ScriptedDrafter, following, planted, wrong
from specdec_core.testing.targets import tiny_target
from specdec_core.testing.verifier_kit import (
    VOCAB,
    WAITS,
    Steps,
    VerifierKit,
    committed,
    elsewhere,
    keyed,
    no_reading,
    one_row,
)
from specdec_core.testing.worlds import (
    Shape,
    Tokens,
    Toy,
    World,
    chain,
    error,
    output_law,
    target_law,
    toy,
    tree,
    world,
)

CONTRACTS: Contracts[VerifierKit] = Contracts()
EXACT = 1e-12
SEEDS = range(12)
_LAWS = ("ONE_HOT", "SAMPLED", "WITHOUT_REPLACEMENT")


@CONTRACTS.add(
    "works",
    "it is built, and declares what it can judge",
    "see `Verifier` in docs/plugins.md: laws is a frozenset of DraftLaw, the others are bools and an int",
)
def works(kit: VerifierKit) -> None:
    verifier: Any = kit.build()
    must(
        isinstance(verifier.laws, frozenset) and verifier.laws <= set(DraftLaw) and verifier.laws,
        f"`laws` must be a frozenset of DraftLaw with at least one, not {verifier.laws!r}",
    )
    for name in ("handles_trees", "lossless", "samples", "drafter_invariant"):
        value = getattr(verifier, name)
        must(isinstance(value, bool), f"`{name}` must be True or False, not {value!r}")
    must(isinstance(verifier.preference, int), f"`preference` must be an int, not {verifier.preference!r}")
    must(
        DraftLaw.COUPLED not in verifier.laws or verifier.drafter_invariant,
        "it lists COUPLED, which keeps the law only where the text does not depend on the draft, and says "
        "drafter_invariant=False",
    )


@CONTRACTS.add(
    "verdict",
    "a verdict is a path of real nodes from the root, and a token of the vocabulary",
    "path is int64 [B, d], -1 padded on the right, each node a child of the one before; next_token int64 [B]",
)
def verdict(kit: VerifierKit) -> None:
    for seed in SEEDS:
        p, draft = kit.batch(seed)
        _check_verdict(draft, kit.judge(p, draft), p.vocab_size)


def _check_verdict(draft: Draft, found: Any, vocab: int) -> None:
    must(isinstance(found, Verdict), f"verify must return a Verdict, not {type(found).__name__}")
    rows = draft.rows
    for name, tensor, size in (("path", found.path, 2), ("next_token", found.next_token, 1)):
        must(
            tensor.dtype == torch.int64 and tensor.dim() == size and len(tensor) == rows,
            f"`{name}` must be int64 [{rows}{', d' * (size - 1)}], not {tensor.dtype} {list(tensor.shape)}",
        )
    for row, path in enumerate(found.path.tolist()):
        real = [node for node in path if node >= 0]
        must(path[: len(real)] == real, f"path {path} has a gap: -1 stands behind the last node only")
        parents = draft.parents[row].tolist()
        above = -1
        for node in real:
            must(
                node < draft.nodes and parents[node] == above and parents[node] != HOLE,
                f"path {path}: node {node} is no child of {above} in parents {parents}",
            )
            above = node
        token = int(found.next_token[row])
        must(0 <= token < vocab, f"next_token {token} is no token of a vocabulary of {vocab}")


@CONTRACTS.add(
    "pure",
    "the same round, the same verdict: nothing given is written to, no generator but `rng` is used",
    "clone before writing; draw with rng.bernoulli, rng.categorical or rng.target_draw",
)
def pure(kit: VerifierKit) -> None:
    for seed in SEEDS[:6]:
        p, draft = kit.batch(seed)
        given = [
            t
            for t in (p.logits, p.probs, draft.tokens, draft.parents, draft.laws, draft.probs)
            if t is not None
        ]
        before = [tensor.clone() for tensor in given]
        state = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
        first = kit.judge(p, draft)
        must(torch.equal(torch.get_rng_state(), state[0]), "torch's global generator was moved")
        must(random.getstate() == state[1], "Python's global generator was moved")
        must(str(np.random.get_state()) == state[2], "numpy's global generator was moved")
        for old, new in zip(before, given, strict=True):
            must(torch.equal(old, new) or old.isnan().any(), "it wrote to what it was given")
        kit.judge(*kit.batch(seed + 100))
        again = kit.judge(p, draft)
        must(
            torch.equal(first.path, again.path) and torch.equal(first.next_token, again.next_token),
            "the same round with the same keys had another verdict the second time",
        )


@CONTRACTS.add(
    "transfers",
    "nothing is fetched to the host, and no shape depends on a value",
    "use torch.where and masks in place of `if`, `.item()`, `.tolist()`, nonzero and boolean indexing; loop "
    "to draft.depth and draft.width",
)
def transfers(kit: VerifierKit) -> None:
    for seed in SEEDS[:6]:
        p, draft = kit.batch(seed)
        rng = keyed(range(draft.rows))
        try:
            with Steps() as steps, no_reading():
                kit.verifier.verify(p, draft, rng)
        except AssertionError as fault:
            raise Broken(str(fault)) from None
        waiting = sorted(WAITS & set(steps.calls))
        must(not waiting, f"{', '.join(waiting)} waits for the device")
        found = kit.verifier.verify(*elsewhere(p, draft, "meta"), keyed(range(draft.rows), device="meta"))
        must(
            found.path.device.type == found.next_token.device.type == "meta",
            "the verdict is not on the device of the draft: make tensors with device=draft.tokens.device",
        )


@CONTRACTS.add(
    "batch",
    "a row is judged as it would be alone, whatever its neighbours and its padding",
    "read no place whose parent is -2, and reduce over nodes only, never over rows",
)
def batch(kit: VerifierKit) -> None:
    for seed in SEEDS:
        p, draft = kit.batch(seed)
        together = kit.judge(p, draft)
        for row in range(draft.rows):
            alone = one_row(p, draft, row)
            verdict = kit.verifier.verify(*alone, keyed([row]))
            here, there = committed(draft, together, row), committed(alone[1], verdict, 0)
            must(here == there, f"row {row} of {draft.rows} commits {here}, and {there} alone")


@CONTRACTS.add(
    "greedy",
    "in a row at temperature 0 it says the target's argmax, whatever is drafted",
    "p.probs is the point mass there: any exact rule follows from it",
)
def greedy(kit: VerifierKit) -> None:
    if not kit.verifier.lossless:
        raise Untried("it declares lossless=False")
    for name, w in _each(kit, toy(19, 3), toy(20, 3), greedy=True):
        [(text, chance)] = target_law(w).items()
        found = output_law(kit.verifier, w).get(text, 0.0)
        must(
            abs(found - chance) < EXACT,
            f"{name}: plain decoding says {list(text)}; its probability is {found:.3g} here",
        )


@CONTRACTS.add(
    "keys",
    "two draws of one round that may both happen have two keys",
    "key each draw by (node, draw); a draw that does not apply is a Bernoulli one with p = 0",
)
def keys(kit: VerifierKit) -> None:
    for name, w in _each(kit, toy(5, 3), toy(6, 3), size=2):
        try:
            output_law(kit.verifier, w)
        except KeyReused as fault:
            raise Broken(f"{name}: {fault}") from None


def _each(kit: VerifierKit, p: Toy, q: Toy, **options: Any) -> Iterator[tuple[str, World]]:
    """A world of every law and shape."""
    for law in kit.laws:
        for name, shape in kit.shapes.items():
            yield f"{law.name}, {name}", world(p, q, law, shape, **options)


@CONTRACTS.add(
    "law",
    "the text has exactly the target's law, for every draft, draw and shape: proved by enumeration",
    "see the rules in docs/plugins.md: what is left of p after a rejection is norm((p - q)+), with the q of "
    "the law; a rule that gives more on purpose declares lossless=False",
    cases=_LAWS,
)
def law(kit: VerifierKit, case: str) -> None:
    drawn = DraftLaw[case]
    if not kit.verifier.lossless:
        raise Untried("it declares lossless=False")
    if not kit.verifier.samples:
        raise Untried("it declares samples=False: rows at temperature 0 only")
    if drawn not in kit.verifier.laws:
        raise Untried("it does not take this law")
    for name, w in _worlds(kit, drawn).items():
        try:
            off = error(kit.verifier, w)
        except (KeyReused, AssertionError) as fault:
            raise Broken(f"{name}: {fault}") from None
        must(off < EXACT, f"{name}: the probability of a text is off by {off:.2g}")


def _worlds(kit: VerifierKit, drawn: DraftLaw) -> dict[str, World]:
    def every(shape: Shape) -> Any:
        return lambda *_: shape

    def changing(context: Tokens, accepted: int) -> Shape:
        return chain((len(context) + accepted) % 4)

    def declared(_: Tokens) -> DraftLaw:
        return drawn

    p, q = toy(7, 3), toy(8, 3)
    near = toy(9, 3)
    found = {
        "one token": World(p, q, declared, every(chain(1))),
        "a chain": World(p, q, declared, every(chain(3))),
        "tokens that one side never says": World(
            toy(1, 3, zeros=True), toy(2, 3, zeros=True), declared, every(chain(2)), holes=True
        ),
        "lengths that change, an EOS in mid-block": World(
            p, toy(10, 3, zeros=True), declared, changing, size=4, eos=1, holes=True
        ),
        "tokens outside the vocabulary": World(
            p, toy(16, VOCAB, sharpness=2.0), declared, every(chain(2)), size=2
        ),
        "a perfect draft": World(near, near, declared, every(chain(2)), size=2),
    }
    if kit.verifier.handles_trees:
        found |= {
            "a tree": World(p, q, declared, every(tree(2, 1)), size=2),
            "three siblings, with holes": World(
                p, toy(11, 3, zeros=True), declared, every(tree(3)), size=2, holes=True
            ),
        }
    return found


@CONTRACTS.add(
    "output",
    "in a decoder the output is lossless, and where it says so the same whatever drafts",
    "a verifier that sets drafter_invariant draws its tokens with rng.target_draw alone",
)
def output(kit: VerifierKit) -> None:
    target, prompt, n = tiny_target(), ids(7, 31), 18
    model = target.model
    texts: dict[str, list[int]] = {}
    for params in (
        SamplingParams(max_new_tokens=n),
        SamplingParams(max_new_tokens=n, temperature=0.9, seed=3),
    ):
        if not params.greedy and not (kit.verifier.samples and kit.verifier.drafter_invariant):
            continue
        plain = base(model, prompt, n)
        for name, script in _scripts(kit, [*prompt, *texts.get("none", plain)]).items():
            trees = kit.verifier.handles_trees
            drafter = ScriptedDrafter(script, depth=4, nodes=8 if trees else None, trees=trees)
            decoder = SpecDecoder(
                model,
                drafter=drafter,
                verifier=kit.build(),
                draft_tokens=None,
                strict=True,
                registry=kit.registry,
            )
            said = decoder.generate([prompt], params)[0].token_ids
            if params.greedy and kit.verifier.lossless:
                fault = greedy_fault(model, prompt, said)
                must(not fault and len(said) == n, f"with {name} drafts: {fault or 'too short'}")
            if not params.greedy:
                first = texts.setdefault("none", said)
                must(said == first, f"one seed says {first} without drafts and {said} with {name} drafts")


def _scripts(kit: VerifierKit, text: list[int]) -> dict[str, Any]:
    ahead = following(text)

    def partly(ask: Ask) -> list[int]:
        return [
            token if i < ask.call % 4 else wrong(token)
            for i, token in enumerate(ahead(ask.tokens, min(4, ask.depth)))
        ]

    found: dict[str, Any] = {
        "none": lambda ask: [],
        "right": lambda ask: ahead(ask.tokens, min(4, ask.depth)),
        "partly right": partly,
    }
    if kit.verifier.handles_trees:
        found["tree"] = planted([-1, -1, 1, 1, 3, 3], [1, 3, 5], ahead)
    if DraftLaw.ONE_HOT not in kit.verifier.laws:
        raise Untried("it takes no ONE_HOT drafts, which the kit's scripts make")
    return found
