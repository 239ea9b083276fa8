"""The paths that CONTRIBUTING.md names exist, and what it says is in a file is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ")]
IN_A_RUN = {"gpu.jsonl"}
"""Files of a collected run."""
FILE = r"`([\w./]+\.(?:py|j2|md|jsonl))`"
NAME = r"`(\w+)`"


def found(path: str, beside: Path | None) -> Path | None:
    """Where a path of the page lies: as it stands, in a room, among the docs, or beside the file before it."""
    places = [ROOT, ROOT / "orchestrator", ROOT / "trainer", ROOT / "docs", *([beside] if beside else [])]
    return next((place / path for place in places if (place / path).is_file()), None)


def files_of(line: str) -> list[tuple[str, Path | None]]:
    """Each path of the line, and where it lies."""
    beside, files = None, []
    for path in re.findall(FILE, line):
        there = found(path, beside)
        files.append((path, there))
        beside = there.parent if there else beside
    return files


@pytest.mark.parametrize("line", TEXT.splitlines(), ids=lambda line: line[:40])
def test_every_file_that_it_names_exists(line):
    assert [path for path, there in files_of(line) if there is None and path not in IN_A_RUN] == []


def named_in_a_file() -> list[tuple[str, str, str]]:
    """(row, name, path) of each "`name` in `file`", "`one` or `other` of `file`" and "`file` (`name`)"."""
    several = rf"{NAME}(?:(?: and |, | or ){NAME})*"
    pairs = []
    for row in ROWS:
        for match in re.finditer(rf"((?:{several})) (?:in|of) (?:the |both in )?{FILE}", row):
            pairs += [(row, name, match[match.lastindex]) for name in re.findall(NAME, match[1])]
        for match in re.finditer(rf"{FILE} \(((?:{several}))\)", row):
            pairs += [(row, name, match[1]) for name in re.findall(NAME, match[2])]
    return pairs


PAIRS = named_in_a_file()


def test_many_names_are_looked_up():
    assert len(PAIRS) > 15


def test_a_change_has_few_places_and_the_page_is_short():
    assert {row: count for row in ROWS if (count := len(files_of(row))) > 5} == {}
    assert len(TEXT.encode()) <= 8_000


@pytest.mark.parametrize(("row", "name", "path"), PAIRS, ids=[f"{name}-{path}" for _, name, path in PAIRS])
def test_what_it_says_is_in_a_file_is_there(row, name, path):
    there = dict(files_of(row))[path]
    assert there and re.search(rf"\b{name}\b", there.read_text()), f"{name} in {path}"


def test_every_benchmark_has_its_line_in_the_docs():
    page = (ROOT / "docs/lab.md").read_text()
    assert [path.name for path in (ROOT / "tests/bench").glob("*.py") if f"`{path.name}`" not in page] == []
