"""One row of the table: what was measured, what was expected, and whether the two agree."""

from __future__ import annotations

import math
from dataclasses import dataclass

VERDICTS = ("as expected", "below", "above", "differs", "failed", "skipped", "stand-in", "")
"""`differs`: of what is no number. `stand-in`: a figure in virtual time, which is not judged. Empty: nothing was
expected.
"""


@dataclass(frozen=True)
class Range:
    """Where a figure should lie, bounds included; None: no bound. source: who says so."""

    low: float | None
    high: float | None
    source: str

    def verdict(self, value: float) -> str:
        if self.low is not None and value < self.low:
            return "below"
        if self.high is not None and value > self.high:
            return "above"
        return "as expected"

    def __str__(self) -> str:
        if self.low is None:
            return "" if self.high is None else f"at most {number(self.high)}"
        return f"at least {number(self.low)}" if self.high is None else f"{number(self.low)} to {number(self.high)}"


@dataclass(frozen=True)
class Row:
    """measured: as people read it, with its unit; value: the same as a number, where it is one."""

    what: str
    measured: str = ""
    value: float | None = None
    unit: str = ""
    expected: str = ""
    source: str = ""
    verdict: str = ""
    note: str = ""


def figure(what: str, value: float, unit: str, expected: Range | None = None, note: str = "") -> Row:
    verdict = expected.verdict(value) if expected and math.isfinite(value) else ""
    return Row(
        what=what,
        measured=f"{number(value)} {unit}".strip(),
        value=value if math.isfinite(value) else None,
        unit=unit,
        expected=str(expected) if expected else "",
        source=expected.source if expected else "",
        verdict=verdict,
        note=note,
    )


def finding(what: str, holds: bool, measured: str, expected: str, source: str = "", note: str = "") -> Row:
    verdict = "as expected" if holds else "differs"
    return Row(what, measured, expected=expected, source=source, verdict=verdict, note=note)


def failed(what: str, cause: str) -> Row:
    return Row(what, verdict="failed", note=cause)


def skipped(what: str, cause: str) -> Row:
    return Row(what, verdict="skipped", note=cause)


def number(value: float) -> str:
    """Three digits that count, of what is small one; thousands apart."""
    size = abs(value)
    if not math.isfinite(value) or 0 < size < 0.001:
        return f"{value:.1g}"
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
