"""What a contract of the kit is, and how a check says that it is broken or cannot be tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Kit = TypeVar("Kit")


class Broken(AssertionError):
    """The contract is broken; the message says by what was seen.

    see: the contract that the fault belongs to, where that is another one.
    """

    def __init__(self, message: str, see: str = "") -> None:
        super().__init__(message)
        self.see = see


class Untried(Exception):
    """The contract cannot be tried here; the message says why."""


@dataclass(frozen=True)
class Contract(Generic[Kit]):
    """One promise of a drafter or verifier, and the check of it."""

    name: str
    means: str  # the promise, in a line
    remedy: str  # what to look at when it is broken
    check: Callable[[Kit, str], None]
    cases: tuple[str, ...] = ("",)  # each is an item of its own

    @property
    def items(self) -> list[str]:
        """The names of its items."""
        return [f"{self.name}[{case}]" if case else self.name for case in self.cases]


class Contracts(Generic[Kit]):
    """The contracts of a kind of plugin, in an order in which the first broken one names the fault."""

    def __init__(self) -> None:
        self.all: list[Contract[Kit]] = []

    def add(
        self, name: str, means: str, remedy: str, cases: tuple[str, ...] = ("",)
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Add the decorated check, which takes the kit, and the case where there are several."""

        def register(check: Callable[..., None]) -> Callable[..., None]:
            def run(kit: Kit, case: str) -> None:
                arguments: tuple[Any, ...] = (kit, case) if cases != ("",) else (kit,)
                check(*arguments)

            self.all.append(Contract(name, means, remedy, run, cases))
            return check

        return register


def must(holds: object, message: str) -> None:
    """Raise `Broken` unless `holds`; not an `assert`, which -O would drop."""
    if not holds:
        raise Broken(message)
