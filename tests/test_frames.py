"""What a host may send, and what it may not."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import ConnectError, ProbeError
from orchestrator.frames import MAX_LINE_BYTES, Agent, Beat, End, Piece, read_frames

RANKS = frozenset({0, 1})


def frame(header, payload=b""):
    return json.dumps(header).encode() + b"\n" + payload


def read(*chunks):
    return list(read_frames("a", chunks, RANKS))


STREAM = (
    frame({"agent": {"state": "running"}})
    + frame({"file": "rank-1/stdout.log", "offset": 3, "size": 4}, b"\n\x00\xff{")
    + frame({"beat": 1})
    + frame({"end": {"rank-1/stdout.log": {"size": 7, "sha256": "ab"}}})
)
FRAMES = [
    Agent({"state": "running"}),
    Piece("rank-1/stdout.log", 1, 3, b"\n\x00\xff{"),
    Beat(),
    End({"rank-1/stdout.log": (7, "ab")}),
]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_frames_are_the_same_however_the_bytes_are_cut(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    chunks = [STREAM[a:b] for a, b in itertools.pairwise(edges) if a < b]
    assert read(*chunks) == FRAMES


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
    with pytest.raises(ProbeError, match=r"^a: sent a frame that is none"):
        read(frame({"file": name, "offset": 0, "size": 1}, b"x"))


def test_foreign_names_in_the_end_frame_are_refused_too():
    with pytest.raises(ProbeError):
        read(frame({"end": {"../../x": {"size": 1, "sha256": "ab"}}}))


@pytest.mark.parametrize("size", [-1, 0, 10**12, "1", None, 1.5])
def test_a_piece_of_an_impossible_size_is_refused(size):
    with pytest.raises(ProbeError):
        read(frame({"file": "rank-0/stdout.log", "offset": 0, "size": size}))


def test_an_endless_line_is_refused_before_it_fills_the_memory():
    with pytest.raises(ProbeError, match="longer than any frame"):
        read(*[b"x" * (1 << 16)] * (MAX_LINE_BYTES // (1 << 16) + 1))


def test_a_stream_that_breaks_off_inside_a_frame_is_told():
    with pytest.raises(ConnectError, match="broke off"):
        read(STREAM[:-5])


@given(st.binary(max_size=300))
def test_any_bytes_give_frames_or_a_probe_error(data):
    try:
        read(data)
    except (ProbeError, ConnectError) as error:
        assert "\n" not in str(error)
