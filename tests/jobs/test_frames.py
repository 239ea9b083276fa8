"""What a host may send, and what it may not."""

import errno
import itertools
import json
import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import ConnectError, HostError, ProbeError
from orchestrator.jobs import HEAD_BYTES, MAX_LINE_BYTES, Agent, Beat, End, FilePiece, Held, read_frames
from orchestrator.remote import reader
from orchestrator.remote.layout import WorkFolder

RANKS = frozenset({0, 1})


def frame(header, payload=b""):
    return json.dumps(header).encode() + b"\n" + payload


def read(*chunks):
    return list(read_frames("a", chunks, RANKS))


STREAM = (
    frame({"agent": {"state": "running"}})
    + frame({"file": "rank-1/stdout.log", "inode": 9, "offset": 0, "size": 3}, b"abc")
    + frame({"file": "rank-1/stdout.log", "inode": 9, "offset": 3, "size": 4}, b"\n\x00\xff{")
    + frame({"beat": 1})
    + frame({"end": {"rank-1/stdout.log": {"size": 7, "sha256": "ab"}}})
)
FRAMES = [
    Agent({"state": "running"}),
    FilePiece("rank-1/stdout.log", 1, 0, b"abc\n\x00\xff{", 9),
    Beat(from_host=True),
    End({"rank-1/stdout.log": (7, "ab")}),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_frames_are_the_same_however_the_bytes_are_cut(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    chunks = [STREAM[a:b] for a, b in itertools.pairwise(edges) if a < b]
    assert joined(read(*chunks)) == FRAMES


def joined(frames):
    """With the parts of a file that follow one another as one piece."""
    whole = []
    for one in frames:
        last = whole[-1] if whole else None
        if isinstance(one, FilePiece) and isinstance(last, FilePiece) and one.offset == last.offset + len(last.data):
            whole[-1] = replace(last, data=last.data + one.data)
        else:
            whole.append(one)
    return whole


def piece(offset, data, inode=7, file="rank-0/stdout.log"):
    return frame({"file": file, "inode": inode, "offset": offset, "size": len(data)}, data)


def test_a_host_that_sends_more_of_a_file_than_was_asked_for_is_not_heard_further():
    stream = piece(0, b"xxxxx")
    assert read(stream)
    with pytest.raises(ProbeError, match=r"sent more of rank-0/stdout\.log than its first 4 bytes"):
        list(read_frames("a", [stream], RANKS, limit_bytes=4))


def test_the_bytes_of_a_piece_are_given_out_as_they_come():
    coming = read_frames("a", iter([piece(0, b"abcdef")[:-2]]), RANKS)
    assert next(coming).data == b"abcd"
    with pytest.raises(ConnectError, match="broke off"):
        next(coming)


@pytest.mark.parametrize("offset", [2, 4, 10**15])
def test_a_piece_that_does_not_go_on_where_the_last_one_ended_is_refused(offset):
    with pytest.raises(ProbeError, match=rf"from byte {offset} on, where 3 was due"):
        read(piece(0, b"abc"), piece(offset, b"d"))


def test_a_file_that_starts_again_is_distinguished_from_one_that_goes_on():
    pieces = read(piece(0, b"abc"), piece(3, b"d"), piece(0, b"x", inode=8), piece(1, b"y", inode=8))
    assert [(one.offset, one.restarted) for one in pieces] == [(0, False), (3, False), (0, True), (1, False)]


def test_what_is_held_follows_what_has_come():
    held = {"rank-0/stdout.log": Held(3, 7, b"abc")}
    data = b"x" * (HEAD_BYTES + 10)
    list(read_frames("a", [piece(3, data), piece(0, b"new", file="torchrun.log")], RANKS, held))
    assert held["rank-0/stdout.log"] == Held(3 + len(data), 7, (b"abc" + data)[:HEAD_BYTES])
    assert held["torchrun.log"] == Held(3, 7, b"new")


def test_an_empty_chunk_is_a_beat():
    assert read(b"") == [Beat()]


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "rank-0/../../x",
        "rank-2/stdout.log",
        "rank-00/stdout.log",
        "rank-0/exit.json",
        "",
        "a\nb",
        7,
    ],
)
def test_a_name_that_is_not_this_jobs_ends_the_stream(name):
    with pytest.raises(ProbeError, match=r"^a: sent an invalid frame"):
        read(frame({"file": name, "inode": 7, "offset": 0, "size": 1}, b"x"))


def test_foreign_names_in_the_end_frame_are_refused_too():
    with pytest.raises(ProbeError):
        read(frame({"end": {"../../x": {"size": 1, "sha256": "ab"}}}))


@pytest.mark.parametrize("size", [-1, 0, 10**12, "1", None, 1.5])
def test_a_piece_of_an_impossible_size_is_refused(size):
    with pytest.raises(ProbeError):
        read(frame({"file": "rank-0/stdout.log", "inode": 7, "offset": 0, "size": size}))


def test_an_endless_line_is_refused_before_it_fills_the_memory():
    with pytest.raises(ProbeError, match="longer than any frame"):
        read(*[b"x" * (1 << 16)] * (MAX_LINE_BYTES // (1 << 16) + 1))


def test_a_stream_that_breaks_off_inside_a_frame_is_reported():
    with pytest.raises(ConnectError, match="broke off"):
        read(STREAM[:-5])


@given(st.binary(max_size=300))
def test_any_bytes_give_frames_or_a_probe_error(data):
    try:
        read(data)
    except (ProbeError, ConnectError) as error:
        assert "\n" not in str(error)


def test_a_disk_that_fails_on_its_host_is_reported_in_words_and_ends_the_stream(tmp_path, monkeypatch, capfdbinary):
    job = WorkFolder(str(tmp_path)).job("j")
    (job.root / "rank-0").mkdir(parents=True)
    (job.root / "rank-0" / "stdout.log").write_bytes(b"printed")

    def fails(*words):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fails)
    monkeypatch.setattr("orchestrator.remote.pieces.wind", lambda: None)
    asked = {"workdir": str(tmp_path), "job": "j", "ranks": [0], "offsets": {}, "follow": True, "files": ["stdout.log"]}
    monkeypatch.setattr(os, "nice", lambda more: more)  # it would stay so for all tests that this process runs
    reader.main({**asked, "limit_bytes": None, "times": False, "marker": "M"})
    with pytest.raises(HostError, match=r"a: cannot read .*/jobs/j: Input/output error \(EIO\)") as error:
        list(read_frames("a", [capfdbinary.readouterr().out], RANKS, marker=b"M"))
    assert not isinstance(error.value, ConnectError)  # which would be dialled again, each second
