"""Plain English in docstrings, comments, messages and pages: each folder has a falling budget of clumsy words.

`tests/data/plain_words.json` holds how often each pattern of `tests/support/plain_words.py` may occur in each folder.

    PLAIN=write pytest tests/test_plain_words.py

lowers the budgets to the current counts. It raises one only if a pattern is not more frequent in all (files moved).
After a change of the patterns remove the file first.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.support.plain_words import (
    COMMENT,
    DOCSTRING,
    MESSAGE,
    PATTERNS,
    Hit,
    Text,
    hits,
    page_texts,
    python_texts,
    texts_of,
)

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = Path(__file__).parent / "data" / "plain_words.json"
IS_WRITTEN = os.environ.get("PLAIN") == "write"
MOST_SHOWN = 12


def folder_of(path: Path) -> str:
    """`orchestrator/jobs` for everything below it, `orchestrator` for files at its root; `docs`; `README.md`."""
    parts = path.relative_to(ROOT).parts
    if path.suffix == ".md":
        return parts[0]
    return "/".join(parts[: min(2, len(parts) - 1)])


@cache
def found() -> dict[str, dict[str, list[tuple[str, Hit]]]]:
    """Folder -> pattern -> (file, hit)."""
    sources = [path for top in ("orchestrator", "trainer") for path in sorted((ROOT / top).rglob("*.py"))]
    pages = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    folders: dict[str, dict[str, list[tuple[str, Hit]]]] = {}
    for path in sources + pages:
        of_folder = folders.setdefault(folder_of(path), {})
        for text in texts_of(path):
            for hit in hits(text):
                of_folder.setdefault(hit.pattern.name, []).append((str(path.relative_to(ROOT)), hit))
    return folders


def counts() -> dict[str, dict[str, int]]:
    names = [pattern.name for pattern in PATTERNS]
    return {
        folder: {name: len(of_folder[name]) for name in names if name in of_folder}
        for folder, of_folder in sorted(found().items())
        if of_folder
    }


def totals(by_folder: dict[str, dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for of_folder in by_folder.values():
        total.update(of_folder)
    return total


def budgets() -> dict[str, dict[str, int]]:
    return json.loads(BUDGETS.read_text()) if BUDGETS.is_file() else {}


def write(by_folder: dict[str, dict[str, int]]) -> None:
    """One line per folder, so that changes in different folders merge without conflict."""
    lines = [f"  {json.dumps(folder)}: {json.dumps(of_folder)}" for folder, of_folder in by_folder.items()]
    BUDGETS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def added_lines(folder: str) -> set[tuple[str, int]]:
    """(file, line) written since the budgets were; empty without git."""

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
        return done.stdout.splitlines()

    since = git("log", "-1", "--format=%H", "--", str(BUDGETS))
    if not since:
        return set()
    added = {
        (file, 1 + number)
        for file in git("ls-files", "--others", "--exclude-standard", "--", folder)
        for number in range((ROOT / file).read_bytes().count(b"\n"))
    }
    file = ""
    for line in git("diff", "-U0", "--no-color", since[0], "--", folder):
        if line.startswith("+++ "):
            file = line.removeprefix("+++ b/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            added |= {(file, int(hunk[1]) + number) for number in range(int(hunk[2] or 1))}
    return added


def offences(folder: str, name: str) -> list[str]:
    """The hits on new lines, or all hits if no line is known to be new."""
    here, added = found()[folder][name], added_lines(folder)
    new = [(file, hit) for file, hit in here if (file, hit.line) in added] or here
    lines = [f"  {file}:{hit.line}: ... {hit.around} ..." for file, hit in new[:MOST_SHOWN]]
    return lines + ([f"  and {len(new) - MOST_SHOWN} more"] if len(new) > MOST_SHOWN else [])


def renewed(now: dict[str, dict[str, int]], most: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """The budgets to write. No folder gets more of a pattern that has become more frequent in all."""
    more = totals(now) - totals(most) if most else Counter()
    return {
        folder: {
            name: min(count, most.get(folder, {}).get(name, 0)) if name in more else count
            for name, count in of_folder.items()
        }
        for folder, of_folder in now.items()
    }


@pytest.fixture(scope="module", autouse=True)
def budgets_are_written_if_asked():
    if IS_WRITTEN:
        write(renewed(counts(), budgets()))


def test_no_folder_has_more_of_a_pattern_than_its_budget():
    most = budgets()
    wrong = []
    for folder, of_folder in counts().items():
        for pattern in PATTERNS:
            count, allowed = of_folder.get(pattern.name, 0), most.get(folder, {}).get(pattern.name, 0)
            if count > allowed:
                wrong.append(
                    f'{folder} has "{pattern.name}" {count} times, budget {allowed}; instead: {pattern.instead}'
                )
                wrong += offences(folder, pattern.name)
    assert not wrong, "\n".join(["plainer words, please (if files moved between folders: PLAIN=write)", *wrong])


def test_no_budget_is_higher_than_its_folder_needs():
    now = counts()
    spare = [
        f'{folder}: "{name}" {allowed} in the budget, {now.get(folder, {}).get(name, 0)} found'
        for folder, of_folder in budgets().items()
        for name, allowed in of_folder.items()
        if allowed > now.get(folder, {}).get(name, 0)
    ]
    renew = "budgets fall with the text: PLAIN=write pytest tests/test_plain_words.py"
    assert not spare, "\n".join([renew, *spare])


def test_budgets_fall_and_move_but_do_not_rise():
    most = {"a": {"of": 3, "where": 1}, "b": {"of": 1}}
    assert renewed({"a": {"of": 2}, "c": {"of": 2}}, most) == {"a": {"of": 2}, "c": {"of": 2}}
    assert renewed({"a": {"of": 4, "where": 1}, "b": {"of": 1}}, most) == {"a": {"of": 3, "where": 1}, "b": {"of": 1}}


CLUMSY = {
    "what": ["What a host may do.", "A queue. Who waits is listed.", "Whose a job is."],
    "whoever": ["Ends whoever waits.", "Nobody reads it.", "of whatever kind"],
    "those": ["Those that are not away.", "all but those of other users"],
    "where": [
        "Raises UsageError where it is taken.",
        "None where unknown.",
        "0 where there is no GPU",
        "Where a rank ends.",
    ],
    "none": ["if it has none", "a name that is none", "None that waits, and none is there."],
    "one": ["an invalid one", "for one that waits"],
    "alone": ["by free GPUs alone"],
    "beside": ["the file beside it"],
    "so many": ["So long may it take.", "at most so many bytes"],
    "of": ["Of the first rank.", "A size. Of `x`, if it is known."],
    "is X's to": ["How it is built is `clusters`' to know.", "that is theirs to end", "is `poll`'s to see"],
    "as X has it": ["as `sources` has them", "in the order as the kernel has it"],
    "the same": ["The same for a cluster."],
    "says": ["the host says why", "it was told", "no word was said", "what hosts say"],
}
PLAIN = [
    "What does it cost? Who waits?",
    "None if there is no profile.",
    "The folder where the logs are. It leaves files where they are.",
    "the first one, one of the hosts, another one-line answer",
    "each host alone; is alone; leaves alone what others wrote",
    "Of course.",
    "so that it ends; as soon as the kernel has it; whatever the options",
    "besides, those files, the same host, `told`, say(line)",
]


@pytest.mark.parametrize(("name", "words"), [(name, words) for name, many in CLUMSY.items() for words in many])
def test_a_pattern_is_found(name, words):
    assert name in {hit.pattern.name for hit in hits(Text(1, DOCSTRING, words))}


def test_every_pattern_has_an_example():
    assert CLUMSY.keys() == {pattern.name for pattern in PATTERNS}


@pytest.mark.parametrize("words", PLAIN)
def test_plain_words_are_not_found(words):
    assert [hit.pattern.name for hit in hits(Text(1, DOCSTRING, words))] == []


SOURCE = '''"""Of a file.

What it holds.
"""
LIMIT = 3  # so many
"""So many at most."""
url = "http://host#those that"


def f(x):
    """Whose."""
    raise Error(f"{x}: nothing was heard "
                f"of {x}, as one")  # a comment
'''


def test_a_source_is_cut_into_docstrings_comments_and_messages():
    assert [(text.line, text.kind, " ".join(text.words.split())) for text in python_texts(SOURCE)] == [
        (1, DOCSTRING, "Of a file. What it holds."),
        (5, COMMENT, "so many"),
        (6, DOCSTRING, "So many at most."),
        (11, DOCSTRING, "Whose."),
        (12, MESSAGE, "{}: nothing was heard of {}, as one"),
        (13, COMMENT, "a comment"),
    ]


def test_a_hit_has_its_own_line():
    text = next(iter(python_texts(SOURCE)))
    assert [(hit.line, hit.pattern.name) for hit in hits(text)] == [(3, "what"), (1, "of")]


def test_code_and_headings_of_a_page_are_left_out():
    page = "# What it is\n\n```sh\norch run  # where there is one that\n```\n\n- Of a list.\n\n| a | Whose job |\n"
    found_here = [(hit.line, hit.pattern.name) for text in page_texts(page) for hit in hits(text)]
    assert found_here == [(9, "what"), (7, "of")]
