"""The table on the terminal, a line a row as it is measured; what needs more words stands below its line.

ResNet-152 fp32, batch 256                40.5 ms      20.3 to 55.2   as expected
"""

from __future__ import annotations

import textwrap

from .row import VERDICTS, Row

_WHAT, _MEASURED, _EXPECTED = 37, 14, 15
_WIDTH = 80
_BAD = ("failed", "skipped")


def head() -> str:
    line = f"{'':{_WHAT}}  {'measured':>{_MEASURED}}  {'expected':>{_EXPECTED}}"
    return f"{line}\n{'-' * _WIDTH}"


def lines_of(row: Row) -> str:
    what = textwrap.wrap(row.what, _WHAT, subsequent_indent="  ", drop_whitespace=True) or [""]
    indent = row.what[: len(row.what) - len(row.what.lstrip())]
    *before, last = [
        indent + line if number == 0 and not line.startswith(indent) else line for number, line in enumerate(what)
    ]
    verdict = "" if row.verdict == "as expected" else row.verdict
    middle = "" if row.verdict in _BAD else f"{row.measured:>{_MEASURED}}  {row.expected:>{_EXPECTED}}"
    lines = [*before, f"{last:{_WHAT}}  {middle}  {verdict}".rstrip()]
    if row.note:
        lines += textwrap.wrap(row.note, _WIDTH, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def summary(rows: list[Row]) -> str:
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in ("as expected", *_OTHER)}
    counted = [f"{count} {verdict}" for verdict, count in counts.items() if count]
    return f"{len(rows)} rows: {', '.join(counted) or 'none judged'}"


_OTHER = VERDICTS[1:-1]
