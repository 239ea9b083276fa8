"""The view of a log: whole lines, and nothing that a terminal obeys."""

import itertools
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.jobs import MAX_ROW_CHARS as MAX_LINE_CHARS
from orchestrator.jobs import FilePiece, Splitter
from orchestrator.units import clean, clean_lines, message, one_line


def split(*pieces, file="rank-0/stdout.log"):
    splitter, offset, lines = Splitter(), 0, []
    for data in pieces:
        lines += splitter.split("a", FilePiece(file, 0, offset, data))
        offset += len(data)
    return [line.text for line in (*lines, *splitter.rest())]


@given(st.lists(st.text("añ€🎈 ", max_size=8), max_size=6), st.lists(st.integers(0, 200), max_size=6))
def test_lines_are_the_same_however_the_bytes_are_cut(lines, cuts):
    data = "".join(f"{line}\n" for line in lines).encode()
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assert split(*[data[a:b] for a, b in itertools.pairwise(edges)]) == lines


@given(
    st.lists(st.sampled_from([b"abc", b"\n", b"\r", b"\r\n", b"\x1b[2J", b"\x1b]0;t\x07", "é€".encode(), b"\xff", b"\t",
                              b"x" * (MAX_LINE_CHARS - 3)]), max_size=12),
    st.lists(st.integers(0, 300_000), max_size=6),
)  # fmt: skip
def test_hostile_lines_are_the_same_however_the_bytes_are_cut(parts, cuts):
    data = b"".join(parts)
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    whole = split(data)
    assert split(*[data[a:b] for a, b in itertools.pairwise(edges)]) == whole
    assert all(len(line) <= MAX_LINE_CHARS and harmless(line) for line in whole)


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_no_bytes_give_a_line_that_steers_a_terminal(pieces):
    assert all(harmless(line) for line in split(*pieces))


def harmless(line):
    return not any((ord(c) < 32 and c != "\t") or 127 <= ord(c) < 160 or c in "\u061c\u200e\u200f\u2028\u2029" or
                   "\u202a" <= c <= "\u202e" or "\u2066" <= c <= "\u2069" for c in line)  # fmt: skip


def test_the_unfinished_line_of_an_older_generation_is_shown_before_the_new_one():
    splitter = Splitter()
    pieces = [
        FilePiece("rank-0/stdout.log", 0, 0, b"old\nunfinished"),
        FilePiece("rank-0/stdout.log", 0, 0, b"new\n", restarted=True),
    ]
    assert [line.text for piece in pieces for line in splitter.split("a", piece)] == ["old", "unfinished", "new"]


def test_a_long_line_is_wrapped_and_nothing_of_it_is_lost():
    assert "".join(split(b"y" * (3 * MAX_LINE_CHARS + 7) + b"\n")) == "y" * (3 * MAX_LINE_CHARS + 7)


def test_a_last_line_without_a_newline_is_shown_too():
    assert split(b"one\ntwo") == ["one", "two"]


# As tqdm 4.67 writes them: a bar after the other; and bars below each other, with a line by tqdm.write between them.
ONE_AFTER_THE_OTHER = (
    "\repoch 0 0/2\repoch 0 1/2\repoch 0 2/2\repoch 0 2/2\nloss 0\n\repoch 1 0/2\repoch 1 2/2\nloss 1\n"
)
NESTED = (
    "\router 0/2\n\rinner 0/2\x1b[A\n\rinner 1/2\x1b[A\n\rinner 2/2\x1b[A\rinner 2/2\n\r         \rsaved a checkpoint\n"
    "\router 0/2\router 1/2\n\rinner 0/2\x1b[A\n\rinner 1/2\x1b[A\n\rinner 2/2\x1b[A\rinner 2/2\n"
    "\router 2/2\router 2/2\n"
)
FOLDED = {
    "10%\r20%\r\n30%\n": ["20%", "30%"],
    "one\r\ntwo\r\n\r\nthree": ["one", "two", "", "three"],
    "\r 10%\r 20%": [" 20%"],
    "\r100%\r    \rnext\n": ["next"],
    "\r100%\r    \r\n": ["100%"],
    "\r 50% caf\u00e9\r\x1b[K": [" 50% caf\u00e9"],
    ONE_AFTER_THE_OTHER: ["epoch 0 2/2", "loss 0", "epoch 1 2/2", "loss 1"],
    NESTED: ["inner 2/2", "saved a checkpoint", "inner 2/2", "outer 2/2"],
    "".join(f"\r{n}%\n" for n in range(40)): [f"{n}%" for n in range(40)],
}


@pytest.mark.parametrize("text", FOLDED, ids=range(len(FOLDED)))
def test_what_is_drawn_over_is_folded_to_its_last_state_however_the_bytes_are_cut(text):
    data = text.encode()
    assert split(data) == FOLDED[text]
    assert split(*[data[at : at + 1] for at in range(len(data))]) == FOLDED[text]


def test_a_bar_is_shown_while_it_is_drawn_and_is_a_line_once_the_program_has_left_it():
    splitter, offset = Splitter(), 0

    def writes(text):
        nonlocal offset
        data = text.encode()
        offset += len(data)
        lines = [*splitter.split("a", FilePiece("rank-0/stderr.log", 0, offset - len(data), data)), *splitter.settle()]
        bars = splitter.bars()
        return [line.text for line in lines], bars and [(line.rank, line.stream, line.text) for line in bars.lines]

    assert writes("hello\n") == (["hello"], None)
    assert writes("\r 10%") == ([], [(0, "stderr", " 10%")])
    assert writes("\r 20%\r 30%") == ([], [(0, "stderr", " 30%")])
    assert writes("") == ([], None)  # nothing new
    assert writes("\r 40%\n") == ([" 40%"], [])
    assert writes("\router 1\n\rinner 1\x1b[A") == ([], [(0, "stderr", "inner 1")])
    assert writes("\n\rinner 2\x1b[A\router 2") == ([], [(0, "stderr", "outer 2")])
    assert [line.text for line in splitter.rest()] == ["outer 2", "inner 2"]
    assert splitter.bars().lines == ()


def test_a_bar_without_end_takes_no_room():
    splitter, offset = Splitter(), 0
    for count in range(300):
        data = b"\r%d" % count * 1000
        assert list(splitter.split("a", FilePiece("rank-0/stdout.log", 0, offset, data))) == []
        offset += len(data)
    assert [line.text for line in splitter.rest()] == ["299"]


def test_a_line_without_end_is_cut():
    lines = split(b"x" * (MAX_LINE_CHARS * 2 + 5))
    assert [len(line) for line in lines] == [MAX_LINE_CHARS, MAX_LINE_CHARS, 5]


def test_metrics_are_no_lines_for_a_person():
    assert split(b"{}\n", file="rank-0/metrics.jsonl") == []


@pytest.mark.parametrize(
    "hostile",
    ["\x1b]0;title\x07", "\x1b]52;c;ZXZpbA==\x1b\\", "\x1b[2J\x1b[1;1H", "\x1b[31m", "\x9b31m", "\x1bP1$r\x1b\\",
     "\x1bc", "\u202e", "\x08\x08", "\x07", "\x1b[", "\x1b"],
)  # fmt: skip
def test_nothing_that_a_terminal_obeys_is_left(hostile):
    shown = clean(f"a{hostile}b")
    assert shown.startswith("a")
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 or c == "\u202e" for c in shown)
    assert "title" not in shown
    assert "ZXZp" not in shown


def test_one_line_is_cut_between_words():
    assert one_line("a host lacks a package: `orch run --requirements FILE` brings it", 43) == (
        "a host lacks a package: `orch run…"
    )
    assert one_line("x" * 20, 10) == "x" * 9 + "…"


@given(st.text(max_size=400), st.integers(2, 50))
def test_one_line_is_one_printable_line_of_its_length(text, limit):
    shown = one_line(text, limit)
    assert len(shown) <= limit
    assert shown.isprintable()


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("\x1b]52;c;cm0gLXJm\x07V100", "V100"),
        ("a\rb\nc", "a b c"),
        ("\x9b31mred\u202eevil", "31mredevil"),
        ("\ud800x", "x"),
        ("y" * 5000, "y" * 299 + "…"),
        ("Straße 東京", "Straße 東京"),
    ],
)
def test_text_of_a_host_becomes_one_harmless_line(hostile: str, shown: str) -> None:
    assert one_line(hostile) == shown


def test_no_format_character_of_unicode_reaches_a_terminal_or_a_page():
    format_ = [char for char in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(char) == "Cf"]
    assert len(format_) >= 160
    hostile = "".join(f"a{char}" for char in format_)
    assert clean(hostile) == clean_lines(hostile) == "a" * len(format_)
    assert split(f"{hostile}\n".encode()) == ["a" * len(format_)]
    assert one_line(hostile, 1000) == "a" * len(format_)


def test_what_can_be_seen_stays():
    seen = "Straße 東京 العربية עברית हिन्दी 🎈👩 é\té"
    assert clean(seen) == seen


@pytest.mark.parametrize("said", ["\x1b[2J", "\u202e\u00ad", ""])
def test_a_message_without_a_printable_character_says_so(said):
    assert message(said) == "(its message holds no printable character)"
    assert message("no disk") == "no disk"
