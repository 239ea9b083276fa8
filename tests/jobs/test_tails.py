"""`orch logs -n`, `--since` and `--grep`: the last lines of each log, and nothing else leaves its host."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.jobs import FilePiece, LogLine, Notice, Splitter, last_of, parse_frame, rank_of_log, tails
from orchestrator.jobs.follow import watch
from orchestrator.remote.line_times import LineTimes
from orchestrator.remote.output_writer import OutputWriter
from orchestrator.remote.print_times import PrintTimes
from orchestrator.remote.tails import BLOCK_BYTES, MAX_TAIL_BYTES, begin_of, begin_since
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
    (record,) = json.loads(place.types("jobs", "--json").stdout)["jobs"]
    assert record["state"] == "succeeded", record
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


def test_a_followed_log_ends_as_its_run_did(place: Place) -> None:
    (place.here / "proj/bad.py").write_text("""import os, sys, time
print(" 10%|#", end="\\r 20%|##", file=sys.stderr, flush=True)
if os.environ["RANK"] == "1":
    raise ValueError("no such sample")
print(os.environ["ORCH_DATA"], flush=True)
time.sleep(60)
""")
    run = place.types("run", "proj/bad.py", code=1)
    logs = place.types("logs", "-f", code=1)
    (record,) = [job for job in json.loads(place.types("jobs", "--json").stdout)["jobs"] if job["exp"] == "bad.py"]
    for shown in (run, logs):
        assert shown.stdout.splitlines()[-1] == "[b 1] ValueError: no such sample"
        failed, cause, log, code = shown.stderr.splitlines()[-4:]
        assert (failed, code) == (f"failed {record['id']}", "exit code 1")
        assert cause == "first cause: b: rank 1 exited 1" and log == "  its log: ValueError: no such sample"
    assert f"[a 0] {Path.home()}/data" in run.stdout.splitlines()
    assert sorted(run.stdout.splitlines()) == sorted(logs.stdout.splitlines())
    assert place.types("logs", "-f", "--rank", "0", code=1).stderr.endswith("exit code 1\n")


def test_lines_are_chosen_by_a_pattern(place: Place, job: str) -> None:
    shown = place.types("logs", "--grep", r"line 1234\d of|^last", "--rank", "1", "--job", job).stdout.splitlines()
    assert len(shown) == 11 and all(line.startswith(("[b 1] line 1234", "[b 1] last words")) for line in shown)
    assert "is not a regular expression" in place.types("logs", "--grep", "(", code=2).stderr


def test_those_printed_since_then_are_shown_each_with_its_time(tmp_path: Path) -> None:
    script = """import os, pathlib, time
for number in range(3):
    print("line", number, flush=True)
    while not pathlib.Path(os.environ["GO"], str(number)).exists():
        time.sleep(0.02)
print("half a line, ", end="", flush=True)
time.sleep(1.2)
print("and its end", flush=True)
"""
    with gang(tmp_path, script, ranks=(1,), env={"GO": str(tmp_path)}) as job:
        begun = [time.time()]
        job.launch()
        log, seen = job.folder("a") / "rank-0" / "stdout.log", []
        for number in range(3):
            while f"line {number}" not in (log.read_text() if log.exists() else ""):
                time.sleep(0.02)
            seen.append(time.time())
            time.sleep(1.1)  # times are noted to a second
            begun.append(time.time())
            (tmp_path / str(number)).touch()
        job.wait()
        content, times = log.read_bytes(), LineTimes(log.with_suffix(".times"))
        for number in range(3):
            printed, end = times.at(content.index(b"line %d" % number))
            assert begun[number] - 1.0 <= printed <= seen[number] + 1.0 and end is not None

        def shown_since(wall: float, lines: int | None = None) -> bytes:
            held = tails(job.plan, job.hosts, {0: lines}, follow=True, since_wall=wall)["a"]
            return content[held["rank-0/stdout.log"].offset :]

        assert shown_since(begun[1]).startswith(b"line 1\n")
        last = times.at(len(content) - 2)[0]
        assert last is not None
        assert shown_since(last) == b"half a line, and its end\n"
        assert shown_since(seen[0], lines=1) == b"half a line, and its end\n"
        while time.time() < last + 1.5:
            time.sleep(0.1)
        assert shown_since(last + 1.4, lines=1) == b""
        splitter, lines = Splitter(), list[LogLine]()
        for _, item in watch(job.plan, job.hosts, offsets={}, follow=False, times=True):
            lines += splitter.split("a", item) if isinstance(item, FilePiece) else ()
        found = {line.text: line.wall for line in lines}
        assert list(found) == ["line 0", "line 1", "line 2", "half a line, and its end"]
        for number in range(3):
            assert begun[number] - 1.0 <= found[f"line {number}"] <= seen[number] + 1.0


def test_a_log_without_times_is_shown_whole_where_it_was_written_since_then(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"one\ntwo\n")
    os.utime(tmp_path / "log", (1000, 1000))
    handle = os.open(tmp_path / "log", os.O_RDONLY)
    try:
        assert [begin_since(handle, 8, tmp_path / "log", wall) for wall in (999.0, 1001.0)] == [0, 8]
    finally:
        os.close(handle)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 4e9)), max_size=30), st.binary(max_size=60))
def test_whatever_stands_among_the_times_each_byte_has_one_or_none(entries: Any, noise: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "stdout.times")
        lines = b"".join(b"%d %.3f\n" % entry for entry in sorted(entries))
        path.write_bytes(noise + b"\n" + lines + noise)
        times = LineTimes(path)
        for offset in (0, 10**5, 10**7):
            wall, end = times.at(offset)
            assert end is None or end > offset
            assert wall is None or 0 <= wall < 1e12
        assert times.since(1e13) is None


def test_among_the_times_of_weeks_each_byte_is_found_at_once(tmp_path: Path) -> None:
    path, count = tmp_path / "stdout.times", 500_000
    path.write_bytes(b"".join(b"%d %.3f\n" % (100 * n, 1e9 + 2 * n) for n in range(count)))
    times = LineTimes(path)
    for n in (0, 1, 7, 2_600, 2_601, 123_456, count - 2):
        assert times.at(100 * n + 50) == (1e9 + 2 * n, 100 * (n + 1))
        assert times.since(1e9 + 2 * n) == 100 * n
    assert times.at(100 * count) == (1e9 + 2 * (count - 1), None)
    assert times.since(1e9 + 2 * count) is None
    assert len(times._window) < 10_000


def test_where_a_log_is_cut_its_times_are_and_a_torn_one_spoils_no_other(tmp_path: Path) -> None:
    log, path = tmp_path / "stdout.log", tmp_path / "stdout.times"
    with open(log, "ab", buffering=0) as file:
        times = PrintTimes(path)
        for _ in range(2):
            file.write(b"x" * 100)
            times.note(file.fileno())
        os.ftruncate(file.fileno(), 0)
        times.note(file.fileno())
        file.write(b"y" * 50)
        times.note(file.fileno())
        assert [int(line.split()[0]) for line in path.read_text().splitlines()] == [0, 50]
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, before[1]))
        try:
            times.note(file.fileno())  # 5 bytes of it fit
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        file.write(b"y" * 50)
        times.note(file.fileno())
    found = LineTimes(path)
    assert [found.at(offset)[1] for offset in (0, 49, 50, 99)] == [50, 50, 100, 100] and found.at(100)[0] is not None


def test_a_disk_that_answers_nothing_about_times_holds_no_script_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    writer = OutputWriter(tmp_path / "log", PrintTimes(tmp_path / "times"))
    monkeypatch.setattr("orchestrator.remote.print_times.os", SimpleNamespace(**{**vars(os), "fstat": fails}))
    child = subprocess.Popen([sys.executable, "-c", "print('x' * 3_000_000)"], stdout=writer.entry)
    writer.start()
    assert child.wait(60) == 0 and writer.finish() == 0
    assert len((tmp_path / "log").read_bytes()) == 3_000_001


def test_a_finished_bar_has_the_time_at_which_it_was_drawn_last() -> None:
    splitter, at, lines = Splitter(), 0, list[LogLine]()
    for epoch in range(20):
        for percent, wall in ((b"\r 50%", 1000.0 * epoch), (b"\r100%\n", 1000.0 * epoch + 2)):
            piece = FilePiece("rank-0/stderr.log", 0, at, percent, wall=wall)
            at = piece.end
            lines += splitter.split("a", piece)
    lines += splitter.rest()
    assert [line.wall for line in lines] == [1000.0 * epoch + 2 for epoch in range(20)]


def test_a_time_that_is_no_date_is_none() -> None:
    header = {"file": "rank-0/stdout.log", "inode": 1, "offset": 0, "size": 3}
    rank = partial(rank_of_log, ranks=frozenset({0}))
    for wall in (-2.5e11, -1, 1e15, float("inf"), "x", None, True):
        piece, _ = parse_frame("a", json.dumps({**header, "wall": wall}).encode(), rank)
        assert isinstance(piece, FilePiece) and piece.wall is None


def test_a_fifo_in_place_of_the_times_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "stdout.times")
    assert LineTimes(tmp_path / "stdout.times").at(7) == (None, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("yesterday", "is no time; write it like 30m, 14:05 or"),
        ("2999-01-01", "is still to come"),
        ("0s", "is not a time"),
    ],
)
def test_a_time_that_is_none_is_said(place: Place, words: str, said: str) -> None:
    assert said in place.types("logs", "--since", words, code=2).stderr


def test_the_last_lines_come_in_the_order_in_which_they_were_printed_and_no_more_of_them() -> None:
    def line(rank: int, stream: str, text: str, wall: float | None) -> LogLine:
        return LogLine("a", rank, stream, text, wall)

    events = [
        (line(0, "stdout", "step 1", 10.0), line(0, "stderr", "broke", 30.0)),
        Notice("a: connected again"),
        (line(0, "stdout", "step 2", 20.0), line(1, "stdout", "echo", 31.0)),
    ]
    assert [*last_of(events, 1)] == [
        events[1],
        (line(0, "stdout", "step 2", 20.0), line(0, "stderr", "broke", 30.0), line(1, "stdout", "echo", 31.0)),
    ]
    known = [(line(1, "stdout", "b", None), line(0, "stdout", "a", None))]
    assert [*last_of(known, 1)] == known


def test_where_no_line_fits_it_says_so(place: Place, job: str) -> None:
    for words in (["--grep", "zzz"], ["--node", "a", "--rank", "1"]):
        done = place.types("logs", *words, "--job", job)
        assert (done.stdout, done.stderr) == ("", "no line fits what you asked for\n")


def test_a_person_sees_times(place: Place, job: str) -> None:
    shown = place.types("logs", "-t", "--since", "1h", "-n", "1", "--rank", "0", "--job", job).stdout.splitlines()
    assert len(shown) == 2
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[a 0\] .*", line) for line in shown)
    whole = place.types("logs", "--since", "1970-01-02T00:00", "--rank", "0", "--job", job).stdout
    assert whole.count("[a 0]") == 200_002


def test_they_come_from_what_was_collected_too(place: Place, job: str) -> None:
    place.types("collect", "--job", job)
    place.types("down", "--yes", "--discard")
    shown = place.types("logs", "-n", "1", "--job", job).stdout.splitlines()
    assert sorted(shown) == [f"[{host}] {words}" for host in ("a 0", "b 1") for words in ("last words", "no newline")]
    for words in (["-t"], ["--since", "1h"]):
        assert "and with them when its lines were printed" in place.types("logs", *words, "--job", job, code=1).stderr


def test_a_cluster_is_forgotten_by_down(place: Place) -> None:
    said = place.types("down", "--yes", "--discard", "--forget").stderr
    assert f"cluster rack is forgotten; `orch up {place.folder}/rack.yaml` remembers it again" in said
    assert "no cluster yet" in place.types("status", code=2).stderr


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
