"""Which tokens the slots of a cache hold, so that a row that begins alike need not feed them again.

Slots keep what they hold after their row has left, until the next row there feeds something else: memory
is bounded by the buffers that are there anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

_ADAPTER_STATE = ("active_adapters", "disable_adapters", "merged", "scaling")  # of a PEFT layer
LEAST = 8  # shorter common prefixes are not worth a copy


class Prefixes:
    """Remembers held tokens by index (see `Places`); forgets all when the model's weights have changed."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tokens: dict[int, list[int]] = {}
        self._weights: object = None

    def note(self, index: int, held: int, tokens: Sequence[int]) -> None:
        """Slots hold `held` of the tokens known there, and these behind them."""
        known = self._tokens.setdefault(index, [])
        known[held:] = tokens

    def length(self, index: int) -> int:
        """Count the tokens that are known there."""
        return len(self._tokens.get(index, ()))

    def find(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Give the index that shares the longest prefix, and its length; (-1, 0) where none is worth it.

        One token at least stays to be fed: its logits are wanted.
        """
        best, longest = -1, LEAST - 1
        for index, known in self._tokens.items():
            common = min(_common(known, tokens), len(tokens) - 1)
            if common > longest:
                best, longest = index, common
        return (best, longest) if best >= 0 else (-1, 0)

    def swap(self, a: int, b: int) -> None:
        """Follow slots that were exchanged."""
        one, other = self._tokens.pop(a, None), self._tokens.pop(b, None)
        for index, known in ((a, other), (b, one)):
            if known is not None:
                self._tokens[index] = known

    def cut(self, places: int, slots: int) -> None:
        """Forget what lies beyond buffers of this size."""
        self._tokens = {index: known[:slots] for index, known in self._tokens.items() if index < places}

    def check_weights(self) -> bool:
        """Forget everything if a weight was written, or adapters switched, since the last check; say whether.

        Writing through `weight.data` leaves no trace: whoever does that builds a new decoder.
        """
        weights = [(id(w), 0 if w.is_inference() else w._version) for w in self._model.parameters()]
        adapters = [
            [repr(getattr(module, name, None)) for name in _ADAPTER_STATE]
            for module in self._model.modules()
            if hasattr(module, "base_layer")
        ]
        changed = self._weights not in (None, (weights, adapters))
        if changed:
            self.forget()
        self._weights = (weights, adapters)
        return changed

    def forget(self) -> None:
        """Forget everything."""
        self._tokens.clear()


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix, found by halving: slices are compared at C speed."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if list(a[low:middle]) == list(b[low:middle]):
            low = middle
        else:
            high = middle - 1
    return low
