"""Takes what was seen, gives what is wrong: every check of the table, each finding with its remedy. Pure.

diagnosis = judge(seen)
diagnosis.findings[0].id, diagnosis.findings[0].seen        "P14", "the connection is refused, though ..."
diagnosis.summary               "31 checks passed, 2 findings (1 blocks), 3 not applicable (no GPU there: ...)"
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.doctor.seen import Check, Level, Seen, Sight
from orchestrator.doctor.table import CHECKS
from orchestrator.units import counted


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong somewhere. where: hosts; of a way, its start and its end."""

    id: str
    name: str
    level: Level
    where: tuple[str, ...]
    seen: str
    causes: str
    remedy: str
    is_way: bool = False

    @property
    def line(self) -> str:
        """Where there is one line for it."""
        return ": ".join(part for part in (", ".join(self.where), self.seen, self.remedy) if part)


@dataclass(frozen=True)
class Diagnosis:
    """findings: what blocks first, then in the order of the table. passed: ids. not_applicable: by id, why."""

    seen: Seen
    findings: tuple[Finding, ...]
    passed: tuple[str, ...]
    not_applicable: Mapping[str, str]

    @property
    def blocks(self) -> bool:
        return any(finding.level == "block" for finding in self.findings)

    @property
    def summary(self) -> str:
        blocking = sum(finding.level == "block" for finding in self.findings)
        which = f" ({blocking} {'blocks' if blocking == 1 else 'block'})" if blocking else ""
        said = f"{counted(len(self.passed), 'check')} passed, {counted(len(self.findings), 'finding')}{which}"
        reasons = dict[str, list[str]]()
        for id, why in self.not_applicable.items():
            reasons.setdefault(why, []).append(id)
        why_not = "; ".join(f"{why}: {', '.join(ids)}" for why, ids in reasons.items())
        return f"{said}, {len(self.not_applicable)} not applicable" + (f" ({why_not})" if why_not else "")


def judge(seen: Seen, checks: Sequence[Check] = CHECKS) -> Diagnosis:
    findings, passed, not_applicable = list[Finding](), list[str](), dict[str, str]()
    for check in checks:
        if why := check.applies(seen):
            not_applicable[check.id] = why
            continue
        found = [_finding(check, sight) for sight in check.judge(seen)]
        findings += found
        if not found:
            passed.append(check.id)
    findings.sort(key=lambda finding: finding.level != "block")
    return Diagnosis(seen, tuple(findings), tuple(passed), not_applicable)


def finding_of(id: str, sight: Sight) -> Finding:
    """What somebody else saw, under the name of its check."""
    return _finding(next(check for check in CHECKS if check.id == id), sight)


def _finding(check: Check, sight: Sight) -> Finding:
    return Finding(
        id=check.id,
        name=check.name,
        level=sight.level or check.level,
        where=sight.where,
        seen=sight.seen,
        causes=check.causes,
        remedy=sight.remedy,
        is_way=sight.is_way,
    )
