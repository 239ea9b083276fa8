"""How a record is read back, whoever wrote it."""

import json

import pytest

from orchestrator.errors import OrchError
from orchestrator.record import RECORD_LIMIT, Owner, Record, RecordError, read_record, require_record

SOUND = {"schema": 1, "id": "0" * 32, "name": "ann@desk"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "owner.json"


def test_a_record_is_read_and_a_key_of_a_newer_version_left_out(path):
    path.write_text(json.dumps({**SOUND, "colour": "blue"}))
    assert read_record(path, Owner) == Owner(id="0" * 32, name="ann@desk")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the file: Invalid JSON"),
        (b"\xff", "the file: Invalid JSON"),
        (b"[" * 9999, "the file: Invalid JSON"),
        (b"[]", "the file: Input should be an object"),
        (b'{"schema": 1}', "id: Field required"),
        (b'{"id": "x", "name": "y"}', "id: String should match"),
    ],
)
def test_another_content_is_an_error_that_says_where(path, content, words):
    path.write_bytes(content)
    with pytest.raises(RecordError, match=f"^{words}"):
        read_record(path, Owner)
    with pytest.raises(OrchError, match=f"^{path}: {words}.*: make another$"):
        require_record(path, Owner, "make another")


def test_a_newer_form_is_refused_even_where_it_could_be_read(path):
    path.write_text(json.dumps({**SOUND, "schema": 2}))
    for read in (lambda: read_record(path, Owner), lambda: require_record(path, Owner, "make another")):
        with pytest.raises(OrchError, match=r"owner.json was written by a newer orch \(schema 2\): update this one"):
            read()


def test_a_file_that_is_absent_or_endless_is_an_error(path):
    with pytest.raises(OrchError, match=r"cannot be read \(No such file or directory\): make another"):
        require_record(path, Owner, "make another")
    with open(path, "wb") as file:
        file.truncate(RECORD_LIMIT + 1)
    with pytest.raises(RecordError, match="larger than such a record can be"):
        read_record(path, Record)
