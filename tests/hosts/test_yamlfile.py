import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import InventoryError
from orchestrator.hosts import MAX_BYTES, MAX_DEPTH, MAX_VALUES, REFUSED, Document, read_yaml
from tests.support.cost import at_most_calls


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "x.yaml"


def read(file: Path, content: str | bytes) -> Document:
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_yaml(file)


def mistakes(file: Path, content: str | bytes) -> list[str]:
    """`<line>: <message>` of each mistake, however it was handed on."""
    try:
        found = read(file, content).mistakes
    except InventoryError as error:
        found = error.mistakes
    assert all(mistake.file == str(file) for mistake in found)
    return [f"{mistake.line}: {mistake.message}" for mistake in found]


# ---------------------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("off", "off"),
        ("22:22", "22:22"),
        ("010", "010"),
        ("0x1F", "0x1F"),
        ("0o17", "0o17"),
        ("1_000", "1_000"),
        ("1e3", 1000.0),
        ("2.5", 2.5),
        (".5", 0.5),
        ("1.", 1.0),
        ("22", 22),
        ("-3", -3),
        ("+5", 5),
        ("0", 0),
        ("9" * 19, "9" * 19),
        ("2026-11-21", "2026-11-21"),
        (".inf", ".inf"),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'22'", "22"),
        ('"true"', "true"),
        ("''", ""),
        ("|\n  two\n  lines", "two\nlines"),
    ],
)
def test_a_scalar_means_what_a_person_would_expect(file: Path, scalar: str, value: object) -> None:
    found = read(file, f"key: {scalar}").values["key"]
    assert found == value and type(found) is type(value)


def test_keys_are_always_text(file: Path) -> None:
    assert read(file, "1: a\ntrue: b\nnull: c").values == {"1": "a", "true": "b", "null": "c"}


def test_every_key_and_item_knows_its_line(file: Path) -> None:
    document = read(file, "# a comment\na: 1\nb:\n  - c: |\n      text\n    d:\n      2\n  - {e: 3,\n     f: 4}\n")
    assert document.values == {"a": 1, "b": [{"c": "text\n", "d": 2}, {"e": 3, "f": 4}]}
    assert dict(document.lines) == {
        ("a",): 2,
        ("b",): 3,
        ("b", 0): 4,
        ("b", 0, "c"): 4,
        ("b", 0, "d"): 6,
        ("b", 1): 8,
        ("b", 1, "e"): 8,
        ("b", 1, "f"): 9,
    }


def test_a_missing_key_has_the_line_of_what_should_hold_it(file: Path) -> None:
    document = read(file, "a:\n  - b: 1")
    assert document.line(("a", 0, "missing", 3)) == 2
    assert document.line(("missing",)) == 0


@pytest.mark.parametrize(
    "content",
    ["\ufeffa: ä\r\nb: [1]\r\n".encode(), b"---\na: \xc3\xa4\nb: [1]\n...\n", b"%YAML 1.2\n--- {a: \xc3\xa4, b: [1]}"],
)
def test_a_byte_order_mark_crlf_and_document_marks_change_nothing(file: Path, content: bytes) -> None:
    document = read(file, content)
    assert document.values == {"a": "ä", "b": [1]} and not document.mistakes


def test_a_link_to_a_file_is_read_as_that_file(file: Path, tmp_path: Path) -> None:
    file.write_text("a: 1")
    link = tmp_path / "link.yaml"
    link.symlink_to(file)
    assert read_yaml(link).values == {"a": 1}


@pytest.mark.parametrize(("mode", "writable"), [(0o666, True), (0o664, False)])
def test_a_file_that_every_user_can_change_is_marked(file: Path, mode: int, writable: bool) -> None:
    file.write_text("a: 1")
    file.chmod(mode)
    assert read_yaml(file).world_writable is writable


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a: 1\nb: 2\na: 3", "3: key 'a' is given twice, on lines 1 and 3"),
        ("{x: {a: 1,\n a: 2}}", "2: key 'a' is given twice, on lines 1 and 2"),
        (
            "a: 1\nb: !!python/object/apply:os.system [id]",
            "2: tags are not supported ('!!python/object/apply:os.system')",
        ),
        ("a: !!str 3", "1: tags are not supported ('!!str')"),
        ("a: ! x", "1: tags are not supported ('!')"),
        ("!!map {a: 1}", "1: tags are not supported ('!!map')"),
        ("!x a: 1", "1: tags are not supported ('!x')"),
        ("a: !e!x 1", "1: is not YAML, column 4: found undefined tag handle '!e!'; tags are not supported"),
        ("a: &k 1", "1: anchors are not supported (&k); shared values go under `defaults`"),
        ("&k a: 1", "1: anchors are not supported (&k)"),
        ("a: 1\nb: *k", "2: aliases are not supported (*k)"),
        ("<<: {a: 1}", "1: merge keys (<<) are not supported; shared values go under `defaults`"),
        ("? [a, b]\n: 1", "1: a key must be one word"),
        ("?\n: 1", "1: a key is missing before the colon"),
        ("a: 1\n---\nb: 2", "2: a second document begins here"),
        ("", "0: is empty"),
        ("# only\n# comments\n", "0: is empty"),
        ("---\n...\n", "1: must be a mapping (`key: value` lines), not a single value"),
        ("- a\n- b", "1: must be a mapping (`key: value` lines), not a list"),
        ("text", "1: must be a mapping (`key: value` lines), not a single value"),
        (
            "a:\n\tb: 1",
            "2: is not YAML, column 1: found character '\\t' that cannot start any token; indent with spaces",
        ),
        ("a: b: c", "1: is not YAML, column 5: mapping values are not allowed here; quote a value that holds `: `"),
        ("a: @x", "1: is not YAML, column 4: found character '@' that cannot start any token; put the value in quotes"),
        ("a: [1", "1: is not YAML, column 6: expected ',' or ']', but got '<stream end>'"),
        ("a: 'x\n", "2: is not YAML, column 1: found unexpected end of stream"),
        ("%YAML 2.0\n--- {a: 1}", "1: is not YAML, column 1: found incompatible YAML document"),
        (
            "%YAML " + "9" * 5000 + ".1\n--- {a: 1}",
            "1: is not YAML: an escape or a %YAML line holds a number out of range",
        ),
        ('a: 1\nb: "\\UFFFFFFFF"', "2: is not YAML: an escape or a %YAML line holds a number out of range"),
        ('a: "\\ud800"', "1: an escape stands for NUL or half a character"),
        ('a: 1\nb: ["\\0"]', "2: an escape stands for NUL or half a character"),
        ('"\\0": 1', "1: an escape stands for NUL or half a character"),
        ("a: 1\nb: \x07", "2: character U+0007 is not allowed in YAML"),
        (b"a: 1\nb: caf\xe9", "2: is not UTF-8 text (byte 0xe9); save the file as UTF-8"),
        ("a: 1".encode("utf-16"), "1: is not UTF-8 text (byte 0xff)"),
        (b"a: 1\nb: x\0y", "2: holds a NUL byte"),
        ("[" * 3000, f"1: is nested more than {MAX_DEPTH} levels deep"),
        ("a: [" + "1," * MAX_VALUES + "]", f"1: holds more than {MAX_VALUES} values"),
        (b"#" * (MAX_BYTES + 1), "0: is larger than 1 MiB"),
    ],
)
def test_a_mistake_gives_one_clear_line(file: Path, content: str | bytes, expected: str) -> None:
    found = mistakes(file, content)
    assert len(found) == 1, found
    assert found[0].startswith(expected)
    assert "\n" not in found[0]


def test_nesting_up_to_the_limit_is_read(file: Path) -> None:
    assert not mistakes(file, "a: " + "[" * MAX_DEPTH + "]" * MAX_DEPTH)
    assert mistakes(file, "a: " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1))


def test_keys_within_keys_reach_the_limit_too(file: Path) -> None:
    assert mistakes(file, "? " * 400 + "a")[-1] == f"1: is nested more than {MAX_DEPTH} levels deep"


def test_mistakes_are_collected_to_the_end_of_the_file(file: Path) -> None:
    content = "a: !x 1\nb: *k\na: {c: &k 1}\n? [*q]\n: 2\nd: [\n"
    assert [line.split(": ")[0] for line in mistakes(file, content)] == ["1", "2", "3", "3", "4", "4", "7"]


def test_the_second_of_two_equal_keys_changes_nothing(file: Path) -> None:
    document = read(file, "a: {b: 1}\na: {b: 2, c: 3}")
    assert document.values == {"a": {"b": 1}}
    assert dict(document.lines) == {("a",): 1, ("a", "b"): 1}


def test_a_refused_value_is_marked_and_its_neighbours_stay(file: Path) -> None:
    document = read(file, "a: !x 1\nb: *k\nc: 3\n? [d]\n: 4\nc: 5")
    assert document.values == {"a": REFUSED, "b": REFUSED, "c": 3}


def test_an_alias_bomb_costs_nothing(file: Path) -> None:
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    for before, after in zip("abcdefgh", "bcdefghi", strict=True):
        bomb += f"{after}: &{after} [{', '.join([f'*{before}'] * 9)}]\n"
    with at_most_calls(100_000):
        assert len(mistakes(file, bomb)) == 9 + 8


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InventoryError) as caught:
        read_yaml(tmp_path / "none.yaml")
    assert (
        str(caught.value)
        == f"{tmp_path}/none.yaml: cannot be read (No such file or directory); give the path of a YAML file"
    )


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/dev"])
def test_a_device_or_a_folder_is_refused(path: str) -> None:
    with pytest.raises(
        InventoryError, match=rf"^{path}: is (not a regular file|a folder); give the path of a YAML file"
    ):
        read_yaml(Path(path))


def test_a_fifo_is_refused_without_waiting_for_a_writer(file: Path) -> None:
    os.mkfifo(file)
    with pytest.raises(InventoryError, match="is not a regular file"):
        read_yaml(file)


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs /proc")
def test_a_file_that_fails_while_it_is_read_is_refused() -> None:
    with pytest.raises(InventoryError, match=r"cannot be read \(Input/output error\)"):
        read_yaml(Path("/proc/self/mem"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_read_permission_is_refused(file: Path) -> None:
    file.touch(mode=0)
    with pytest.raises(InventoryError, match=r"cannot be read \(Permission denied\)"):
        read_yaml(file)


# --------------------------------------------------------------------------------------------------------- fuzzing

# fmt: off
PIECES = [
    "a", "b: ", ": ", "- ", "? ", "\n", "\n  ", "[", "]", "{", "}", ", ", "'", '"', "|\n", ">\n", "#", "&a ",
    "*a", "!x ", "!!str ", "<<: ", "---\n", "...\n", "%YAML 1.1\n", "\t", "\\u", "\\x0", "1e9",
    "\ufeff", "\0", "\x85", "\u2028", "🙂",
]
# fmt: on


@settings(max_examples=300)
@given(st.binary(max_size=200) | st.lists(st.sampled_from(PIECES), max_size=40).map("".join).map(str.encode))
def test_any_bytes_give_a_document_or_mistakes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    for line in mistakes(file, content):
        assert line.isprintable()
