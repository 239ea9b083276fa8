"""Collecting from a torch-free gang on this machine: real supervisors, real files, links that break on purpose."""

import fcntl
import json
import os
import shutil
import subprocess
from collections import namedtuple
from pathlib import Path

import pytest

from orchestrator.controller import Controller
from orchestrator.errors import ConnectError, OrchError
from orchestrator.hosts import Connections
from orchestrator.jobs import FilePiece, HeldError, claimed
from orchestrator.jobs import collect as collecting
from orchestrator.jobs.collect import collect
from orchestrator.jobs.follow import watch
from orchestrator.paths import Home, RunFolder
from orchestrator.record import write_record
from orchestrator.results.analyse import analyse
from orchestrator.store import Store
from tests.support.broken_link import breaking
from tests.support.local_job import Gang, gang
from tests.support.run_folders import two_hosts
from tests.support.wire import lies

SAYS = """
import os
import time
print("rank", os.environ["RANK"], flush=True)
with open(os.environ["ORCH_METRICS"], "a") as file:
    file.write('{"event":"start","schema":1}\\n' * 1000)
"""
TWO_PARTS = """
import os, time
print("first", flush=True)
while not os.path.exists("go_on"):
    time.sleep(0.02)
print("second", flush=True)
"""


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path / "runs" / "job")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A job of two hosts with three ranks that has ended."""
    with gang(tmp_path_factory.mktemp("original"), SAYS, ranks=(1, 2)) as job:
        job.launch()
        assert job.wait().state == "succeeded"
        yield job


@pytest.fixture
def ended(original, tmp_path):
    """The same, its hosts' folders for this test alone."""
    nodes = []
    for node in original.plan.nodes:
        workdir = tmp_path / Path(node.workdir).name
        shutil.copytree(original.folder(node.name), workdir / "jobs" / original.plan.job, ignore=fifos)
        nodes.append(node.model_copy(update={"workdir": str(workdir)}))
    return Gang(original.plan.model_copy(update={"nodes": tuple(nodes)}), b"")


def fifos(folder, names):
    return [name for name in names if Path(folder, name).is_fifo()]


def pull(job, run, hosts=None):
    return collect(job.plan, hosts or job.hosts, run)


def here(run):
    """Every collected file but our records, by name, hidden ones included."""
    records = ("agent.json", ".pulled.json")
    files = [path for path in run.nodes.rglob("*") if path.is_file() and path.name not in records]
    return {path.relative_to(run.nodes).as_posix(): path.read_bytes() for path in files}


def there(job):
    """The same files as the hosts have them."""
    found = {}
    for node in job.plan.nodes:
        names = ("rank-*/stdout.log", "rank-*/stderr.log", "rank-*/metrics.jsonl", "supervisor.log", "torchrun.log")
        for path in [path for name in names for path in job.folder(node.name).glob(name) if path.stat().st_size]:
            found[f"{node.name}/{path.relative_to(job.folder(node.name)).as_posix()}"] = path.read_bytes()
    return found


def beginnings(job, run):
    """Whether each file here is a beginning of its host's, the host's name for it in the list where it is whole."""
    whole = []
    for name, data in here(run).items():
        assert there(job)[name].startswith(data), name
        whole += [name] if there(job)[name] == data else []
    return whole


def cut(job, node, after):
    """The job's hosts, one of them behind a link that breaks."""
    return {**job.hosts, node: breaking(job.hosts[node], after)}


def test_every_file_arrives_whole_with_the_hosts_records(ended, run):
    collected = pull(ended, run)
    assert collected.errors == {}
    assert here(run) == there(ended)
    assert {"a/rank-0/stdout.log", "b/rank-1/metrics.jsonl", "b/rank-2/stdout.log"} <= here(run).keys()
    assert collected.new_bytes == sum(map(len, here(run).values()))
    assert {name: record["state"] for name, record in collected.agents.items()} == {"a": "succeeded", "b": "succeeded"}
    assert run.agent("a").is_file()


def test_a_second_collect_pulls_nothing_and_touches_nothing(ended, run):
    pull(ended, run)
    path = run.metrics("b", 2)
    before = path.stat().st_ino, path.stat().st_mtime_ns
    again = pull(ended, run)
    assert (again.new_bytes, again.errors) == (0, {})
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == before


def test_progress_counts_every_byte_of_every_host(ended, run):
    progress = []
    collected = collect(ended.plan, ended.hosts, run, lambda node, size: progress.append((node, size)))
    assert sum(size for _, size in progress) == collected.new_bytes
    assert {node for node, _ in progress} == {"a", "b"}


def test_what_a_running_job_has_written_comes_now_and_the_rest_later(tmp_path, run):
    with gang(tmp_path, TWO_PARTS, ranks=(1,)) as job:
        job.launch()
        wait_for_first_line(job)
        first = pull(job, run)
        assert first.agents["a"]["state"] == "running"
        assert (run.rank("a", 0) / "stdout.log").read_text() == "first\n"
        (job.folder("a") / "src" / "go_on").touch()
        job.wait()
        second = pull(job, run)
        assert (run.rank("a", 0) / "stdout.log").read_text() == "first\nsecond\n"
        assert here(run) == there(job)
        assert first.new_bytes + second.new_bytes == sum(map(len, here(run).values()))


def cut_short(path):
    with open(path, "r+b") as file:
        file.truncate(100)


def rewrite_longer(path):
    """In place, as a truncating writer does: the inode stays."""
    size = path.stat().st_size
    path.write_bytes(b"another beginning\n" + b"x" * (size + 5))


def replace_alike(path):
    """Another file of the same name, which only its inode distinguishes from the old one for the first 4 KiB."""
    other = path.with_name("other")
    other.write_bytes(path.read_bytes()[:-10] + b"y" * 5000)
    other.rename(path)


def rotate(path):
    path.rename(path.with_name("stdout.old"))
    path.write_bytes(b"a new day\n")


@pytest.mark.parametrize("change", [cut_short, rewrite_longer, replace_alike, rotate])
def test_a_file_that_restarted_on_its_host_is_pulled_anew_and_its_earlier_content_stays(ended, run, change):
    pull(ended, run)
    old = here(run)["a/rank-0/metrics.jsonl"]
    change(ended.folder("a") / "rank-0" / "metrics.jsonl")
    collected = pull(ended, run)
    assert collected.errors == {}
    assert here(run) == {**there(ended), "a/rank-0/metrics.jsonl.previous": old}
    (notice,) = collected.notices
    assert notice.startswith("a: rank-0/metrics.jsonl was cut, replaced or rotated")
    assert notice.endswith("it is pulled anew, and its earlier content is in metrics.jsonl.previous")


def test_nothing_that_was_pulled_is_lost_however_often_a_file_restarts(ended, run):
    path = ended.folder("a") / "rank-0" / "stdout.log"
    for text in ("first\n", "second one\n", "third\n", "4\n"):
        path.unlink()
        path.write_text(text)
        pull(ended, run)
    folder = run.rank("a", 0)
    texts = {found.name: found.read_text() for found in folder.glob("stdout.log*")}
    assert texts == {"stdout.log.previous": "first\nsecond one\nthird\n", "stdout.log": "4\n"}
    assert pull(ended, run).notices == []


def test_a_kill_while_earlier_content_is_kept_neither_doubles_nor_loses_it(ended, run, monkeypatch):
    path = ended.folder("a") / "rank-0" / "stdout.log"

    def printed(text):
        path.unlink()
        path.write_text(text)

    def killed(found, **_):
        if found.name.startswith("stdout.log"):
            raise KeyboardInterrupt
        os.unlink(found)

    for text in ("first\n", "second one\n"):
        printed(text)
        pull(ended, run)
    printed("last\n")
    monkeypatch.setattr(Path, "unlink", killed)
    with pytest.raises(KeyboardInterrupt):
        pull(ended, run)
    monkeypatch.undo()
    pull(ended, run)
    texts = {found.name: found.read_text() for found in run.rank("a", 0).glob("stdout.log*")}
    assert texts == {"stdout.log.previous": "first\nsecond one\n", "stdout.log": "last\n"}


def test_a_disk_without_room_for_the_earlier_content_changes_nothing_here(ended, run, monkeypatch):
    path = ended.folder("a") / "rank-0" / "stdout.log"
    for text in ("first\n", "second one\n"):
        path.unlink()
        path.write_text(text)
        pull(ended, run)
    path.unlink()
    path.write_text("third\n")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(1 << 40, 1 << 40, collecting.SPARE_BYTES + 1))
    with pytest.raises(OSError, match="No space left on device"):
        pull(ended, run)
    texts = {found.name: found.read_text() for found in run.rank("a", 0).glob("stdout.log*")}
    assert texts == {"stdout.log.previous": "first\n", "stdout.log": "second one\n"}


def test_a_host_that_restarts_its_files_without_end_is_stopped(ended, run):
    """Within one collect."""
    piece = {"file": "rank-0/stdout.log", "inode": 7, "offset": 0, "size": 4}
    endless = b"".join(b"MARKER" + json.dumps(piece).encode() + b"\nline" for _ in range(2 * collecting.MOST_RESTARTS))
    with pytest.raises(OrchError, match=r"a: restarted rank-0/stdout\.log more than \d+ times"):
        pull(ended, run, {"a": lies(endless)})
    previous = run.rank("a", 0) / "stdout.log.previous"
    assert previous.read_text() == "line" * collecting.MOST_RESTARTS


def test_a_file_changed_in_its_middle_is_pulled_anew_by_the_same_collect(ended, run):
    """Same inode, same beginning, longer: only the hash over all of it can show that."""
    pull(ended, run)
    path = ended.folder("a") / "rank-0" / "metrics.jsonl"
    old = path.read_bytes()
    with open(path, "r+b") as file:
        file.seek(10_000)
        file.write(b"#" * 50)
        file.seek(0, os.SEEK_END)
        file.write(b"{}\n")
    collected = pull(ended, run)
    assert collected.errors == {}
    assert "does not match the file on its host" in collected.notices[0]
    assert here(run) == {**there(ended), "a/rank-0/metrics.jsonl.previous": old + b"{}\n"}


@pytest.mark.parametrize("damage", [lambda b: b[:-9] + b"x" * 9, lambda b: b"x" + b[1:], lambda b: b + b"more"])
def test_a_file_damaged_here_is_healed_and_kept_beside(ended, run, damage):
    pull(ended, run)
    path = run.metrics("b", 1)
    path.write_bytes(damage(path.read_bytes()))
    damaged = path.read_bytes()
    collected = pull(ended, run)
    assert (collected.errors, len(collected.notices)) == ({}, 1)
    aside = {name: data for name, data in here(run).items() if name not in there(ended)}
    assert list(aside.values()) == [damaged]
    assert {**there(ended), **aside} == here(run)


def test_a_file_cut_here_goes_on_from_where_it_ends(ended, run):
    pull(ended, run)
    path = run.metrics("b", 1)
    os.truncate(path, 1000)
    collected = pull(ended, run)
    assert (collected.new_bytes, collected.notices) == (there(ended)["b/rank-1/metrics.jsonl"].__len__() - 1000, [])
    assert here(run) == there(ended)


@pytest.mark.parametrize("after", [0, 2000, 20_000, 40_000])
def test_a_link_that_breaks_keeps_every_byte_that_came_and_takes_nothing_from_the_others(ended, run, after):
    collected = pull(ended, run, cut(ended, "b", after))
    assert "the link broke" in str(collected.errors["b"])
    assert set(collected.errors) == {"b"}
    assert {name for name in there(ended) if name.startswith("a/")} <= set(beginnings(ended, run))
    came = sum(len(data) for name, data in here(run).items() if name.startswith("b/"))
    assert came >= after - 2500  # but for the host's record and the frames' first lines
    again = pull(ended, run)
    assert again.errors == {}
    assert here(run) == there(ended)
    assert collected.new_bytes + again.new_bytes == sum(map(len, here(run).values()))


def test_cuts_every_few_bytes_come_to_the_whole(ended, run):
    hosts = {name: breaking(host, 9_000) for name, host in ended.hosts.items()}
    new_bytes = 0
    for _ in range(20):
        collected = pull(ended, run, hosts)
        new_bytes += collected.new_bytes
        beginnings(ended, run)
        if not collected.errors:
            break
    assert here(run) == there(ended)
    assert new_bytes == sum(map(len, here(run).values()))


def test_a_folder_is_one_collects_at_a_time_and_the_other_hears_whose(run):
    said = rf"^process {os.getpid()} on .* since .* is collecting into"
    with claimed(run), pytest.raises(HeldError, match=said), claimed(run):
        pass
    with claimed(run):
        pass


def test_a_report_only_reads_a_folder_that_somebody_collects_into(tmp_path):
    home, run = Home(tmp_path / "home"), two_hosts(tmp_path / "runs" / "run")
    controller = Controller(Store(home), Connections(home))
    with claimed(run), pytest.raises(HeldError, match="is collecting into"):
        controller.report(run)  # there is nothing to read yet
    first = controller.report(run)
    run.report.unlink()
    with claimed(run):
        again = controller.report(run)
    assert again.summary == first.summary and first.notices == ()
    assert "this is the last collect's report. try again when it is done" in again.notices[0]
    assert not run.report.exists()


def test_a_lock_that_a_killed_collect_left_with_its_youngest_child_is_waited_for(run):
    run.root.mkdir(parents=True)
    with open(run.lock, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        child = subprocess.Popen(["sleep", "0.2"], pass_fds=[file.fileno()])
    with claimed(run):
        assert child.wait() == 0


def test_what_a_killed_collect_left_half_written_is_removed(ended, run):
    pull(ended, run)
    half = [run.root / ".plan.json.abcd1234", run.node("a") / ".agent.json.zyxw9876"]
    for path in half:
        path.write_text("half")
    with claimed(run):
        assert not [path for path in half if path.exists()]
        assert run.lock.exists()
    assert pull(ended, run).new_bytes == 0


@pytest.mark.parametrize("note", [b"", b"{", b"[1]", b'{"rank-0/metrics.jsonl": "x"}', None])
def test_without_its_note_a_folder_is_known_by_what_it_holds(ended, run, note):
    pull(ended, run)
    path = run.node("a") / ".pulled.json"
    path.unlink() if note is None else path.write_bytes(note)
    assert (pull(ended, run).new_bytes, here(run)) == (0, there(ended))


def test_a_host_cleaned_since_takes_nothing_away_from_what_was_collected(ended, run):
    pull(ended, run)
    before, record = here(run), run.agent("a").read_text()
    shutil.rmtree(ended.folder("a"))
    pull(ended, run)
    assert here(run) == before
    assert run.agent("a").read_text() == record


def test_a_host_that_is_not_asked_has_no_part_in_it(ended, run):
    collected = pull(ended, run, {"a": ended.hosts["a"]})
    assert set(collected.agents) == {"a"}
    assert not run.node("b").exists()


def test_a_link_in_place_of_a_log_is_not_followed(ended, run, tmp_path):
    (tmp_path / "secret").write_text("secret")
    log = ended.folder("a") / "rank-0" / "stdout.log"
    log.unlink()
    log.symlink_to(tmp_path / "secret")
    pull(ended, run)
    assert "a/rank-0/stdout.log" not in here(run)
    assert not [name for name, data in here(run).items() if b"secret" in data]


def wait_for_first_line(job):
    for _, item in watch(job.plan, job.hosts, offsets={}, follow=True):
        if isinstance(item, FilePiece) and b"first" in item.data:
            return


def test_who_only_looks_gets_every_byte_though_the_host_hangs_up_on_a_pager_at_rest(ended):
    log = ended.folder("a") / "rank-0" / "stdout.log"
    log.write_bytes(os.urandom(3 << 20))
    dialled = []

    def look(after):
        def again(name):
            dialled.append(name)
            return breaking(ended.hosts[name], after)

        hosts = {"a": breaking(ended.hosts["a"], after)}
        items = [item for _, item in watch(ended.plan, hosts, offsets={}, follow=False, reconnect=again)]
        came = b"".join(item.data for item in items if isinstance(item, FilePiece) and item.file == "rank-0/stdout.log")
        return came, [item for item in items if isinstance(item, ConnectError)]

    assert look(1 << 20) == (log.read_bytes(), [])
    assert len(dialled) == 3
    dialled.clear()
    came, [error] = look(100)  # a link on which nothing gets on is not dialled for ever
    assert came == b"" and not dialled and "broke" in str(error)


# ---- logs that would fill the disk here -----------------------------------------------------------------------


def test_no_more_of_a_log_is_collected_than_asked_for_and_what_stayed_is_reported(ended, run):
    log = ended.folder("a") / "rank-0" / "stdout.log"
    log.write_bytes(b"0123456789" * 1000)
    hosts = ended.hosts
    collected = collect(ended.plan, hosts, run, limit_bytes=4000)
    assert (run.rank("a", 0) / "stdout.log").read_bytes() == log.read_bytes()[:4000]
    [words] = [words for words in collected.notices if "stdout.log" in words]
    assert words == "a: the last 5.9KiB of rank-0/stdout.log stayed on the host: --max-log brings more"
    write_record(run.plan, ended.plan)
    assert "a: the last 5.9KiB of rank-0/stdout.log were not collected (--max-log)." in analyse(run).missing
    assert collect(ended.plan, hosts, run).notices == []  # the rest comes behind it
    assert (run.rank("a", 0) / "stdout.log").read_bytes() == log.read_bytes()
    assert not [words for words in analyse(run).missing if "--max-log" in words]


def test_before_the_disk_here_is_full_collect_ends_in_words(ended, run, monkeypatch):
    log = ended.folder("a") / "rank-0" / "stdout.log"
    log.write_bytes(b"x" * (9 << 20))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1 << 40, 1 << 40, 15 << 20))
    with pytest.raises(OSError, match="No space left on device"):
        pull(ended, run)
    assert 0 < (run.rank("a", 0) / "stdout.log").stat().st_size < 9 << 20
    monkeypatch.undo()
    pull(ended, run)
    assert (run.rank("a", 0) / "stdout.log").read_bytes() == log.read_bytes()


def test_a_sparse_log_of_a_tebibyte_brings_no_more_than_its_limit(ended, run):
    """As of a program that goes on writing at its old place after somebody has emptied its log."""
    path = ended.folder("a") / "rank-0" / "stdout.log"
    with open(path, "r+b") as file:
        file.truncate(0)
        file.seek(1 << 40)
        file.write(b"after the hole\n")
    collected = collect(ended.plan, ended.hosts, run, limit_bytes=1 << 20)
    assert collected.errors == {}
    assert "a: the last 1024.0GiB of rank-0/stdout.log stayed on the host: --max-log brings more" in collected.notices
    assert (run.rank("a", 0) / "stdout.log").stat().st_size == 1 << 20
