"""A data set on its way to hosts: only what lacks, whole or not at all, and nothing that arrived is lost."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest

from orchestrator.cli.hosts import use_words
from orchestrator.errors import ConnectError, HostError, ProbeError, UsageError
from orchestrator.provision import DATA_FOLDER, Pushed, data_folder, read_manifest
from orchestrator.provision import push as datapush
from orchestrator.remote import datasets
from orchestrator.transport import ConnectedHost, LocalTransport
from tests.support.lab import lab
from tests.support.terminal import Person
from tests.support.wire import marker_of
from trainer.shared import parse_settings

RAW = "MNIST/raw"
INVENTORY = """
cluster: data
defaults: {device: cpu, bandwidth: 2.5Gbps}
nodes: [{name: alpha, host: 10.78.1.1}, {name: beta, host: 10.78.1.2}]
"""


@pytest.fixture
def here(tmp_path):
    """A data set in torchvision's layout: two files with content, an empty one, and a name to stumble over."""
    root = tmp_path / "here"
    (root / RAW).mkdir(parents=True)
    for name, content in (("images", b"i" * 3_000_000), ("labels", b"l" * 1000), ("empty", b""), ("a 'b' $c;é", b"c")):
        (root / RAW / name).write_bytes(content)
    return root


def host(name="here"):
    return ConnectedHost(LocalTransport(name), sys.executable, None, "/nowhere")


def push(root, there, hosts=None, reopen=None):
    seen = []
    hosts = hosts or {"here": host()}
    found = datapush.push(hosts, read_manifest(root), str(there), seen.append, reopen or (lambda name: host(name)))
    return found if len(hosts) > 1 else found["here"], seen


def contents(root):
    return {
        p.relative_to(root).as_posix(): p.read_bytes()
        for p in root.rglob("*")
        if p.is_file() and p.name not in (".lock", datasets.MARK)
    }


def partial(root, there, name, content):
    """The file under which so much of `name` waits on the host."""
    [file] = [file for file in read_manifest(root).files if file.name == name]
    mark = hashlib.sha256(f"{name}:{file.sha256}".encode()).hexdigest()[:32]
    path = (there / name).parent / f".orch-{mark}.part"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


# ---- what is sent ---------------------------------------------------------------------------------------------


def test_all_files_arrive_and_a_second_push_sends_nothing(here, tmp_path):
    there = tmp_path / "there"
    first, seen = push(here, there)
    assert first == Pushed(str(there), 4, 3_001_001)
    assert contents(there) == contents(here)
    assert (seen[-1].phase, seen[-1].here_bytes) == ("done", 3_001_001)
    assert push(here, there)[0] == Pushed(str(there), 0, 0)


def test_only_what_differs_is_sent_though_its_size_is_the_same(here, tmp_path):
    there = tmp_path / "there"
    push(here, there)
    (there / RAW / "labels").write_bytes(b"x" * 1000)
    assert push(here, there)[0] == Pushed(str(there), 1, 1000)
    assert contents(there) == contents(here)


def test_a_file_that_came_half_goes_on_where_it_stopped(here, tmp_path):
    there = tmp_path / "there"
    waiting = partial(here, there, f"{RAW}/images", b"i" * 2_000_000)
    pushed, _ = push(here, there)
    assert pushed.bytes == 1_001_001
    assert contents(there) == contents(here)
    assert not waiting.exists()


def test_what_was_damaged_on_the_host_is_detected_and_comes_again(here, tmp_path):
    there = tmp_path / "there"
    partial(here, there, f"{RAW}/images", b"i" * 1_999_999 + b"x")
    failed, _ = push(here, there)
    assert isinstance(failed, HostError)
    assert "MNIST/raw/images arrived damaged" in failed.message
    assert "images" not in {path.name for path in there.rglob("*")}
    push(here, there)
    assert contents(there) == contents(here)


def test_a_partial_of_another_content_is_cleared_away(here, tmp_path):
    there = tmp_path / "there"
    old = partial(here, there, f"{RAW}/labels", b"")
    (here / RAW / "labels").write_bytes(b"new")
    push(here, there)
    assert not old.exists()


def test_hosts_that_share_a_folder_wait_for_each_other_and_it_is_sent_once(here, tmp_path):
    names = ["one", "two", "three"]
    found, _ = push(here, tmp_path / "there", {name: host(name) for name in names})
    assert sorted(pushed.files for pushed in found.values()) == [0, 0, 4]
    assert contents(tmp_path / "there") == contents(here)


def test_a_push_waits_for_a_training_that_unpacks_there(here, tmp_path):
    import fcntl

    there = tmp_path / "there"
    there.mkdir()
    with open(there / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        phases = []

        def free(progress):
            phases.append(progress.phase)
            if progress.phase == "waits":
                fcntl.flock(lock, fcntl.LOCK_UN)

        found = datapush.push({"here": host()}, read_manifest(here), str(there), free, host)
    assert found["here"].files == 4
    assert phases.index("waits") < phases.index("sends")


def size_of(path):
    """0 of a folder, and of a file that has just been given its name."""
    try:
        return 0 if path.is_dir() else path.stat().st_size
    except FileNotFoundError:
        return 0


class Cut:
    """A link that breaks once the host has taken something of what it asked for."""

    def __init__(self, there):
        self.node, self.there = "here", there

    @contextmanager
    def stream(self, command, *, stdin):
        with LocalTransport("here").stream(command, stdin=stdin) as chunks:
            yield self.cut(chunks)

    def cut(self, chunks):
        for chunk in chunks:
            yield chunk
            if b'"go"' in chunk:
                while not any(size_of(path) for path in self.there.rglob("*")):
                    time.sleep(0.01)
                raise ConnectError("here", "the link broke")


def test_a_broken_link_is_dialled_again_while_the_push_gets_on(here, tmp_path):
    there, dialled = tmp_path / "there", []
    cut = ConnectedHost(Cut(there), sys.executable, None, "/nowhere")
    pushed, _ = push(here, there, {"here": cut}, lambda name: dialled.append(name) or host())
    assert dialled == ["here"]
    assert contents(there) == contents(here)
    assert pushed.files == 4


# ---- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda root: (root / "x").symlink_to("/etc/passwd"), "is a link out of"),
        (lambda root: (root / "x").symlink_to("/etc"), "is a link out of"),
        (lambda root: (root / "x").symlink_to(root / "gone"), "link to nothing"),
        (lambda root: (root / RAW / "x").symlink_to(root), "folder above it"),
        (lambda root: (root / "x").symlink_to(root / "x"), "is a circular link"),
        (lambda root: os.mkfifo(root / "x"), "neither a file nor a folder"),
    ],
    ids=["link outside", "folder outside", "dead link", "circle", "itself", "fifo"],
)
def test_what_is_no_plain_file_of_this_folder_is_refused(here, make, words):
    make(here)
    with pytest.raises(UsageError, match=words):
        read_manifest(here)


ODD_NAMES = [
    "Screenshot 2026-04-15 at 1.01.11\u202fAM.png",
    "a\u00a0b",
    "\u3000",
    "\U0001f469\u200d\U0001f4bb",
    "soft\u00adhyphen",
    os.fsdecode(b"caf\xe9"),
    "line\nbreak",
    "\x1b[2J",
    "-rf",
    "$(touch x)",
    "x" * 255,
]


def test_every_name_that_a_file_may_have_is_sent(here, tmp_path):
    for number, name in enumerate(ODD_NAMES):
        (here / RAW / name).write_bytes(b"%d" % number)
    there = tmp_path / "there"
    pushed, _ = push(here, there)
    assert isinstance(pushed, Pushed) and contents(there) == contents(here)
    (here / RAW / ODD_NAMES[5]).write_bytes(b"another")
    pushed, _ = push(here, there)
    assert pushed.files == 1 and contents(there) == contents(here)


def test_a_link_inside_is_sent_as_what_it_leads_to(here):
    (here / "again").symlink_to(here / RAW)
    assert {file.name for file in read_manifest(here).files} >= {"again/labels", f"{RAW}/labels"}


def test_an_empty_folder_and_one_that_is_not_there_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no files"):
        read_manifest(tmp_path)
    with pytest.raises(UsageError, match="not a folder here"):
        read_manifest(tmp_path / "none")


def test_a_folder_in_the_place_of_a_file_stays(here, tmp_path):
    (tmp_path / "there" / RAW / "labels").mkdir(parents=True)
    failed, _ = push(here, tmp_path / "there")
    assert "labels is no plain file" in failed.message


# ---- another user's folders and links -------------------------------------------------------------------------

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="makes folders of another user")


@pytest.fixture
def victim(tmp_path):
    """A folder of ours that an attacker wants to be written to, and that has to stay empty."""
    folder = tmp_path / "victim" / ".ssh"
    folder.mkdir(parents=True)
    yield folder
    assert list(folder.iterdir()) == []


def theirs(path):
    os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def plant(there, link, victim):
    """`link` in the data folder leads to the victim."""
    (there / link).parent.mkdir(parents=True, exist_ok=True)
    (there / link).symlink_to(victim)


@as_root
@pytest.mark.parametrize("link", ["MNIST", "MNIST/raw"])
def test_a_link_that_another_user_planted_in_the_folder_is_refused(here, tmp_path, victim, link):
    there = tmp_path / "sets" / "data"
    plant(there, link, victim)
    for path in (there, there / link):
        theirs(path)
    failed, _ = push(here, there)
    assert "belongs to another user" in failed.message
    assert str(failed).isprintable()


@as_root
@pytest.mark.parametrize("link", ["MNIST", "MNIST/raw"])
@pytest.mark.parametrize("mode", [0o700, 0o1777])
def test_so_is_one_in_a_folder_of_our_own(here, tmp_path, victim, link, mode):
    there = tmp_path / "data"
    plant(there, link, victim)
    theirs(there / link)
    for path in (there, (there / link).parent):
        path.chmod(mode)
    failed, _ = push(here, there)
    assert f"{there}/{link} is a link" in failed.message


@as_root
@pytest.mark.parametrize("planted", ["a link", "a folder", "an own link"])
def test_a_way_to_the_folder_in_which_another_user_has_a_say_is_refused(here, tmp_path, victim, planted):
    way = tmp_path / "way"
    if planted == "a folder":
        way.mkdir()
    else:
        way.symlink_to(victim.parent)
    if planted == "an own link":
        tmp_path.chmod(0o777)  # not ours for long: anybody may put another one there
    else:
        theirs(way)
    failed, _ = push(here, way / "data")
    assert ("every user may write" if planted == "an own link" else "belongs to another user") in failed.message
    assert not (way / "data").exists()


def test_a_folder_in_which_everybody_may_write_is_refused_at_any_depth(here, tmp_path):
    there = tmp_path / "data"
    (there / RAW).mkdir(parents=True)
    (there / RAW).chmod(0o777)
    failed, _ = push(here, there)
    assert f"{there}/{RAW} is a folder in which every user may write" in failed.message
    assert list((there / RAW).iterdir()) == []


@as_root
@pytest.mark.parametrize("name", ["images", ".orch-part"])
def test_a_file_of_another_user_in_the_place_of_ours_is_neither_believed_nor_written(here, tmp_path, name):
    there = tmp_path / "data"
    path = partial(here, there, f"{RAW}/images", b"")
    if name == "images":
        path = path.rename(path.with_name("images"))
        path.write_bytes((here / RAW / "images").read_bytes())
    theirs(path)
    before = path.read_bytes()
    failed, _ = push(here, there)
    assert "belongs to another user" in failed.message
    assert path.read_bytes() == before


def test_a_link_of_ours_on_the_way_to_the_folder_is_followed(here, tmp_path):
    disk = tmp_path / "large disk"
    disk.mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "data").symlink_to("../large disk")
    assert push(here, tmp_path / "home" / "data")[0].files == 4
    assert contents(disk) == contents(here)


def test_a_file_that_changes_on_its_way_does_not_arrive(here, tmp_path):
    there, manifest = tmp_path / "there", read_manifest(here)
    (here / RAW / "labels").write_bytes(b"x" * 1000)
    found = datapush.push({"here": host()}, manifest, str(there), lambda _: None, host)
    assert "changed while it was sent" in found["here"].message
    (here / RAW / "labels").write_bytes(b"x")
    with pytest.raises(UsageError, match="became shorter"):
        datapush.push({"here": host()}, manifest, str(there), lambda _: None, host)


@pytest.mark.parametrize("name", ["../out", "/etc/x", "a//b", "", ".", "a/../../b", ".orch-x.part", "a\0b"])
def test_the_host_itself_takes_no_name_that_leads_outside(here, tmp_path, name):
    manifest = read_manifest(here)
    bad = replace(manifest, files=(replace(manifest.files[0], name=name), *manifest.files[1:]))
    found = datapush.push({"here": host()}, bad, str(tmp_path / "there"), lambda _: None, host)
    assert "file name" in found["here"].message
    assert not (tmp_path / "there").exists()


class Liar:
    """A host that says what it likes."""

    node = "liar"

    def __init__(self, *words):
        self.words = words

    @contextmanager
    def stream(self, command, *, stdin):
        marker = marker_of(next(iter(stdin))).decode()
        yield (f"{marker}{json.dumps(word)}{marker}".encode() for word in self.words)


@pytest.mark.parametrize(
    "words",
    [
        [{"lacks": [[4, 0]]}],
        [{"lacks": [[-1, 0]]}],
        [{"lacks": [[1, 0], [0, 0]]}],
        [{"lacks": [[0, 10**12]]}],
        [{"lacks": "all"}],
        [{"looked": "much"}],
        [{"end": 7}],
        [{"end": {}}],
    ],
    ids=str,
)
def test_a_host_that_makes_no_sense_is_not_believed(here, words):
    liar = ConnectedHost(Liar(*words), "python3", None, "~/.orch")
    found = datapush.push({"liar": liar}, read_manifest(here), "~/data", lambda _: None, host)
    assert isinstance(found["liar"], ProbeError)


def test_a_host_that_breaks_off_is_not_dialled_for_ever(here):
    liar = ConnectedHost(Liar({"beat": 1}), "python3", None, "~/.orch")
    found = datapush.push({"liar": liar}, read_manifest(here), "~/data", lambda _: None, lambda _: liar)
    assert isinstance(found["liar"], ConnectError)


def test_the_folder_is_the_one_that_training_looks_in():
    assert data_folder(None) == DATA_FOLDER == parse_settings("mnist_lenet", {}).data_dir
    assert data_folder("birds") == f"{DATA_FOLDER}/birds"
    assert data_folder("/mnt/big") == "/mnt/big"
    for wrong in ("a/b", "..", "/", "~", "~/../x", "/a/../../b", "-x", "$(x)"):
        with pytest.raises(UsageError, match="--to"):
            data_folder(wrong)


def test_a_script_is_told_where_its_data_is_too():
    words = use_words("~/data/text")
    assert "--set 'data_dir=~/data/text'; a script of yours finds it in $ORCH_DATA/text" in words
    assert use_words("/mnt/data").endswith("finds it in /mnt/data")
    assert use_words("~/other").endswith("finds it in $HOME/other")


# ---- on a lab -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def person(tmp_path_factory):
    with lab(INVENTORY, quick=True) as pair:
        someone = Person(pair, tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("work"))
        someone.types("up", str(pair.inventory))
        yield someone


@pytest.mark.lab
def test_ctrl_c_in_the_middle_loses_nothing(person, here):
    """Also: both hosts at once, into the folder that training looks in; the second push sends the rest alone."""
    (here / RAW / "images").write_bytes(os.urandom(12 << 20))
    for node in ("alpha", "beta"):
        person.lab.link(node, "rate", "30Mbps")
    pushing = person.starts("data", "push", str(here))
    look = ["sh", "-c", f"stat -c %s data/{RAW}/.orch-*.part 2>/dev/null | sort -n | tail -1"]
    while int(person.lab.host_exec("beta", look, as_user=True, cwd="/").stdout or 0) < 1 << 20:
        assert pushing.poll() is None, pushing.stdout.read()
        time.sleep(0.05)
    pushing.send_signal(signal.SIGINT)
    said, _ = pushing.communicate(timeout=30)
    assert pushing.returncode == 130
    assert "resumes there" in said
    for node in ("alpha", "beta"):
        person.lab.link(node, "up")
    found = person.asks("data", "push", str(here))
    assert found["bytes"] == sum(file.size for file in read_manifest(here).files)
    assert found["nodes"]["beta"]["bytes"] < found["bytes"] - (1 << 20)
    for node in ("alpha", "beta"):
        there = person.lab.host_exec(node, ["sha256sum", f"/home/lab/data/{RAW}/images"]).stdout
        assert there.split()[0] == hashlib.sha256((here / RAW / "images").read_bytes()).hexdigest()
    assert person.asks("data", "push", str(here))["nodes"]["alpha"]["files"] == 0


@pytest.mark.lab
def test_a_disk_that_is_too_small_is_reported_before_anything_is_sent(person, here):
    person.lab.host_exec("alpha", ["mkdir", "-p", "/home/lab/small"], check=True)
    person.lab.host_exec(
        "alpha", ["mount", "-t", "tmpfs", "-o", "size=40m,mode=1777", "small", "/home/lab/small"], check=True
    )
    done = person.types("data", "push", str(here), "--to", "~/small", "--nodes", "alpha", exit_code=3)
    assert "needs 67 MiB more, and 40 MiB are free there" in done.stderr
    assert person.lab.host_exec("alpha", ["find", "/home/lab/small", "-type", "f", "-size", "+0"]).stdout == ""


# ---- listed and removed ---------------------------------------------------------------------------------------------


def sets_in(there, *, remove=False):
    return datapush.data_sets(host(), str(there), remove=remove).sets


def test_data_sets_that_came_are_listed_and_removed_and_nothing_else(here, tmp_path):
    there = tmp_path / "data"
    push(here, there)
    push(here, there / "birds")
    (there / "own.txt").write_text("mine")
    (there / RAW / "labels").write_bytes(b"changed")
    assert [(found.folder, found.files, found.bytes) for found in sets_in(there)] == [
        (str(there), 4, 3_001_001),
        (str(there / "birds"), 4, 3_001_001),
    ]
    gone = sets_in(there, remove=True)
    assert [(found.files, found.bytes, found.kept) for found in gone] == [(3, 3_000_001, 1), (4, 3_001_001, 0)]
    assert contents(there) == {"own.txt": b"mine", f"{RAW}/labels": b"changed"}
    assert not (there / "birds").exists() and sets_in(there) == ()


def test_a_second_data_set_in_a_folder_is_listed_with_the_first(here, tmp_path):
    there, more = tmp_path / "data", tmp_path / "more"
    more.mkdir()
    (more / "other").write_bytes(b"12345")
    push(here, there)
    push(more, there)
    (found,) = sets_in(there)
    assert (found.files, found.bytes) == (5, 3_001_006)


def test_a_list_that_leads_elsewhere_removes_nothing(here, tmp_path):
    there, victim = tmp_path / "data", tmp_path / "victim"
    victim.write_bytes(b"v")
    push(here, there)
    mark = there / datasets.MARK
    (there / "link").symlink_to(tmp_path)
    mark.write_text(json.dumps({"files": {"../victim": 1, "link/victim": 1, "/victim": 1}}))
    assert [found.kept for found in sets_in(there, remove=True)] == [1]
    assert victim.read_bytes() == b"v"
    mark.write_text("{")
    with pytest.raises(HostError, match="list: "):
        sets_in(there)


def test_nothing_is_removed_while_a_push_is_at_work(here, tmp_path):
    there = tmp_path / "data"
    push(here, there)
    with open(there / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(HostError, match="a push or a job is at work"):
            sets_in(there, remove=True)
    assert len(contents(there)) == 4
