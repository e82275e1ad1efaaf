"""What ends a run is what is told, also where a drafter fails at releasing its rows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support import Ask, ScriptedDrafter, greedy, tiny_llama

from specdec_core import DrafterError, SpecDecoder


class Clinging(ScriptedDrafter):
    """Fails to let rows go."""

    def release(self, rows: Sequence[int]) -> None:
        raise RuntimeError("no")


def interrupted(ask: Ask) -> list[int]:
    raise KeyboardInterrupt


def test_ctrl_c_is_not_masked_by_a_failing_release(caplog: pytest.LogCaptureFixture) -> None:
    decoder = SpecDecoder(tiny_llama(), drafter=Clinging(interrupted), strict=True)
    with pytest.raises(KeyboardInterrupt):
        decoder.generate([1, 2, 3], greedy(4))
    assert [record.getMessage() for record in caplog.records] == [
        "drafter 'scripted': release raised RuntimeError: no"
    ]


def test_alone_it_is_told() -> None:
    decoder = SpecDecoder(tiny_llama(), drafter=Clinging(lambda ask: []), strict=True)
    with pytest.raises(DrafterError, match="release raised RuntimeError: no"):
        decoder.generate([1, 2, 3], greedy(4))
    stream = decoder.stream([1, 2, 3], greedy(4))
    next(stream)
    with pytest.raises(DrafterError, match="release raised RuntimeError: no"):
        stream.close()
