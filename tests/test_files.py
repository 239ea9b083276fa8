import fcntl
import json
import os
import stat
from pathlib import Path

import pytest

from orchestrator import files
from orchestrator.files import locked, write_atomic, write_json


def test_a_file_is_written_whole_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state.json"
    before = os.umask(0)
    try:
        write_atomic(path, "größe\n")
    finally:
        os.umask(before)
    assert path.read_bytes() == "größe\n".encode()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_mode_that_is_asked_for_is_given_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_atomic(tmp_path / "report.html", b"x", mode=0o644)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "report.html").stat().st_mode) == 0o644


def test_a_failed_write_leaves_neither_a_change_nor_a_temporary_file(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    (target / "inside").write_text("kept")
    with pytest.raises(OSError):
        write_atomic(target, "cannot replace a folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (target / "inside").read_text() == "kept"


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("untouched")
    link = tmp_path / "link"
    link.symlink_to(secret)
    write_atomic(link, "new")
    assert secret.read_text() == "untouched"
    assert link.read_text() == "new" and not link.is_symlink()


def test_a_reader_meets_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "state"
    write_atomic(path, "old")
    with path.open() as reader:
        write_atomic(path, "new")
        assert reader.read() == "old"
    assert path.read_text() == "new"


def test_json_is_written_for_people_too(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": [1, None]})
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == {"a": [1, None]}
    assert text.endswith("}\n") and "\n  " in text


def test_a_lock_keeps_others_out_until_it_is_left(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lock"
    with pytest.raises(RuntimeError, match="left early"), locked(path):
        with path.open() as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        raise RuntimeError("left early")
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_lock_whose_file_was_removed_before_it_was_held_is_taken_again(tmp_path: Path, monkeypatch) -> None:
    path, removed, real = tmp_path / "lock", [], files.flock

    def late(file, operation):
        if not removed:  # by another program, which found it unlocked
            removed.append(path.unlink())
        real(file, operation)

    monkeypatch.setattr(files, "flock", late)
    with locked(path), path.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
