"""The last section of a run: of each contract a line, and the first broken one by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

KEY = "specdec_contract"  # of a test report's property that says which contract was tried
PASSED, FAILED, SKIPPED = "pass", "FAIL", "skip"
_WORDS = {"passed": PASSED, "failed": FAILED, "error": FAILED, "skipped": SKIPPED}


@dataclass
class Verdict:
    """What was seen of one contract, all its cases together."""

    name: str
    means: str
    position: int  # in the suite
    seen: list[tuple[str, str, str, str]] = field(default_factory=list)  # case, outcome, detail, remedy

    @property
    def outcome(self) -> str:
        """Failed if any case is, skipped if all are."""
        outcomes = {outcome for _, outcome, *_ in self.seen}
        return next((one for one in (FAILED, PASSED) if one in outcomes), SKIPPED)

    def lines(self, width: int) -> Iterator[str]:
        """A line, and for what is not kept the reason and the remedy."""
        yield f"{self.outcome}  {self.name:{width}}  {self.means}"
        for case, outcome, detail, _ in self.seen:
            if outcome != PASSED and (detail or outcome == FAILED):
                words = "broken: " if outcome == FAILED else "not tried: "
                yield f"      {'':{width}}{f'[{case}] ' if case else ''}{words}{detail}"
        remedies = [remedy for _, outcome, _, remedy in self.seen if outcome == FAILED]
        for remedy in dict.fromkeys(remedies):
            yield f"      {'':{width}}remedy: {remedy}"


def print_verdicts(terminal: Any) -> None:
    """Write a section for every drafter and verifier that was tried."""
    for subject, verdicts in _verdicts(terminal.stats).items():
        kind, name = subject.split("/", 2)[1:]
        terminal.section(f"specdec: {kind} {name}")
        width = max(map(len, verdicts))
        for verdict in verdicts.values():
            for line in verdict.lines(width):
                terminal.write_line(line, red=line.startswith(FAILED), green=line.startswith(PASSED))
        broken = [one.name for one in verdicts.values() if one.outcome == FAILED]
        kept = sum(one.outcome == PASSED for one in verdicts.values())
        if broken:
            first, *others = broken
            more = f" (also broken, perhaps by the same fault: {', '.join(others)})" if others else ""
            terminal.write_line(f"{kind} {name} breaks the contract {first!r}{more}", red=True)
        else:
            terminal.write_line(f"{kind} {name} keeps {kept} contracts, none is broken", green=True)


def _verdicts(stats: dict[str, list[Any]]) -> dict[str, dict[str, Verdict]]:
    """Gather reports by subject and contract, in the order of the suite, whoever ran them first."""
    found: dict[str, dict[str, Verdict]] = {}
    for category, word in _WORDS.items():
        for report in stats.get(category, []):
            told = dict(getattr(report, "user_properties", [])).get(KEY)
            if told is None:
                continue
            position, name, means, remedy = told
            subject, _, item = report.nodeid.partition("::")
            verdict = found.setdefault(subject, {}).setdefault(name, Verdict(name, means, int(position)))
            case = item.removeprefix(name).strip("[]")
            verdict.seen.append((case, word, _detail(report, word), _line(report, "remedy: ") or remedy))
    return {
        subject: {one.name: one for one in sorted(verdicts.values(), key=lambda one: one.position)}
        for subject, verdicts in sorted(found.items())
    }


def _detail(report: Any, word: str) -> str:
    """Why a contract is broken, or was not tried."""
    if word == PASSED:
        return ""
    if word == SKIPPED:
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    lines = [line for line in report.longreprtext.splitlines() if line.strip()]
    return _line(report, "broken: ") or (lines[-1].strip() if lines else "")


def _line(report: Any, start: str) -> str:
    """The line of a failure that begins so."""
    lines = report.longreprtext.splitlines() if report.failed else []
    return next((line.removeprefix(start) for line in lines if line.startswith(start)), "")
