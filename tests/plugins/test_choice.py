"""Which verifier `auto` takes, and what a pair that does not fit is told."""

from __future__ import annotations

import itertools

import pytest

from specdec_core import (
    Capabilities,
    DraftLaw,
    IncompatiblePair,
    InvalidParameter,
    InvalidSpec,
    Registry,
    SamplingParams,
    UnknownPlugin,
    Verifier,
    VerifierConfig,
)
from specdec_core.plugins.choice import build_verifiers, check_pair, check_params, choose, misfit
from specdec_verifiers import Block, Greedy, Match, Rejection, TreeMask, Typical
from specdec_verifiers.typical import TypicalConfig

ONE_HOT, SAMPLED = DraftLaw.ONE_HOT, DraftLaw.SAMPLED
WITHOUT, COUPLED = DraftLaw.WITHOUT_REPLACEMENT, DraftLaw.COUPLED
PLAIN = VerifierConfig()
BUILT_IN: list[Verifier] = [
    Greedy(PLAIN),
    Match(PLAIN),
    Rejection(PLAIN),
    Block(PLAIN),
    TreeMask(PLAIN),
    Typical(TypicalConfig()),
]
COLD = SamplingParams()
HOT = SamplingParams(temperature=1.0)
SEEDED = SamplingParams(temperature=1.0, seed=1)


def drafts(*laws: DraftLaw, trees: bool = False) -> Capabilities:
    """What a drafter of these laws can make."""
    return Capabilities(frozenset(laws), max_depth=4, makes_trees=trees)


def auto(can: Capabilities, *params: SamplingParams) -> str:
    """Name the verifier that `auto` takes."""
    return choose(BUILT_IN, "d", can, params).name


@pytest.mark.parametrize("laws", [(ONE_HOT,), (SAMPLED,), (WITHOUT,), (COUPLED,), (ONE_HOT, SAMPLED), ()])
@pytest.mark.parametrize("trees", [False, True])
def test_at_temperature_zero_it_is_greedy(laws: tuple[DraftLaw, ...], trees: bool) -> None:
    assert auto(drafts(*laws, trees=trees), COLD) == "greedy"
    assert auto(drafts(*laws, trees=trees), COLD, SamplingParams(seed=4)) == "greedy"


@pytest.mark.parametrize("laws", [(ONE_HOT,), (SAMPLED,), (WITHOUT,), (COUPLED,), (ONE_HOT, SAMPLED)])
@pytest.mark.parametrize("trees", [False, True])
def test_a_seed_is_promised_one_text(laws: tuple[DraftLaw, ...], trees: bool) -> None:
    assert auto(drafts(*laws, trees=trees), SEEDED) == "match"
    assert auto(drafts(*laws, trees=trees), HOT, SEEDED, COLD) == "match", "one seeded row is enough"


@pytest.mark.parametrize("laws", [(ONE_HOT,), (COUPLED,), (ONE_HOT, COUPLED), ()])
@pytest.mark.parametrize("trees", [False, True])
def test_a_draft_without_a_q_is_matched(laws: tuple[DraftLaw, ...], trees: bool) -> None:
    assert auto(drafts(*laws, trees=trees), HOT) == "match"


@pytest.mark.parametrize(
    ("can", "name"),
    [
        (drafts(SAMPLED), "block"),
        (drafts(SAMPLED, ONE_HOT), "block"),
        (drafts(WITHOUT), "rejection"),
        (drafts(SAMPLED, trees=True), "tree_mask"),
        (drafts(WITHOUT, trees=True), "tree_mask"),
        (drafts(SAMPLED, ONE_HOT, WITHOUT, trees=True), "tree_mask"),
        (drafts(SAMPLED, COUPLED), "match"),
    ],
)
def test_without_a_seed_it_is_what_accepts_most(can: Capabilities, name: str) -> None:
    assert auto(can, HOT) == name
    assert auto(can, HOT, COLD) == name, "rows at temperature 0 may be in the batch"


def test_a_lossy_verifier_is_never_taken() -> None:
    every_law = [laws for n in range(5) for laws in itertools.combinations(DraftLaw, n)]
    for laws, trees, params in itertools.product(every_law, (False, True), (COLD, HOT, SEEDED)):
        chosen = choose(BUILT_IN, "d", drafts(*laws, trees=trees), [params])
        assert chosen.lossless
    with pytest.raises(IncompatiblePair, match=r"no verifier treats the chains of drafter 'd' \(SAMPLED\)"):
        choose(BUILT_IN[-1:], "d", drafts(SAMPLED), [HOT])


def test_a_seed_makes_do_with_what_there_is() -> None:
    assert choose([Rejection(PLAIN), Block(PLAIN)], "d", drafts(SAMPLED), [SEEDED]).name == "block"


def test_a_verifier_that_cannot_sample_is_not_taken_for_sampling() -> None:
    with pytest.raises(IncompatiblePair):
        choose([Greedy(PLAIN)], "d", drafts(ONE_HOT), [HOT])


@pytest.mark.parametrize("verifier", BUILT_IN, ids=lambda v: v.name)
def test_what_fits_is_what_is_declared(verifier: Verifier) -> None:
    for laws in ((), (ONE_HOT,), (SAMPLED,), (WITHOUT,), (COUPLED,), tuple(DraftLaw)):
        for trees in (False, True):
            fits = frozenset(laws) <= verifier.laws and (verifier.handles_trees or not trees)
            assert (misfit(verifier, "d", drafts(*laws, trees=trees)) == "") == fits


@pytest.mark.parametrize(
    ("verifier", "can", "words"),
    [
        (Block(PLAIN), drafts(WITHOUT), "'block' treats ONE_HOT, SAMPLED, but drafter 'd' drafts WITHOUT"),
        (
            Rejection(PLAIN),
            drafts(SAMPLED, trees=True),
            "'rejection' judges chains, but drafter 'd' drafts t",
        ),
        (TreeMask(PLAIN), drafts(COUPLED), "but drafter 'd' drafts COUPLED; use --verifier auto"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_with_both_names(
    verifier: Verifier, can: Capabilities, words: str
) -> None:
    with pytest.raises(IncompatiblePair, match=words):
        check_pair(verifier, "d", can)


def test_only_greedy_refuses_a_temperature() -> None:
    for verifier in BUILT_IN[1:]:
        check_params(verifier, [COLD, HOT])
    check_params(BUILT_IN[0], [COLD])
    with pytest.raises(InvalidParameter, match=r"temperature=1\.0 .* 'greedy' is greedy only"):
        check_params(BUILT_IN[0], [COLD, HOT])


def test_verifiers_are_built_by_name_with_options() -> None:
    registry = Registry.discover(environ={"SPECDEC_PLUGINS": ""})
    names = {verifier.name for verifier in build_verifiers("auto", registry)}
    assert names >= {verifier.name for verifier in BUILT_IN}
    (typical,) = build_verifiers("typical:epsilon=0.2", registry)
    assert (typical.config.epsilon, typical.config.delta) == (0.2, 0.3)
    assert build_verifiers(typical, registry) == [typical]
    with pytest.raises(InvalidSpec, match="epsilon=2"):
        build_verifiers("typical:epsilon=2", registry)
    with pytest.raises(UnknownPlugin, match="blok"):
        build_verifiers("blok", registry)
