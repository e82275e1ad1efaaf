"""What a drafter's calls wait for is seen, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec_core.testing.waiting import waits

X = torch.arange(3)


class Waiting:
    """Does one thing when it is asked to propose."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def propose(self) -> Any:
        return self.act()

    def observe(self) -> None: ...


@pytest.mark.parametrize(
    "act",
    [
        lambda: X.tolist(),
        lambda: X.cpu(),
        lambda: X.numpy(),
        lambda: X[0].item(),
        lambda: int(X[0]),
        lambda: bool(X[0]),
        lambda: list(range(3))[X[0]],
        lambda: X.nonzero(),
        lambda: X[X > 1],
        lambda: torch.equal(X, X),
        lambda: X.unique(),
    ],
)
def test_a_wait_is_named(act: Callable[[], Any]) -> None:
    drafter = Waiting(act)
    with waits(drafter) as names:
        act()  # not the drafter's
        assert names == []
        drafter.propose()
        assert names
    names.clear()
    drafter.propose()
    assert names == [], "it is over"


def test_work_on_the_device_is_no_wait() -> None:
    drafter = Waiting(lambda: X.clone().add_(1)[None].gather(1, X[None, :1]).masked_fill(X[:1] > 1, 0))
    with waits(drafter) as names:
        drafter.propose()
    assert names == []
