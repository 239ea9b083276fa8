"""`orch logs -n` and `--grep`: the last lines of each log, and nothing else leaves its host."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator.jobs.frames import FilePiece
from orchestrator.jobs.tails import tails
from orchestrator.jobs.watch import watch
from orchestrator.remote.tails import BLOCK_BYTES, MAX_TAIL_BYTES, begin_of
from tests.support.local_cluster import Place
from tests.support.local_job import gang

SCRIPT = """import sys
for number in range(200_000):
    print("line", number, "of", "x" * 40)
print("last words", file=sys.stderr)
print("no newline", end="")
"""


@pytest.mark.parametrize(
    ("content", "lines", "last"),
    [
        (b"", 3, b""),
        (b"one\n", 3, b"one\n"),
        (b"one\ntwo\nthree\n", 2, b"two\nthree\n"),
        (b"one\ntwo\nthree", 2, b"two\nthree"),
        (b"one\n\n\n", 2, b"\n\n"),
        (b"a\n" + b"b" * 3 * BLOCK_BYTES + b"\nc\n", 2, b"b" * 3 * BLOCK_BYTES + b"\nc\n"),
        (b"a\n" * BLOCK_BYTES, BLOCK_BYTES - 1, b"a\n" * (BLOCK_BYTES - 1)),
        (b"b" * (MAX_TAIL_BYTES + 9), 1, b"b" * MAX_TAIL_BYTES),
    ],
)
def test_the_last_lines_are_found_from_the_end(content: bytes, lines: int, last: bytes, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(content)
    handle = os.open(tmp_path / "log", os.O_RDONLY)
    try:
        assert content[begin_of(handle, len(content), lines) :] == last
    finally:
        os.close(handle)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(tmp_path_factory.mktemp("person"))
    (place.here / "proj/train.py").write_text(SCRIPT)
    return place


@pytest.fixture(scope="module")
def job(place: Place) -> str:
    job = str(place.types("run", "--detach", "proj/train.py").stdout.strip())
    place.types("logs", "-f", "--job", job, "--rank", "1", "-n", "1")
    return job


def test_the_last_lines_of_each_rank_are_shown(place: Place, job: str) -> None:
    shown = place.types("logs", "-n", "2", "--job", job).stdout.splitlines()
    last = f"line 199999 of {'x' * 40}"
    assert sorted(shown) == sorted(
        f"[{host}] {words}" for host in ("a 0", "b 1") for words in (last, "no newline", "last words")
    )
    assert place.types("logs", "-n", "1", "--node", "b", "--job", job).stdout.count("[b 1]") == 2
    followed = place.types("logs", "-f", "-n", "2", "--rank", "0", "--job", job).stdout
    assert sorted(followed.splitlines()) == sorted(f"[a 0] {words}" for words in (last, "no newline", "last words"))


def test_lines_are_chosen_by_a_pattern(place: Place, job: str) -> None:
    shown = place.types("logs", "--grep", r"line 1234\d of|^last", "--rank", "1", "--job", job).stdout.splitlines()
    assert len(shown) == 11 and all(line.startswith(("[b 1] line 1234", "[b 1] last words")) for line in shown)
    assert "is no regular expression" in place.types("logs", "--grep", "(", code=2).stderr


def test_they_come_from_what_was_collected_too(place: Place, job: str) -> None:
    place.types("collect", "--job", job)
    place.types("down", "--yes")
    shown = place.types("logs", "-n", "1", "--job", job).stdout.splitlines()
    assert sorted(shown) == [f"[{host}] {words}" for host in ("a 0", "b 1") for words in ("last words", "no newline")]


def test_no_more_than_these_bytes_leave_a_host(tmp_path: Path) -> None:
    with gang(tmp_path, SCRIPT, torch_free=True) as one:
        one.launch()
        one.wait()
        offsets = tails(one.plan, one.hosts, {0: 2}, follow=False)
        items = [item for _, item in watch(one.plan, one.hosts, offsets=offsets, follow=False)]
    pieces = [item for item in items if isinstance(item, FilePiece)]
    assert {piece.file for piece in pieces} == {"rank-0/stdout.log", "rank-0/stderr.log"}
    assert not any(piece.restarted for piece in pieces)
    assert sum(len(piece.data) for piece in pieces) == len(f"line 199999 of {'x' * 40}\nno newlinelast words\n")
