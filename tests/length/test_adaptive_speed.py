"""`--draft-tokens auto` against plain decoding and fixed lengths: simulated, so the figures are exact."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from simulation import CPU_FLOAT32, CPU_HALF, CPU_PACKED, GPU, Lookup, Machine, Model, Row, simulate

from specdec_core.length.costs import RoundCosts

Text = tuple[list[int], list[int]]
MACHINES = {
    "float32": Machine("float32", CPU_FLOAT32),
    "bf16": Machine("bf16", CPU_HALF),
    "gpu": Machine("gpu", GPU, "cuda"),
    "packed": Machine("packed", CPU_PACKED, noise=0.03),
    "without padding": Machine("without padding", CPU_PACKED, noise=0.03, ragged=True),
    "noisy": Machine("noisy", CPU_FLOAT32, noise=0.2),
}
ACCEPTANCE: dict[str, Callable[[Row], float]] = {
    ".9": lambda row: 0.9,
    ".2": lambda row: 0.2,
    "never": lambda row: 0.0,
    "changes": lambda row: (0.9, 0.2)[row.said // 60 % 2],
}


def copying(r: random.Random) -> Text:
    """Repeats the prompt, with a slip now and then."""
    prompt = [r.randrange(400) for _ in range(130)]
    return [*prompt, 400, 401], [t if r.random() > 0.01 else r.randrange(400) for t in prompt] + prompt[:20]


def code(r: random.Random) -> Text:
    """New names among phrases that come again."""
    phrases = [[r.randrange(60) for _ in range(r.randrange(2, 7))] for _ in range(12)]

    def some(n: int) -> list[int]:
        said: list[int] = []
        while len(said) < n:
            said += r.choice(phrases) if r.random() < 0.5 else [r.randrange(60, 400)]
        return said[:n]

    return some(60), some(130)


def chat(r: random.Random) -> Text:
    """Common words come again, in another order."""
    words, often = range(400), [1 / (1 + i) for i in range(400)]
    return r.choices(words, often, k=50), r.choices(words, often, k=130)


CATEGORIES = {"copying": copying, "code": code, "chat": chat}


def texts(category: str, rows: int) -> list[Text]:
    return [CATEGORIES[category](random.Random(f"{category} {i}")) for i in range(rows)]


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize("machine", MACHINES)
def test_lookup_never_loses(machine: str, category: str, batch: int) -> None:
    """The first texts too, when nothing was timed yet; from then on costs are known."""
    on, said = MACHINES[machine], texts(category, max(batch, 5))
    plain = simulate(said, Lookup(), on, 0, batch=batch).rate
    fixed = {k: simulate(said, Lookup(), on, k, batch=batch).rate / plain for k in (1, 2, 5, 10)}
    costs = RoundCosts(on.device, ragged=on.ragged)
    for share in (0.82, 0.86):  # of the best fixed length: nothing known, costs known
        auto = simulate(said, Lookup(), on, "auto", batch=batch, costs=costs).rate / plain
        assert auto > 0.985, fixed
        assert auto > share * max(fixed.values()), fixed
    if category == "copying" and batch == 1:
        assert auto > 3


@pytest.mark.parametrize("category", CATEGORIES)
def test_without_padding_batches_gain(category: str) -> None:
    """Rows come and go, four at a time, and each drafts what it is worth to all."""
    rates = {}
    for name in ("packed", "without padding"):
        said, on = texts(category, 12), MACHINES[name]
        plain = simulate(said, Lookup(), on, 0, batch=4).rate
        rates[name] = simulate(said, Lookup(), on, "auto", batch=4).rate / plain
    assert (
        rates["without padding"] > rates["packed"] * {"copying": 0.97, "code": 1.0, "chat": 0.995}[category]
    )


@pytest.mark.parametrize("depth_width", [(5, 1), (3, 2)], ids=["chain", "tree"])
@pytest.mark.parametrize("accepts", ACCEPTANCE)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("machine", "step"), [("float32", 0.3), ("gpu", 0.05)])
def test_models_hardly_ever_lose(
    machine: str, step: float, batch: int, accepts: str, depth_width: tuple[int, int]
) -> None:
    """What a model drafts must be drafted to learn what it is worth: that may cost a little."""
    on = Machine(machine, MACHINES[machine].seconds, MACHINES[machine].device, step=step)
    said = [([1] * 50, [0] * 200)] * max(batch, 4)

    def rate(k: int | str) -> float:
        models = [Model(ACCEPTANCE[accepts], *depth_width, seed) for seed in (1, 2)]
        runs = [simulate(said, model, on, k, batch=batch) for model in models]
        return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)

    plain, auto = rate(0), rate("auto")
    assert auto > 0.975 * plain
    assert auto > 0.85 * max(rate(k) for k in range(1, depth_width[0] + 1))


def test_where_nothing_pays_nothing_is_drafted_for_long() -> None:
    """And trying again takes less than one round in a hundred."""
    on = Machine("float32", CPU_FLOAT32, step=0.3)
    done = simulate([([1] * 50, [0] * 2000)], Model(ACCEPTANCE["never"], 5), on, "auto")
    drafted = [i for i, width in enumerate(done.widths) if width]
    assert drafted[-1] > 500  # it does try again
    assert sum(done.widths[20:]) < 0.015 * done.rounds
    assert done.seconds < 1.01 * done.rounds * on.seconds(1) + on.seconds(50)


def test_it_finds_out_when_a_model_begins_to_be_right() -> None:
    on = Machine("gpu", GPU, "cuda", step=0.1)
    later = Model(lambda row: 0.0 if row.said < 400 else 0.9, 5)
    done = simulate([([1] * 50, [0] * 1000)], later, on, "auto")
    assert sum(done.widths[-60:]) > 240
    assert done.rounds < 400 + 60 + 170


def test_a_large_batch_on_a_cpu_is_drafted_less() -> None:
    """What is checked costs more where the cores are busy anyway."""
    on, widths = MACHINES["float32"], {}
    for batch in (1, 16):
        done = simulate(texts("code", 16), Lookup(), on, "auto", batch=batch)
        widths[batch] = sum(done.widths) / done.rounds
    assert widths[16] < 0.5 * widths[1]


def test_a_batch_is_no_faster_for_its_faster_rows() -> None:
    """Three rows copy, one says nothing that was there before: the batch ends with that one."""
    on = MACHINES["packed"]
    said = [*texts("copying", 3), (list(range(500, 600)), list(range(600, 750)))]
    plain = simulate(said, Lookup(), on, 0, batch=4).rate
    assert simulate(said, Lookup(), on, 10, batch=4).rate < 0.9 * plain
    assert simulate(said, Lookup(), on, "auto", batch=4).rate > 0.97 * plain


def test_while_others_wait_every_row_counts() -> None:
    """A place that becomes free early is taken: then what is saved in any row is saved for all."""
    on = MACHINES["packed"]
    said = [*texts("copying", 3), (list(range(500, 600)), list(range(600, 750)))] * 3
    plain = simulate(said, Lookup(), on, 0, batch=4).rate
    assert simulate(said, Lookup(), on, "auto", batch=4).rate > 1.2 * plain


def test_what_is_hopeless_is_asked_for_now_and_then_only() -> None:
    """And at once again when it begins to pay."""
    on, drafting = MACHINES["float32"], Lookup()
    asked, propose = [], drafting.propose
    drafting.propose = lambda *args: (asked.append(1), propose(*args))[1]  # type: ignore[method-assign]
    r = random.Random(0)
    chatter = [
        ([r.randrange(40) for _ in range(40)], [r.randrange(40) for _ in range(200)]) for _ in range(8)
    ]
    done = simulate(chatter, drafting, on, "auto", batch=8)
    assert len(asked) < 0.4 * done.rounds
    copied = [(prompt, text[:100] + text[:100]) for prompt, text in chatter]
    late = simulate(copied, Lookup(), on, "auto", batch=8)
    assert late.rounds < 100 + 60
