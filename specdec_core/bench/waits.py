"""How often the host waits for a CUDA device in a round: each wait leaves the device idle for a while."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch

from specdec_core.contract.sampling_params import SamplingParams
from specdec_core.engine.decoder import SpecDecoder

_ROUNDS = 10
_WARM_UPS = 2  # a shape is captured at its second use


@dataclass(frozen=True)
class Waits:
    """What was seen in some warm rounds, the prompt's left out."""

    counts: list[int]  # of each round
    places: list[str]  # in the code, with how often each waited there

    def to_dict(self) -> dict[str, Any]:
        """Give what a line of JSON holds."""
        return asdict(self)


def count_waits(decoder: SpecDecoder, prompt: Sequence[int], new_tokens: int) -> Waits:
    """Count, as CUDA warns of them, the waits of some rounds behind a prompt.

    new_tokens: to generate; enough for the rounds, whatever they accept.
    """
    params = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    for _ in range(_WARM_UPS):
        for _ in decoder.rounds([list(prompt)], params):
            pass
    counts, places = [], Counter[str]()
    mode = torch.cuda.get_sync_debug_mode()
    with closing(decoder.rounds([list(prompt)], params)) as run, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        next(run)  # the prompt's
        torch.cuda.set_sync_debug_mode("warn")
        try:
            seen.clear()  # setting the mode warns, too
            for _ in islice(run, _ROUNDS):
                waits = [one for one in seen if "called a synchronizing" in str(one.message)]
                counts.append(len(waits))
                places.update(f"{one.filename}:{one.lineno}" for one in waits)
                seen.clear()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return Waits(counts, [f"{place} ({count})" for place, count in places.most_common()])


def rounds_enough(nodes: int) -> int:
    """Say how many tokens the prompt's round and those watched may give, and one: none is the last."""
    return (_ROUNDS + 1) * (1 + nodes) + 1
