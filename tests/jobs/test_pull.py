"""Bringing home what a job wrote, from a torch-free gang on this machine: links that break, hosts that lie."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import threading
from collections import namedtuple

import pytest

from orchestrator.errors import HostError, OrchError, ProbeError
from orchestrator.files import write_atomic
from orchestrator.jobs import (
    Left,
    Output,
    OutputListing,
    Pulled,
    Whole,
    checkpoint_globs,
    is_here,
    list_outputs,
    matching,
    pull,
    read_files,
    read_frames,
    without_copies,
)
from orchestrator.jobs import pull as pulling
from orchestrator.paths import RunFolder
from orchestrator.transport import ConnectedHost, shipped_sources
from tests.support.broken_link import Breaking
from tests.support.job_states import PLAN
from tests.support.local_job import gang
from tests.support.wire import lies

WRITES = """
import os, sys
rank = os.environ["RANK"]
open("snapshot.pt", "wb").write(rank.encode() * 3_000_000)
os.makedirs("out/deep")
open("out/deep/best.pt", "wb").write(b"best of " + rank.encode())
open("empty", "w").close()
open("settings.yaml", "a").write("changed: by the script")
open(os.environ["ORCH_CHECKPOINTS"] + "/step-000000500.pt", "wb").write(b"weights" * 1000)
open(os.environ["ORCH_CHECKPOINTS"] + "/.step-000000900.pt.part", "wb").write(b"half")
os.makedirs("__pycache__")
open("__pycache__/train.cpython-311.pyc", "wb").write(b"compiled")
os.symlink("/etc/passwd", "linked")
os.symlink("/etc", "linked_folder")
os.mkfifo("fifo")
"""
WRITTEN = ["checkpoints/step-000000500.pt", "src/empty", "src/out/deep/best.pt", "src/settings.yaml"]
WRITTEN += ["src/snapshot.pt"]


@pytest.fixture(scope="module")
def wrote(tmp_path_factory):
    """A job of two hosts whose script has written and ended."""
    folder = tmp_path_factory.mktemp("wrote")
    prepared = folder / "code"
    with gang(folder, WRITES, ranks=(1, 1)) as job:
        from orchestrator.planning import pack_folder

        (prepared / "settings.yaml").write_text("as: shipped\n")
        (prepared / "untouched.yaml").write_text("as: shipped\n")
        code, job.blob = pack_folder(prepared)
        job.plan = job.plan.model_copy(update={"code": code})
        job.launch()
        assert job.wait().state == "succeeded"
        yield job


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "runs" / "job")
    run.root.mkdir(parents=True)
    return run


def listed(job):
    found = list_outputs(job.hosts, {name: [job.plan.job] for name in job.hosts})
    return {name: listings[job.plan.job] for name, listings in found.items()}


def bring(job, run, names=None, hosts=None, reopen=None):
    """names: of host a alone; none means all of both."""
    wanted = {name: listing.files for name, listing in listed(job).items()}
    if names is not None:
        wanted = {"a": [output for output in wanted["a"] if output.name in names]}
    seen = []
    reopen = reopen or (lambda name: job.hosts[name])
    return pulling.pull(job.plan, hosts or job.hosts, run, wanted, seen.append, reopen), seen


def here(run, node):
    files = [path for path in run.files(node).rglob("*") if path.is_file()]
    return {path.relative_to(run.files(node)).as_posix(): path.read_bytes() for path in files}


def there(job, node, names):
    return {name: (job.folder(node) / name).read_bytes() for name in names}


# ---- what comes -----------------------------------------------------------------------------------------------


def test_every_new_or_changed_file_comes_from_every_host_and_nothing_else(wrote, run):
    found, seen = bring(wrote, run)
    for node in ("a", "b"):
        assert here(run, node) == there(wrote, node, WRITTEN)
    assert here(run, "a")["src/snapshot.pt"] != here(run, "b")["src/snapshot.pt"]
    assert {node: pulled.files for node, pulled in found.items()} == {"a": 5, "b": 5}
    assert [(last.phase, last.here_bytes == last.total_bytes) for last in seen if last.phase == "done"] == [
        ("done", True)
    ] * 2
    assert listed(wrote)["a"].skipped == {"links": 2, "special": 1}


def test_what_is_here_does_not_come_again_and_what_changed_takes_its_place(wrote, run):
    bring(wrote, run)
    again, _ = bring(wrote, run)
    assert again["a"] == Pulled(0, 0, {})
    path = wrote.folder("a") / "src" / "out" / "deep" / "best.pt"
    old = path.read_bytes()
    [stale] = [o for o in listed(wrote)["a"].files if o.name == "src/out/deep/best.pt"]
    try:
        path.write_bytes(b"better than before")
        write_atomic(pulling.partial_path(run, "a", stale), b"half")
        found, _ = bring(wrote, run)
        assert found["a"] == Pulled(1, 18, {})
        assert here(run, "a")["src/out/deep/best.pt"] == b"better than before"
        assert not run.incoming("a").exists()
    finally:
        path.write_bytes(old)


def test_one_who_reads_the_run_folder_never_meets_half_a_file(wrote, run):
    """Until a file is whole it has another name: the link breaks in the middle of it."""
    hosts = {"a": ConnectedHost(Breaking(wrote.hosts["a"].transport, 1_000_000), sys.executable, None, "/nowhere")}
    hosts["a"] = at_work(wrote, hosts["a"])

    def gone(name):
        raise ProbeError(name, "is gone")

    found, _ = bring(wrote, run, ["src/snapshot.pt"], hosts, gone)
    assert isinstance(found["a"], HostError)
    assert here(run, "a") == {}
    [partial] = run.incoming("a").iterdir()
    assert 0 < partial.stat().st_size < 3_000_000
    bring(wrote, run, ["src/empty"])  # of another file, and the part stays
    (run.files("a") / "src/empty").unlink()
    rest, _ = bring(wrote, run, ["src/snapshot.pt"])
    assert rest["a"].bytes == 3_000_000 - 1_000_000 + overhead(rest["a"].bytes)
    assert here(run, "a") == there(wrote, "a", ["src/snapshot.pt"])
    assert not run.incoming("a").exists()


def overhead(came_bytes):
    """Of what came before the link broke, the frames' own lines were no bytes of the file."""
    spent = came_bytes - 2_000_000
    assert 0 < spent < 2000
    return spent


def at_work(job, host):
    return ConnectedHost(host.transport, host.python, None, job.hosts["a"].workdir)


def test_a_broken_link_is_dialled_again_while_the_pull_gets_on(wrote, run):
    dialled = []

    def again(name):
        dialled.append(name)
        return at_work(wrote, ConnectedHost(Breaking(wrote.hosts[name].transport, 1_000_000), sys.executable, None, ""))

    found, _ = bring(wrote, run, ["src/snapshot.pt"], {"a": again("a")}, again)
    assert len(dialled) == 4  # 3 MB, and what the frames take
    assert found["a"] == Pulled(1, 3_000_000, {})
    assert here(run, "a") == there(wrote, "a", ["src/snapshot.pt"])


def test_what_came_before_of_another_state_is_not_taken_for_this_one(wrote, run):
    [output] = [o for o in listed(wrote)["a"].files if o.name == "src/snapshot.pt"]
    partial = pulling.partial_path(run, "a", output)
    write_atomic(partial, b"0" * 999 + b"damaged on this disk")
    found, _ = bring(wrote, run, ["src/snapshot.pt"])
    assert found["a"].files == 1  # its hash showed it, and it came again
    assert here(run, "a") == there(wrote, "a", ["src/snapshot.pt"])


def test_a_file_that_never_rests_is_left_and_reported(wrote, run, monkeypatch):
    path = wrote.folder("a") / "src" / "busy.log"
    path.write_bytes(b"0" * 100)
    try:
        wanted = {"a": [o for o in listed(wrote)["a"].files if o.name == "src/busy.log"]}
        host = wrote.hosts["a"]
        monkeypatch.setattr("orchestrator.transport.ask.shipped_sources", lambda: meddling_with(path))
        found = pulling.pull(wrote.plan, {"a": host}, run, wanted, lambda _: None, lambda name: host)
        assert "changes while it is read" in found["a"].left["src/busy.log"]
        assert here(run, "a") == {}
    finally:
        path.unlink()


def meddling_with(path):
    """What is sent to a host on which the file is written all the time: each look of the sender at it appends to it."""
    sources, name, meddle = shipped_sources(), "orch_remote.sender", "piece = os.pread(handle"
    assert meddle in sources[name]
    append = f"open({str(path)!r}, 'ab').write(b'more')\n        "
    return sources | {name: sources[name].replace(meddle, append + meddle)}


# ---- a file that does not come holds up no other --------------------------------------------------------------


@pytest.fixture
def written(wrote):
    """Makes files of host a's script that are gone after the test: name -> how it is written."""
    made = []

    def make(**files):
        for name, write in files.items():
            path = wrote.folder("a") / "src" / name
            made.append(path)
            with open(path, "wb") as file:
                write(file)
        return {"a": [o for o in listed(wrote)["a"].files if o.name.removeprefix("src/") in files]}

    yield make
    for path in made:
        path.unlink(missing_ok=True)


def fetch(job, run, wanted, reopen=None):
    host, seen = job.hosts["a"], []
    found = pulling.pull(job.plan, {"a": host}, run, wanted, seen.append, reopen or (lambda name: host))
    return found["a"], seen


def test_one_that_grows_and_one_that_vanishes_are_left_and_named_and_the_rest_comes(wrote, run, written):
    wanted = written(
        a_grows=lambda file: file.write(bytes(range(256)) * 200_000),
        b_gone=lambda file: file.write(b"x"),
        model_pt=lambda file: file.write(b"weights"),
        z_large=lambda file: file.write(b"z" * (80 << 20)),
    )
    (wrote.folder("a") / "src/b_gone").unlink()
    over = threading.Event()

    def grow():
        with open(wrote.folder("a") / "src/a_grows", "ab", buffering=0) as file:
            while not over.wait(0.005):
                file.write(b"more")

    growing = threading.Thread(target=grow)
    growing.start()
    try:
        found, _ = fetch(wrote, run, wanted)
    finally:
        over.set()
        growing.join()
    assert sorted(here(run, "a")) == ["src/model_pt", "src/z_large"]
    assert found.left == {
        "src/a_grows": "changes while it is read: pull again when the job is at rest",
        "src/b_gone": "is gone",
    }


def test_a_file_at_which_the_link_breaks_again_and_again_is_left_and_the_rest_comes(wrote, run, written, monkeypatch):
    wanted = written(bad=lambda file: file.write(b"x"), model_pt=lambda file: file.write(b"weights"))
    sources, name = shipped_sources(), "orch_remote.sender"
    dies = sources[name].replace(
        "    name, size, mtime_ns", "    row[0] == 'src/bad' and os._exit(1)\n    name, size, mtime_ns"
    )
    assert dies != sources[name]
    monkeypatch.setattr("orchestrator.transport.ask.shipped_sources", lambda: sources | {name: dies})
    found, _ = fetch(wrote, run, wanted)
    assert list(here(run, "a")) == ["src/model_pt"]
    assert list(found.left) == ["src/bad"] and "did not come" in found.left["src/bad"]


# ---- patterns -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("globs", "means"),
    [
        ([], WRITTEN),
        (["snapshot.pt"], ["src/snapshot.pt"]),
        (["src/snapshot.pt"], ["src/snapshot.pt"]),
        (["*.pt"], ["checkpoints/step-000000500.pt", "src/out/deep/best.pt", "src/snapshot.pt"]),
        (["best.pt"], ["src/out/deep/best.pt"]),
        (["out/**/best.pt", "empty"], ["src/empty", "src/out/deep/best.pt"]),
        (["checkpoints"], ["checkpoints/step-000000500.pt"]),
        (["./out/"], ["src/out/deep/best.pt"]),
        (["nothing"], []),
    ],
)
def test_a_pattern_means_what_a_person_thinks_it_does(globs, means):
    files = [Output(name, 1, 1, 1) for name in WRITTEN]
    assert [output.name for output in matching(files, globs)] == [name for name in WRITTEN if name in means]


def test_the_checkpoints_of_a_job_are_known_wherever_its_settings_put_them(wrote, tmp_path, run):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("step-000000100.pt", "unrelated.pt"):
        (elsewhere / name).write_bytes(b"w")
    node = wrote.folder("a") / "node.json"
    kept = node.read_text()
    try:
        node.write_text(json.dumps({**json.loads(kept), "settings": {"checkpoint_dir": str(elsewhere)}}))
        names = {o.name for o in matching(listed(wrote)["a"].files, checkpoint_globs(wrote.plan))}
        assert names == {"checkpoints/step-000000500.pt", "checkpoint_dir/step-000000100.pt"}
        bring(wrote, run, ["checkpoint_dir/step-000000100.pt"])
        assert here(run, "a") == {"checkpoint_dir/step-000000100.pt": b"w"}
    finally:
        node.write_text(kept)
    own = wrote.plan.model_copy(update={"settings": {"checkpoint_dir": "out/deep"}})
    assert [o.name for o in matching(listed(wrote)["a"].files, checkpoint_globs(own))] == [
        "checkpoints/step-000000500.pt",
        "src/out/deep/best.pt",
    ]


# ---- who is not trusted ---------------------------------------------------------------------------------------


ODD_NAMES = ["../x", "src/../../x", "/etc/passwd", "src", "src/", "src//x", "src/./x", "logs/x", "src/a\x1b[2J", ""]
ODD_NAMES += ["src/" + "x" * 300, "src/" + "x/" * 70 + "x", "src/\ud800", "src/\u202ex", 7, None, ["src/x"]]


@pytest.mark.parametrize("name", ODD_NAMES, ids=repr)
def test_a_listing_with_a_name_that_leads_elsewhere_is_not_believed(name):
    row = json.dumps({"job": "j", "files": [[name, 1, 1, 1]]}).encode()
    found = list_outputs({"a": lies(b"MARKER" + row + b"MARKER")}, {"a": ["j"]})
    assert "makes no sense" in str(found["a"])
    assert str(found["a"]).isprintable()


@pytest.mark.parametrize("numbers", [[1], [-1, 1, 1], [1 << 60, 1, 1], [1.5, 1, 1], [True, 1, 1], ["1"] * 3, [1] * 4])
def test_nor_one_with_impossible_figures(numbers):
    row = json.dumps({"job": "j", "files": [["src/x", *numbers]]}).encode()
    assert "makes no sense" in str(list_outputs({"a": lies(b"MARKER" + row + b"MARKER")}, {"a": ["j"]})["a"])


def test_nor_one_that_never_ends(monkeypatch):
    monkeypatch.setattr(pull, "MAX_FILES", 100)
    rows = json.dumps({"job": "j", "files": [[f"src/{i}", 1, 1, 1] for i in range(101)]}).encode()
    assert "makes no sense" in str(list_outputs({"a": lies(b"MARKER" + rows + b"MARKER")}, {"a": ["j"]})["a"])


def frames(*items, marker=b"MARKER"):
    lines = [(marker + json.dumps(item).encode() + b"\n", item) for item in items]
    return b"".join(line + (b"x" * item.get("size", 0)) * ("file" in item) for line, item in lines)


PIECE = {"file": "src/x", "inode": 1, "offset": 0, "size": 4}
SOUND = {"whole": "src/x", "size": 4, "mtime_ns": 1, "sha256": hashlib.sha256(b"xxxx").hexdigest()}
WHOLE = {"whole": "src/x", "size": 4, "mtime_ns": 1, "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ((PIECE | {"file": "../x"},), "sent an invalid frame"),
        ((PIECE | {"file": "src/other"},), "sent an invalid frame"),
        ((PIECE | {"offset": 7},), "where 0 was due"),
        ((PIECE | {"size": 0},), "sent an invalid frame"),
        ((WHOLE | {"whole": "src/other"},), "sent an invalid frame"),
        ((PIECE, SOUND | {"mtime_ns": 1 << 70}), "sent an invalid frame"),
        ((PIECE, SOUND | {"mtime_ns": -1}), "sent an invalid frame"),
        ((PIECE, WHOLE, {"end": {}}), "arrived damaged twice"),
        (({"end": {}},), "arrived damaged twice"),
        ((PIECE,), "ended too early"),
    ],
)
def test_a_host_that_sends_what_nobody_asked_for_writes_nothing(wrote, run, sent, words):
    wanted = {"a": [Output("src/x", 4, 1, 1)]}
    host = lies(*[frames(*sent)] * 4)
    found = pulling.pull(wrote.plan, {"a": host}, run, wanted, lambda _: None, lambda name: host)
    assert words in str(found["a"])
    assert here(run, "a") == {}
    assert not (run.root.parent / "x").exists()


def test_frames_about_a_file_are_read_only_where_it_was_asked_for():
    stream = [frames(WHOLE, {"left": "src/x", "why": "\x1b[2Jis\ngone"}, marker=b"")]
    assert list(read_files("a", stream, frozenset({"src/x"}))) == [
        Whole("src/x", 4, 1, "0" * 64),
        Left("src/x", "is gone"),
    ]
    with pytest.raises(ProbeError):
        list(read_frames("a", stream, frozenset({0})))


def test_a_link_that_takes_a_folders_place_on_the_host_leads_nowhere(wrote, run, tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "best.pt").write_bytes(b"canary")
    wanted = {"a": [o for o in listed(wrote)["a"].files if o.name == "src/out/deep/best.pt"]}
    deep = wrote.folder("a") / "src" / "out" / "deep"
    deep.rename(deep.with_name("moved"))
    deep.symlink_to(secret)
    try:
        found = pulling.pull(wrote.plan, wrote.hosts, run, wanted, lambda _: None, lambda name: wrote.hosts[name])
    finally:
        deep.unlink()
        deep.with_name("moved").rename(deep)
    assert "cannot be read" in found["a"].left["src/out/deep/best.pt"]
    assert here(run, "a") == {}


def test_a_link_in_the_run_folder_is_not_followed_either(wrote, run, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run.files("a") / "src").mkdir(parents=True)
    (run.files("a") / "src" / "out").symlink_to(elsewhere)
    found, _ = bring(wrote, run, ["src/out/deep/best.pt", "src/empty"])
    assert "in its place" in found["a"].left["src/out/deep/best.pt"]
    assert list(elsewhere.iterdir()) == []
    assert here(run, "a") == {"src/empty": b""}


def test_a_disk_that_is_too_small_for_all_files_is_reported_before_anything_comes(wrote, run, monkeypatch):
    room = max(output.size for output in listed(wrote)["a"].files)  # each of them would fit
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 0, pulling.SPARE_BYTES + room))
    with pytest.raises(OrchError, match=r"free there; the largest file is src/snapshot.pt of a \(2.9MiB\)"):
        bring(wrote, run, WRITTEN)
    assert not run.nodes.exists()
    bring(wrote, run, ["src/settings.yaml"])  # for this one there is room
    assert is_here(run, "a", next(o for o in listed(wrote)["a"].files if o.name == "src/settings.yaml"))


def test_a_file_that_is_larger_than_the_disk_stays_and_the_others_come(wrote, run):
    with open(wrote.folder("a") / "src" / "sparse", "wb") as file:
        file.truncate(1 << 43)
    found, _ = bring(wrote, run, ["src/sparse", "src/settings.yaml"])
    assert list(found["a"].left) == ["src/sparse"]
    assert re.fullmatch(r"8.0TiB do not fit on the disk here \(.+ free\)", found["a"].left["src/sparse"])
    assert list(here(run, "a")) == ["src/settings.yaml"]


def test_copies_of_checkpoints_that_the_master_has_are_not_brought_twice():
    plan = PLAN.model_copy(update={"checkpoints": ("a", "b")})
    names = ["checkpoints/step-000000005.pt", "checkpoints/step-000000010.pt", "src/step-000000005.pt"]
    listing = OutputListing(tuple(Output(name, 9, 1, 1) for name in names))
    elsewhere = OutputListing((Output("checkpoint_dir/step-000000010.pt", 9, 1, 1),))
    for master, kept in ((listing, names[2:]), (elsewhere, [names[0], names[2]]), (OutputListing(), names)):
        found = without_copies(plan, {"a": master, "b": listing, "c": listing})
        assert [output.name for output in found["b"].files] == kept
        assert (found["a"], found["c"]) == (master, listing)
    assert without_copies(plan, {"b": listing}) == {"b": listing}  # the master gives no answer
