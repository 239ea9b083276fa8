"""Code on its way to a host: packed by `code`, unpacked by `remote/prepare`."""

import hashlib
import io
import os
import stat
import subprocess
import tarfile

import pytest

from orchestrator.errors import UsageError
from orchestrator.planning import bundle, pack_folder
from orchestrator.remote.layout import WorkFolder
from orchestrator.remote.prepare import Refused, store_code
from orchestrator.remote.workfolder import MARK
from tests.support.files import fill


def names(blob):
    with tarfile.open(fileobj=io.BytesIO(blob)) as tar:
        return tar.getnames()


def tar_of(*members):
    """members: (TarInfo, bytes), as somebody might forge them."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def store(work, blob):
    digest = hashlib.sha256(blob).hexdigest()
    store_code(work, digest, blob)
    return work.code(digest)


def everything_in(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_the_same_files_give_the_same_bytes_whenever_and_in_whatever_order_written(tmp_path):
    files = {"train.py": "print(1)", "pkg/a.py": "", "pkg/b.py": "x = 1\n"}
    one = fill(tmp_path / "one", files)
    two = fill(tmp_path / "two", dict(reversed(files.items())))
    for path in two.rglob("*"):
        os.utime(path, (1_000_000, 1_000_000))
    first, second = pack_folder(one), pack_folder(two)
    assert first[1] == second[1]
    assert first[0].sha256 == second[0].sha256 == hashlib.sha256(first[1]).hexdigest()


def test_a_changed_byte_or_name_is_another_code(tmp_path):
    digests = {
        pack_folder(fill(tmp_path / str(index), files))[0].sha256
        for index, files in enumerate(({"a.py": "1"}, {"a.py": "2"}, {"b.py": "1"}))
    }
    assert len(digests) == 3


def test_what_both_ignore_files_name_stays_at_home_and_so_do_caches(tmp_path):
    wanted = {"train.py": "", "data/labels.txt": "", "logs/keep.log": "", "deep/er/x.py": ""}
    unwanted = {
        "data/big.bin": "",
        "logs/a.log": "",
        "secret.env": "",
        ".git/config": "",
        "deep/__pycache__/x.pyc": "",
        ".venv/bin/python": "",
        "out/run/1.txt": "",
    }
    ignores = {".gitignore": "*.log\n!keep.log\nout/\n# a comment\n", ".orchignore": "/data/*.bin\nsecret.env\n"}
    found, blob = pack_folder(fill(tmp_path, {**wanted, **unwanted, **ignores}))
    assert names(blob) == sorted([*wanted, *ignores])
    assert found.files == len(wanted) + len(ignores)


@pytest.mark.parametrize("in_repository", [False, True])
def test_a_hosts_work_folder_stays_at_home_or_each_job_would_ship_all_before_it(tmp_path, in_repository):
    if in_repository:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    assert bundle.WORK == MARK
    fill(tmp_path, {"train.py": "", "workers/a.py": "", f"work/{MARK}": "", "work/jobs/old/src/train.py": ""})
    os.mkfifo(tmp_path / "work" / "jobs" / "old" / "control")
    (tmp_path / "work" / "locks").mkdir()
    _, blob = pack_folder(tmp_path)
    assert names(blob) == ["train.py", "workers/a.py"]
    wanted = bundle.wanted_files(tmp_path)
    assert (wanted.left_out, wanted.empty) == ((), ())


def test_links_and_pipes_are_left_out(tmp_path):
    outside = fill(tmp_path / "outside", {"id_ed25519": "private"})
    inside = fill(tmp_path / "inside", {"train.py": ""})
    (inside / "key").symlink_to(outside / "id_ed25519")
    (inside / "folder").symlink_to(outside)
    (inside / "broken").symlink_to("nowhere")
    os.mkfifo(inside / "pipe")
    assert names(pack_folder(inside)[1]) == ["train.py"]


def test_too_much_is_refused_with_the_largest_files_named_and_before_it_is_read(tmp_path):
    fill(tmp_path, {"train.py": ""})
    for name, mebibytes in (("weights.pt", 80), ("data/cifar.bin", 30)):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(mebibytes << 20)
    with pytest.raises(UsageError, match=r"the largest: weights.pt \(80.0MiB\), data/cifar.bin \(30.0MiB\)") as error:
        pack_folder(tmp_path)
    assert "more than 100.0MiB" in error.value.message
    assert ".orchignore" in error.value.remedy
    (tmp_path / ".orchignore").write_text("*.pt\n")
    assert pack_folder(tmp_path)[0].files == 3


def test_exactly_the_limit_may_be_shipped(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "MAX_BYTES", 10)
    fill(tmp_path, {"a": "12345", "b": "67890"})
    assert pack_folder(tmp_path)[0].size_bytes == 10
    fill(tmp_path, {"c": "1"})
    with pytest.raises(UsageError):
        pack_folder(tmp_path)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere: no such folder: .*--folder"):
        pack_folder(tmp_path / "nowhere")


def test_a_prefix_goes_before_every_name(tmp_path):
    fill(tmp_path, {"__init__.py": "", "a/b.py": ""})
    assert names(pack_folder(tmp_path, prefix="trainer/")[1]) == ["trainer/__init__.py", "trainer/a/b.py"]


def test_what_was_packed_lies_on_the_host_unchanged_read_only_and_executable_where_it_was(tmp_path):
    source = fill(tmp_path / "source", {"train.py": "print('größe')", "bin/go.sh": "#!/bin/sh\n", "empty": ""})
    (source / "bin/go.sh").chmod(0o755)
    code_folder = store(WorkFolder(str(tmp_path / "work")), pack_folder(source)[1])
    assert everything_in(code_folder) == everything_in(source)
    modes = {}
    for path in [path for path in source.rglob("*") if path.is_file()]:
        copy = code_folder / path.relative_to(source)
        assert copy.read_bytes() == path.read_bytes()
        modes[path.name] = stat.S_IMODE(copy.stat().st_mode)
    assert modes == {"train.py": 0o400, "go.sh": 0o500, "empty": 0o400}


def test_a_second_copy_of_the_same_code_changes_nothing(tmp_path):
    work, blob = WorkFolder(str(tmp_path / "work")), pack_folder(fill(tmp_path / "source", {"a.py": "1"}))[1]
    first = store(work, blob)
    before = (first / "a.py").stat().st_ino
    assert store(work, blob) == first
    assert (first / "a.py").stat().st_ino == before
    assert everything_in(work.codes) == [first.name, f"{first.name}/a.py"]


@pytest.mark.parametrize("damage", [lambda blob: blob[:-1], lambda blob: b"x" + blob[1:], lambda blob: b""])
def test_code_that_arrived_damaged_is_refused_and_leaves_nothing(tmp_path, damage):
    found, blob = pack_folder(fill(tmp_path / "source", {"a.py": "1"}))
    work = WorkFolder(str(tmp_path / "work"))
    with pytest.raises(Refused, match="arrived damaged"):
        store_code(work, found.sha256, damage(blob))
    assert not work.root.exists()


def member(name, kind=tarfile.REGTYPE, link=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


HOSTILE = {
    "absolute": member("/etc/cron.d/x"),
    "up and out": member("../../x"),
    "out through the middle": member("a/../../x"),
    "a link": member("x", tarfile.SYMTYPE, "/etc"),
    "a hard link": member("x", tarfile.LNKTYPE, "good.py"),
    "a device": member("x", tarfile.CHRTYPE),
    "a pipe": member("x", tarfile.FIFOTYPE),
    "the folder itself": member("."),
}


@pytest.mark.parametrize("bad", HOSTILE.values(), ids=list(HOSTILE))
def test_a_member_that_is_no_plain_file_inside_is_refused_and_nothing_stays(tmp_path, bad):
    work = WorkFolder(str(tmp_path / "deep" / "er" / "work"))
    with pytest.raises(Refused, match="no plain file"):
        store(work, tar_of((member("good.py"), b"1"), (bad, b"")))
    assert everything_in(work.root) == ["code"]
    assert everything_in(tmp_path) == ["deep", "deep/er", "deep/er/work", "deep/er/work/code"]


@pytest.mark.parametrize("name", ["", "..", "ABC", "0" * 63, "0" * 65, "../" + "0" * 61, "0" * 63 + "\n"])
def test_no_folder_is_named_by_what_is_no_hash(tmp_path, name):
    with pytest.raises(ValueError, match="not a sha256"):
        WorkFolder(str(tmp_path)).code(name)


def test_too_little_free_space_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 5 << 20}))
    work = WorkFolder(str(tmp_path / "work"))
    with pytest.raises(Refused, match="5 MiB free"):
        store(work, tar_of((member("a.py"), b"1")))
    assert not work.root.exists()
