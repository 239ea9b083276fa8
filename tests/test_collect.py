"""Collecting from a torch-free gang on this machine: real supervisors, real files, links that break on purpose."""

import contextlib
import shutil
from dataclasses import replace

import pytest
from gang import gang

from orchestrator.collect import collect
from orchestrator.errors import ConnectError
from orchestrator.paths import RunFolder

SAYS = """
import os
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


@pytest.fixture
def ended(tmp_path):
    """A job of two hosts with three ranks that has ended."""
    with gang(tmp_path, SAYS, ranks=(1, 2)) as job:
        job.launch()
        assert job.wait().state == "succeeded"
        yield job


def pull(job, run, hosts=None):
    return collect(job.plan, hosts or job.hosts, run)


def here(run):
    """Every collected file but the records, by name, hidden ones included."""
    files = [path for path in run.nodes.rglob("*") if path.is_file() and path.name != "agent.json"]
    return {path.relative_to(run.nodes).as_posix(): path.read_bytes() for path in files}


def there(job):
    """The same files as the hosts have them."""
    found = {}
    for node in job.plan.nodes:
        names = ("rank-*/stdout.log", "rank-*/stderr.log", "rank-*/metrics.jsonl", "supervisor.log", "torchrun.log")
        for path in [path for name in names for path in job.folder(node.name).glob(name) if path.stat().st_size]:
            found[f"{node.name}/{path.relative_to(job.folder(node.name)).as_posix()}"] = path.read_bytes()
    return found


class Breaking:
    """A transport whose stream breaks after so many bytes."""

    def __init__(self, transport, after):
        self._transport, self._after = transport, after

    @property
    def node(self):
        return self._transport.node

    @contextlib.contextmanager
    def stream(self, command, *, stdin=b""):
        with self._transport.stream(command, stdin=stdin) as chunks:
            yield self._cut(chunks)

    def _cut(self, chunks):
        left = self._after
        for chunk in chunks:
            yield chunk[:left]
            left -= len(chunk)
            if left <= 0:
                raise ConnectError(self.node, "the link broke")


def breaking(job, node, after):
    hosts = dict(job.hosts)
    hosts[node] = replace(hosts[node], transport=Breaking(hosts[node].transport, after))
    return hosts


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


def test_progress_tells_every_byte_of_every_host(ended, run):
    told = []
    collected = collect(ended.plan, ended.hosts, run, lambda node, size: told.append((node, size)))
    assert sum(size for _, size in told) == collected.new_bytes
    assert {node for node, _ in told} == {"a", "b"}


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


def test_a_file_that_was_cut_on_its_host_comes_again_whole(ended, run):
    pull(ended, run)
    (ended.folder("a") / "rank-0" / "metrics.jsonl").write_text("short\n")
    collected = pull(ended, run)
    assert (collected.new_bytes, collected.errors) == (len("short\n"), {})
    assert run.metrics("a", 0).read_text() == "short\n"


@pytest.mark.parametrize("longer", [0, 5])
def test_a_file_that_was_replaced_on_its_host_is_noticed_and_comes_with_the_next_collect(ended, run, longer):
    pull(ended, run)
    path = ended.folder("a") / "rank-0" / "metrics.jsonl"
    path.write_text("x" * (path.stat().st_size + longer))
    first = pull(ended, run)
    assert "a: arrived damaged: rank-0/metrics.jsonl: collect again" in str(first.errors["a"])
    assert not run.metrics("a", 0).exists()
    assert pull(ended, run).errors == {}
    assert here(run) == there(ended)


@pytest.mark.parametrize("damage", [lambda b: b[:-9] + b"x" * 9, lambda b: b[:100], lambda b: b + b"more"])
def test_a_file_damaged_here_is_healed(ended, run, damage):
    pull(ended, run)
    path = run.metrics("b", 1)
    path.write_bytes(damage(path.read_bytes()))
    pull(ended, run)
    assert pull(ended, run).errors == {}
    assert here(run) == there(ended)


@pytest.mark.parametrize("after", [0, 100, 20_000, 40_000])
def test_a_link_that_breaks_leaves_no_half_file_and_takes_nothing_from_the_others(ended, run, after):
    collected = pull(ended, run, breaking(ended, "b", after))
    assert "the link broke" in str(collected.errors["b"])
    assert set(collected.errors) == {"b"}
    assert here(run) == {name: data for name, data in there(ended).items() if name.startswith("a/")}
    assert pull(ended, run).errors == {}
    assert here(run) == there(ended)


def test_a_link_that_breaks_leaves_what_was_there_before(ended, run):
    pull(ended, run)
    before = here(run)
    with open(ended.folder("b") / "rank-1" / "metrics.jsonl", "a") as file:
        file.write("{}\n" * 50_000)
    assert set(pull(ended, run, breaking(ended, "b", 100_000)).errors) == {"b"}
    assert here(run) == before


def test_a_part_left_by_a_crash_is_neither_kept_nor_trusted(ended, run):
    pull(ended, run)
    path = run.metrics("a", 0)
    path.unlink()
    path.with_name(".metrics.jsonl.part").write_text("half of something")
    assert pull(ended, run).errors == {}
    assert here(run) == there(ended)


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
    from orchestrator import job as jobs
    from orchestrator.frames import Piece

    for _, item in jobs.watch(job.plan, job.hosts, offsets={}, follow=True):
        if isinstance(item, Piece) and b"first" in item.data:
            return
