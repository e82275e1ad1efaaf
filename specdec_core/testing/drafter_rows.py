"""What a drafter promises about rows: rollback, rows that come and go, rows of different lengths."""

from __future__ import annotations

from typing import Any

from specdec_core.contract.errors import DrafterError
from specdec_core.contract.interfaces import Verifier
from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.plugins.choice import build_verifiers, choose
from specdec_core.testing.contracts import Broken, Contracts, Untried, must
from specdec_core.testing.drafter_kit import GREEDY, LENGTHS, SAMPLED, DrafterKit, prompts_of
from specdec_core.testing.rejecting import Rejecting
from specdec_core.testing.watching import Watched, shown, sometimes

CONTRACTS: Contracts[DrafterKit] = Contracts()


@CONTRACTS.add(
    "rollback",
    "after a rejection it drafts what a new drafter does that reads the same text for the first time",
    "in `observe`, forget every drafted node that is not in outcome.paths, and feed the committed token that "
    "took its place; a CachedModel does both in `keep`",
)
def rollback(kit: DrafterKit) -> None:
    if kit.capabilities.learns:
        raise Untried("it declares learns=True, so its drafts may depend on what was rejected")
    if kit.capabilities.top_logits:
        raise Untried("it asks for top_logits, of rejected nodes too, so its drafts may depend on these")
    [prompt] = prompts_of(kit.target, 7, seed=4)
    n, tried = 26, 0
    for params in (GREEDY.replace(max_new_tokens=n), SAMPLED.replace(max_new_tokens=n)):
        inner = _verifier(kit, params)
        rejecting = Rejecting(inner, (None, 0, 1, None, 0, 2))
        run = kit.run([prompt], params, verifier=rejecting, max_batch=1)
        later = [p for p in run.proposals if len(p.texts[0]) > len(prompt) + 1]
        for proposal in later[1:9]:
            text, left = proposal.texts[0], len(prompt) + n - len(proposal.texts[0])
            fresh, here = kit.fresh_draft(text, left, params, inner), proposal.nodes(0)
            must(
                here == fresh,
                f"after {len(text)} tokens, some drafts of which were rejected: drafted {shown(here)}; a new "
                f"drafter drafts {shown(fresh)}",
            )
            tried += bool(here)
    if not tried:
        raise Untried("it drafted nothing after a rejection")


def _verifier(kit: DrafterKit, params: SamplingParams) -> Verifier:
    """The verifier that `auto` takes for params."""
    return choose(build_verifiers("auto", kit.registry), kit.spec, kit.capabilities, [params])


@CONTRACTS.add(
    "rows",
    "rows begin and end in mid-run, and none changes what is drafted for another",
    "keep state by row id, caches by place; `admit` and `release` may come at any round, `release` without a "
    "last `observe`",
)
def rows(kit: DrafterKit) -> None:
    prompts = prompts_of(kit.target, 5, 12, 1, 8, 3, seed=5)
    params = [GREEDY.replace(max_new_tokens=n) for n in (14, 5, 20, 9, 12)]
    _alone_and_together(kit, prompts, params, max_batch=2)
    watched = Watched(kit.build(kit.target))
    decoder = kit.decoder(watched, max_batch=2)
    expected = kit.call(decoder, watched, prompts, params).drafter.drafted()
    for rounds in (1, 3):
        run = decoder.rounds([list(prompt) for prompt in prompts], params)
        try:
            for _ in range(rounds):
                next(run)
            run.close()
        except DrafterError as error:
            raise Broken(f"in a run that was given up: {error}") from error
    watched.proposals.clear()
    again = kit.call(decoder, watched, prompts, params).drafter.drafted()
    if not kit.capabilities.learns:
        _same_drafts(expected, again, "after runs that were given up")


@CONTRACTS.add(
    "ragged",
    "rows of one batch have their own lengths and budgets, and stay in step when they are not asked for",
    "read lengths and places from the context of each call; rows without a budget are still observed",
)
def ragged(kit: DrafterKit) -> None:
    prompts = prompts_of(kit.target, *LENGTHS, seed=6)
    params = [GREEDY.replace(max_new_tokens=n) for n in (16, 9, 18, 12)]
    _alone_and_together(kit, prompts, params, max_batch=4, see=sometimes(3))


def _alone_and_together(
    kit: DrafterKit, prompts: list[list[int]], params: list[SamplingParams], **options: Any
) -> None:
    together = kit.run(prompts, params, **options)
    alone = kit.run(prompts, params, **{**options, "max_batch": 1})
    for i, (one, other) in enumerate(zip(alone.results, together.results, strict=True)):
        must(
            one.token_ids == other.token_ids,
            f"row {i} says {other.token_ids} in a batch and {one.token_ids} alone",
        )
    if not kit.capabilities.learns:
        _same_drafts(alone.drafter.drafted(), together.drafter.drafted(), "in a batch")


def _same_drafts(expected: dict[Any, Any], found: dict[Any, Any], where: str) -> None:
    for text, nodes in found.items():
        before = expected.get(text)
        must(
            before is None or before == nodes,
            f"after {len(text)} tokens it drafts {shown(before or [])} alone, and {shown(nodes)} {where}",
        )
