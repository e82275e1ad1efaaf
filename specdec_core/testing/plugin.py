"""The pytest plugin: `pytest --specdec-drafter NAME[:opts]` and `--specdec-verifier NAME`.

Each contract is a test item of its own, named `specdec/drafter/NAME::CONTRACT`; a section at the end says of
each what it means and, where it is broken, how, and what to look at. Nothing heavy is imported, and nothing
changes, until one of the options is given.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from specdec_core.testing.report import KEY, print_verdicts

KINDS = ("drafter", "verifier")


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Let authors implement the kit's hooks."""
    from specdec_core.testing import hooks

    pluginmanager.add_hookspecs(hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("specdec", "conformance of drafters and verifiers (specdec)")
    for kind in KINDS:
        group.addoption(
            f"--specdec-{kind}",
            action="append",
            default=[],
            metavar="NAME[:opts]",
            help=f"run every contract against this {kind}; may be given several times",
        )
    group.addoption(
        "--specdec-target",
        metavar="FOLDER",
        help="a target to draft for, in place of the tiny random one that most contracts run on",
    )


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Put the contracts before all other tests."""
    found: list[pytest.Item] = []
    for kind in KINDS:
        for spec in dict.fromkeys(config.getoption(f"specdec_{kind}")):
            found += _suite(session, config, kind, spec)
    items[:0] = found


def _suite(session: pytest.Session, config: pytest.Config, kind: str, spec: str) -> Iterator[pytest.Item]:
    from specdec_core.contract.errors import SpecdecError
    from specdec_core.testing.suites import kit_of

    def options(drafter: str, model: Any) -> Any:
        return config.hook.pytest_specdec_options(drafter=drafter, model=model)

    try:
        kit, contracts = kit_of(kind, spec, options=options, target=config.getoption("specdec_target"))
    except SpecdecError as error:
        raise pytest.UsageError(f"--specdec-{kind} {spec}: {error}") from error
    suite = Suite.from_parent(session, name=spec, nodeid=f"specdec/{kind}/{spec.replace('::', ':')}")
    for position, contract in enumerate(contracts):
        for case, name in zip(contract.cases, contract.items, strict=True):
            yield ContractItem.from_parent(
                suite, name=name, kit=kit, contract=contract, case=case, position=position
            )


class Suite(pytest.Collector):
    """All contracts of one drafter or verifier."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Give nothing: the items are made at once."""
        return []


class ContractItem(pytest.Item):
    """One contract, or one case of it."""

    def __init__(self, *, kit: Any, contract: Any, case: str, position: int, **options: Any) -> None:
        super().__init__(**options)
        self.kit, self.contract, self.case = kit, contract, case
        self.user_properties.append((KEY, [position, contract.name, contract.means, contract.remedy]))

    def runtest(self) -> None:
        """Check the contract."""
        from specdec_core.testing.contracts import Untried

        with _one_thread():
            try:
                self.contract.check(self.kit, self.case)
            except Untried as reason:
                pytest.skip(str(reason))

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """Say how the contract is broken; a traceback only where the drafter raised, or the kit did."""
        from specdec_core.testing.contracts import Broken

        if not isinstance(excinfo.value, Broken):
            return super().repr_failure(excinfo, style)
        lines = [f"{self.contract.name}: {self.contract.means}", f"broken: {excinfo.value}"]
        cause = excinfo.value.__cause__ and excinfo.value.__cause__.__cause__
        if cause is not None:
            lines.append(str(pytest.ExceptionInfo.from_exception(cause).getrepr(style="short")))
        see = excinfo.value.see
        remedy = self.contract.remedy if see in ("", self.contract.name) else f"that of {see}"
        return "\n".join([*lines, f"remedy: {remedy}"])

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Name the item where pytest names a test."""
        return self.parent.nodeid if self.parent else "", None, f"{self.nodeid}"


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The models are tiny: threads that wait for each other only take time."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say of each drafter and verifier which contracts it keeps."""
    if any(config.getoption(f"specdec_{kind}", None) for kind in KINDS):
        print_verdicts(terminalreporter)
