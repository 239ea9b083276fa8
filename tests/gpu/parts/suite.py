"""The tests marked gpu, each a row only where it did not pass."""

from __future__ import annotations

import importlib.util
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from .. import child
from ..row import Row, failed, finding, skipped
from . import Bench

_NEEDED = ("pytest", "pytest_timeout", "hypothesis")
"""By what tests/conftest.py and pyproject.toml ask for."""
_LAST_TEST_S = 45.0
"""What the test may take that runs when the time is over."""


def play(bench: Bench) -> Iterator[Row]:
    missing = [name for name in _NEEDED if not importlib.util.find_spec(name)]
    if missing:
        names = " ".join(missing).replace("_", "-")
        yield skipped("tests marked gpu", f"{sys.executable} lacks {names}: pip install {names}")
        return
    results = bench.folder / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "tests/gpu", "-q", f"--junitxml={results}"]
    command += ["-p", "no:cacheprovider", *_in_time(bench.runs.left_s - _LAST_TEST_S)]
    ended = child.run(command, bench.folder / "tests.log", bench.runs.left_s)
    if not results.exists():
        yield failed("tests marked gpu", ended.cause)
        return
    yield from rows_of(results)
    if "session-timeout" in ended.output:
        yield skipped("the other tests", "the part's time is over")


def _in_time(limit_s: float) -> list[str]:
    """Begins no further test after it, and still writes the results. From pytest-timeout 2.3 on."""
    newer = tuple(int(part) for part in version("pytest-timeout").split(".")[:2]) >= (2, 3)
    return [f"--session-timeout={max(1.0, limit_s):.0f}"] if newer else []


def rows_of(results: Path) -> Iterator[Row]:
    """results: JUnit's XML as pytest writes it."""
    cases = list(ElementTree.parse(results).getroot().iter("testcase"))
    passed = [case for case in cases if not list(case.iter("failure")) and not _is(case, "error", "skipped")]
    left_out = [case for case in cases if _is(case, "skipped")]
    bad = [case for case in cases if list(case.iter("failure")) or _is(case, "error")]
    measured = f"{len(passed)} of {len(cases) - len(left_out)} pass"
    yield finding("tests marked gpu", bool(passed) and not bad, measured, "all")
    for case in bad:
        yield failed(_name(case), _message(case))
    for reason, count in Counter(_message(case) for case in left_out).items():
        yield skipped(f"{count} test{'s' if count > 1 else ''}", reason)


def _is(case: ElementTree.Element, *tags: str) -> bool:
    return any(case.find(tag) is not None for tag in tags)


def _name(case: ElementTree.Element) -> str:
    return case.get("name", "").removeprefix("test_").replace("_", " ")


def _message(case: ElementTree.Element) -> str:
    outcome = next(child for child in case if child.tag in ("failure", "error", "skipped"))
    return (outcome.get("message") or outcome.text or "").strip().split("\n")[0][:300]
