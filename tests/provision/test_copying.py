"""`orch cp`: a file to hosts and from them over real SSH servers, whole and the same or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from pathlib import Path

import pytest

from orchestrator import files
from orchestrator.errors import HostError, ProbeError, UsageError
from orchestrator.jobs.collect import alone
from orchestrator.paths import RunFolder
from orchestrator.provision import copying
from orchestrator.provision.copying import read_source
from orchestrator.transport.ask import ConnectedHost, exchange
from orchestrator.transport.local import LocalTransport
from tests.support.ssh_rack import ssh_rack
from tests.support.sshd import needs_sshd

pytestmark = needs_sshd
CONTENT = bytes(range(256)) * 3000 + b"an odd end"
SHA_OF_ABC = hashlib.sha256(b"abc").hexdigest()
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(scope="module")
def rack(tmp_path_factory):
    with ssh_rack(tmp_path_factory.mktemp("rack")) as made:
        yield made


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a file's name"
    path.write_bytes(CONTENT)
    path.chmod(0o754)
    return path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


# ---- to hosts -------------------------------------------------------------------------------------------------------


def test_a_file_arrives_as_it_is_with_its_mode_and_nothing_else(rack, file, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    done = rack.types("cp", str(file), f"v100:{there}/new name")
    assert done.stdout == f"v100: {there}/new name (750.0KiB)\n"
    assert (there / "new name").read_bytes() == CONTENT and mode(there / "new name") == 0o754
    assert names(there) == ["new name"]


def test_in_a_folder_it_keeps_its_name_and_what_was_there_is_replaced(rack, file, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (there / file.name).write_text("old")
    for folder in (f"{there}", f"{there}/"):
        document = json.loads(rack.types("cp", "--json", str(file), f"v100:{folder}").stdout)
        copied = {"path": str(there / file.name), "bytes": len(CONTENT), "sha256": SHA256}
        assert document == {"schema": 1, "nodes": {"v100": copied}}
    assert (there / file.name).read_bytes() == CONTENT and names(there) == [file.name]


def test_a_link_stays_and_what_it_leads_to_is_replaced(rack, file, tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    rack.types("cp", str(file), f"a2000:{tmp_path}/link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("folder", "is a folder"),
        ("nowhere/x", "nowhere is no folder"),
        ("nowhere/", "nowhere is no folder"),
        ("pipe", "is no regular file"),
    ],
)
def test_what_must_not_be_replaced_stays_and_the_host_says_why(rack, file, tmp_path, place, words):
    there = tmp_path / "there"
    (there / "folder" / file.name).mkdir(parents=True)
    os.mkfifo(there / "pipe")
    before = sorted(there.rglob("*"))
    done = rack.types("cp", str(file), f"v100:{there}/{place}", exit_code=3)
    assert words in done.stderr and "try:" in done.stderr
    assert sorted(there.rglob("*")) == before


def test_all_hosts_get_it_and_one_that_is_off_is_exit_code_3(rack, file, tmp_path):
    done = rack.types("cp", str(file), f":{tmp_path}/it", exit_code=3)
    assert done.stdout == f"a2000: {tmp_path}/it (750.0KiB)\nv100: {tmp_path}/it (750.0KiB)\n"
    assert "error: gone: " in done.stderr
    assert (tmp_path / "it").read_bytes() == CONTENT
    rack.types("cp", "--nodes", "v*", str(file), f":{tmp_path}/other")
    assert (tmp_path / "other").read_bytes() == CONTENT


def test_what_arrives_damaged_or_in_part_is_not_left(tmp_path):
    host = ConnectedHost(LocalTransport("here"), sys.executable, None, "/nowhere")
    request = {"action": "take", "path": str(tmp_path / "it"), "name": "it", "mode": 0o644, "size": 4, "sha256": SHA256}
    with pytest.raises(HostError, match="arrived damaged"), exchange(host, "copying", request, [b"four"]) as words:
        list(words)
    assert names(tmp_path) == []
    with exchange(host, "copying", request, [b"two"]) as words:
        next(words)
    assert names(tmp_path) == []


# ---- from hosts -----------------------------------------------------------------------------------------------------


def test_a_hosts_file_comes_as_it_is(rack, file, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    done = rack.types("cp", f"v100:{file}", f"{here}/new")
    assert done.stdout == f"v100: {here}/new (750.0KiB)\n"
    assert (here / "new").read_bytes() == CONTENT and mode(here / "new") == 0o754
    rack.types("cp", f"v100:{file}", str(here))
    (here / "new").write_text("old")
    rack.types("cp", f"v100:{file}", f"{here}/new")
    assert (here / "new").read_bytes() == CONTENT and names(here) == [file.name, "new"]


def test_a_path_counts_from_the_home_folder(rack, tmp_path):
    rack.types("cp", f"v100:{os.path.relpath('/etc/passwd', Path.home())}", str(tmp_path))
    assert (tmp_path / "passwd").read_bytes() == Path("/etc/passwd").read_bytes()


def test_from_several_hosts_each_file_has_its_place(rack, file, tmp_path):
    here = tmp_path / "here"
    done = rack.types("cp", "--nodes", "a2000,v100", f":{file}", str(here))
    assert done.stdout.splitlines() == [f"{n}: {here}/{n}/{file.name} (750.0KiB)" for n in ("a2000", "v100")]
    assert [(here / node / file.name).read_bytes() for node in ("a2000", "v100")] == [CONTENT] * 2
    rack.types("cp", f"v1*:{file}", str(tmp_path / "other"))
    assert (tmp_path / "other" / "v100" / file.name).read_bytes() == CONTENT


def test_what_is_no_file_there_leaves_nothing_here(rack, tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    os.mkfifo(there / "pipe")
    for name, words in (("", "is a folder"), ("/pipe", "is no regular file"), ("/x", "No such file")):
        assert words in rack.types("cp", f"v100:{there}{name}", f"{here}/it", exit_code=3).stderr
    assert names(here) == []


def test_no_folder_and_no_device_is_replaced_here(rack, file, tmp_path):
    (tmp_path / "here" / file.name).mkdir(parents=True)
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "here", tmp_path / "pipe", tmp_path / "nowhere" / "x"):
        assert "try:" in rack.types("cp", f"v100:{file}", str(place), exit_code=2).stderr
    assert "is no folder" in rack.types("cp", "--nodes", "v100", f":{file}", str(file), exit_code=2).stderr
    assert (tmp_path / "here" / file.name).is_dir() and file.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([{"size": 2, "mode": 0o644}, {"piece": "YWJj"}], "more bytes than were announced"),
        ([{"piece": "YWJj"}], "more bytes than were announced"),
        ([{"size": 3, "mode": 0o644}, {"piece": "YWJj"}, {"end": {"sha256": "0" * 64}}], "arrived damaged"),
        ([{"size": 4, "mode": 0o644}, {"piece": "YWJj"}, {"end": {"sha256": SHA_OF_ABC}}], "arrived damaged"),
        ([{"size": copying.MOST_BYTES + 1, "mode": 0}], "more bytes than were asked for"),
        ([{"size": "x", "mode": 0}], "ValueError"),
        ([{"piece": 7}], "TypeError"),
        ([], "was cut short"),
    ],
)
def test_a_host_that_sends_anything_else_leaves_nothing_here(words, why, tmp_path, monkeypatch):
    class Said:
        def __enter__(self):
            return iter(words)

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(copying, "exchange", lambda *_: Said())
    (tmp_path / "it").write_text("old")
    host = ConnectedHost(LocalTransport("here"), sys.executable, None, "/nowhere")
    with pytest.raises(ProbeError, match=why):
        copying._get(host, "x", lambda node: tmp_path / "it", 0o022)
    assert names(tmp_path) == ["it"] and (tmp_path / "it").read_text() == "old"


# ---- the line -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a b", "neither SRC nor DST is on a host"),
        ("v100:a a2000:b", "both SRC and DST are on hosts"),
        ("./v100:a b", "neither SRC nor DST is on a host"),
        ("--nodes v100 v100:a b", "hosts are named twice"),
        ("x:a b", "no such node in cluster rack"),
        ("x*:a b", "x* matches no node of cluster rack"),
        ("v100:a/ b", "a/ is no file"),
        ("nothing.txt v100:", "neither SRC nor DST is on a host"),
        ("nothing.txt v100:a", "nothing.txt: No such file"),
        (". v100:a", "is no regular file"),
    ],
)
def test_a_line_that_cannot_be_meant_is_refused(rack, line, words):
    assert words in rack.types("cp", *line.split(), exit_code=2).stderr


def test_a_large_file_is_refused_with_the_way_to_bring_it(tmp_path):
    with open(tmp_path / "large", "wb") as large:
        large.truncate(copying.MOST_BYTES + 1)
    with pytest.raises(UsageError, match=r"larger than 256.0MiB: `orch data push`"):
        read_source(tmp_path / "large")


# ---- what another user planted ------------------------------------------------------------------------------------

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="plants a link as another user")


@pytest.fixture
def planted(tmp_path):
    """A folder like /tmp in which another login has planted links to a file and to a folder of ours."""
    keys, shared = tmp_path / "home" / "authorized_keys", tmp_path / "shared"
    keys.parent.mkdir()
    keys.write_text("the keys")
    shared.mkdir()
    shared.chmod(0o1777)
    child = os.fork()
    if not child:
        try:
            os.chdir(shared)
            os.setuid(NOBODY)
            os.symlink(keys, "train.py")
            os.symlink(keys.parent, "out")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    yield shared
    assert keys.read_text() == "the keys" and names(keys.parent) == ["authorized_keys"]


@needs_root
@pytest.mark.parametrize("place", ["train.py", "out", "out/", "out/authorized_keys"])
def test_no_copy_to_a_host_goes_through_a_link_that_another_user_planted(rack, file, planted, place):
    done = rack.types("cp", str(file), f"v100:{planted}/{place}", exit_code=3)
    link = planted / place.partition("/")[0]
    assert f"error: v100: {link} belongs to another user" in done.stderr, done.stderr


@needs_root
@pytest.mark.parametrize("place", ["train.py", "out", "out/", "out/authorized_keys"])
def test_no_copy_from_a_host_goes_through_a_link_that_another_user_planted(rack, file, planted, place):
    done = rack.types("cp", f"v100:{file}", f"{planted}/{place}", exit_code=2)
    link = planted / place.partition("/")[0]
    assert f"error: {link} is a link that belongs to another user" in done.stderr, done.stderr


@needs_root
def test_no_command_writes_its_files_through_a_link_that_another_user_planted(planted, tmp_path):
    out = planted / "out"
    for write in (
        lambda: files.write_atomic(out / "report.html", "text"),
        lambda: files.make_folder(out / "new"),
        lambda: files.own_folder(out / "new"),
        lambda: files.locked(out / ".lock").__enter__(),
        lambda: files.folder_beneath(out, ["new"]).__enter__(),
        lambda: alone(RunFolder(out / "job").lock, "does", "").__enter__(),
        lambda: alone(planted / "train.py", "does", "").__enter__(),
    ):
        with pytest.raises(UsageError, match="is a link that belongs to another user"):
            write()
    own = tmp_path / "own"
    own.symlink_to(tmp_path / "home")
    assert files.resolved(own / "x" / ".." / "y") == tmp_path / "home" / "y"
    files.write_atomic(planted / "train.py", "ours")  # a link at its own place is replaced, as a rename does
    assert (planted / "train.py").read_text() == "ours" and not (planted / "train.py").is_symlink()
