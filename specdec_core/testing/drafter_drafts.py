"""What a drafter promises about each draft: that there is one, its shape, its budget, and no memory."""

from __future__ import annotations

from typing import Any

from specdec_core.contract.draft import Draft
from specdec_core.contract.interfaces import Budget, Capabilities, Context
from specdec_core.testing.contracts import Contracts, Untried, must
from specdec_core.testing.drafter_kit import GREEDY, LENGTHS, SAMPLED, DrafterKit, global_seeds, prompts_of
from specdec_core.testing.reference import base
from specdec_core.testing.watching import Watched, shown

CONTRACTS: Contracts[DrafterKit] = Contracts()


@CONTRACTS.add(
    "works",
    "it is built, bound to a target, served by a verifier, and drafts without raising",
    "read the error; a drafter whose weights must fit the target needs the hook pytest_specdec_options in a "
    "conftest.py, or --specdec-target FOLDER",
)
def works(kit: DrafterKit) -> None:
    must(not kit.refusal, kit.refusal)
    can: Any = kit.capabilities
    must(isinstance(can, Capabilities), f"`capabilities` must be Capabilities, not {type(can).__name__}")
    must(can.laws, "`capabilities.laws` is empty: name a DraftLaw for each way in which it drafts")
    must(can.max_depth >= 0, f"`capabilities.max_depth` is {can.max_depth}")
    must(
        can.makes_trees or can.nodes == can.max_depth,
        f"it makes chains of up to {can.max_depth} nodes, and `capabilities.max_nodes` is {can.max_nodes}",
    )
    for params in (GREEDY, SAMPLED):
        kit.run(prompts_of(kit.target, *LENGTHS), params, contract="works")


@CONTRACTS.add(
    "shape",
    "a draft has the tensors, dtypes, device and bounds of the contract, parents before children",
    "see `Draft` in docs/plugins.md: tokens, parents and laws beside their shapes",
)
def shape(kit: DrafterKit) -> None:
    for params in (GREEDY, SAMPLED):
        run = kit.run(prompts_of(kit.target, *LENGTHS), params, contract="shape")
        for proposal in run.proposals:
            if not isinstance(proposal.draft, Draft) or proposal.draft.counts is None:
                continue
            for row, count in enumerate(proposal.draft.counts):
                last = max((at for at, depth in enumerate(proposal.depths(row)) if depth), default=-1)
                must(
                    last < count, f"`counts` says {count} of a row that has node {last}: its nodes end before"
                )


@CONTRACTS.add(
    "budget",
    "a row's draft is never deeper than its budget, nor has more nodes, whatever the budget",
    "clip to budget.depth[i] of every row, 0 included, and to budget.nodes, before anything is drawn",
)
def budget(kit: DrafterKit) -> None:
    prompts, deepest = prompts_of(kit.target, *LENGTHS, seed=2), kit.capabilities.max_depth
    greedy = GREEDY.replace(max_new_tokens=12)
    for depth, params in ((0, greedy), (1, greedy), (2, SAMPLED), (deepest, greedy)):
        kit.run(prompts, params, contract="budget", draft_tokens=depth)
    few = kit.capabilities.nodes // 2

    def narrow(context: Context, whole: Budget) -> Budget:
        """Another budget for each row, as a length policy gives it."""
        depth = [min(most, i % 3) for i, most in enumerate(whole.depth)]
        return Budget(depth, max(min(whole.nodes, few), *depth, 1))

    run = kit.run(prompts, greedy, contract="budget", see=narrow)
    for proposal in run.proposals:
        for row, most in enumerate(proposal.budget.depth):
            if isinstance(proposal.draft, Draft) and proposal.draft.nodes:
                depths = proposal.depths(row)
                deep, count = max(depths), sum(map(bool, depths))
                must(deep <= most, f"a node of depth {deep}, where budget.depth[{row}] is {most}")
                left = proposal.budget.nodes
                must(count <= left, f"{count} nodes in a row, where budget.nodes is {left}")


@CONTRACTS.add(
    "stateless",
    "what it drafts for a prompt does not depend on what was generated before",
    "drop all of a row in `release`, start afresh in `admit`, keep nothing on the class; a drafter that "
    "learns from other rows on purpose declares Capabilities(learns=True)",
)
def stateless(kit: DrafterKit) -> None:
    if kit.capabilities.learns:
        raise Untried("it declares learns=True")
    [first] = prompts_of(kit.target, 9, seed=3)
    watched = Watched(kit.build(kit.target))
    decoder = kit.decoder(watched)
    others = _misleading(kit, first)
    for params in (GREEDY, SAMPLED):
        drafted = []
        for prompts in ([first], others, [first]):
            watched.proposals.clear()
            with global_seeds(3):
                kit.call(decoder, watched, prompts, params, "stateless")
            drafted.append([(p.texts[0], p.nodes(0)) for p in watched.proposals])
        for before, after in zip(drafted[0], drafted[2], strict=False):
            must(
                before == after,
                f"the same prompt again, after {len(before[0])} tokens: drafted {shown(before[1])} at first, "
                f"{shown(after[1])} after other prompts",
            )


def _misleading(kit: DrafterKit, prompt: list[int]) -> list[list[int]]:
    """Prompts in which the tokens of another, and of what is said after it, are followed by others."""
    said = base(kit.target.model, prompt, 12)
    mixed = [token for pair in zip(prompt + said, reversed(prompt + said), strict=True) for token in pair]
    return [[*prompt, *said, *reversed(said)], mixed]
