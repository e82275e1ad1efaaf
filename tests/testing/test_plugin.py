"""The pytest plugin costs nothing until it is asked for, and the judge of frequencies is a fair one."""

from __future__ import annotations

import random
import subprocess
import sys
from importlib import metadata

import pytest
import torch
from scipy.stats import chisquare

from specdec_core.testing.chances import fits, p_value, positions, uniform_p_value

LIGHT = """
import sys
import pytest
code = pytest.main(["--collect-only", "-q", "-p", "no:xdist", sys.argv[1]])
heavy = {"torch", "transformers", "numpy", "pluggy"} & set(sys.modules) - {"pluggy"}
assert "specdec_core.testing.plugin" in sys.modules
assert not heavy, heavy
"""


def test_loading_the_plugin_imports_nothing_heavy(tmp_path: object) -> None:
    subprocess.run([sys.executable, "-c", LIGHT, str(tmp_path)], check=True, capture_output=True)


def test_pytest_finds_the_plugin() -> None:
    [point] = [p for p in metadata.distribution("specdec-core").entry_points if p.group == "pytest11"]
    assert (point.name, point.value) == ("specdec", "specdec_core.testing.plugin")


def test_p_values_are_those_of_pearsons_test() -> None:
    seen, expected = [18, 25, 31, 26], [25.0, 25.0, 25.0, 25.0]
    assert p_value(seen, expected) == pytest.approx(float(chisquare(seen, expected).pvalue), rel=1e-9)
    assert p_value([100, 1, 1], [100.0, 1.0, 1.0]) == 1.0, "cells that are too small are put together"
    assert fits({(1,): 5}, {(0,): 1.0}) == 0.0, "what a law rules out was seen"


@pytest.mark.parametrize("power", [1.0, 0.7, 1.5])
def test_tokens_of_another_law_show_and_those_of_q_do_not(power: float) -> None:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1500, 31, generator=generator).mul(1.5).softmax(dim=-1)
    drawn = q.pow(power)
    tokens = torch.multinomial(drawn / drawn.sum(-1, keepdim=True), 1, generator=generator)[:, 0]
    p = uniform_p_value(positions(q, tokens))
    assert (p > 1e-3) if power == 1.0 else (p < 1e-9)


def test_the_share_of_small_p_values_is_what_they_say() -> None:
    chance = random.Random(5)
    ps = []
    for _ in range(400):
        counts = [0] * 8
        for _ in range(160):
            counts[chance.randrange(8)] += 1
        ps.append(p_value(counts, [20.0] * 8))
    assert 10 <= sum(p < 0.05 for p in ps) <= 32
