"""What a link that fell silent leaves on a host: programs that end by themselves, and those that `reap` finds."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.remote import belongings, processes
from orchestrator.remote.layout import WorkFolder, write_json
from orchestrator.transport import ConnectedHost, LocalTransport, shell
from orchestrator.transport import ask as call
from orchestrator.transport.ask import ask

WHOLE = {"limit_bytes": None, "times": False}


@contextlib.contextmanager
def program(name, stdin, **options):
    """As sshd starts it; its input stays open, as that of a connection that says nothing more."""
    line = shell.python_on_stdin(sys.executable, f"orch-{name}")
    pipe = subprocess.PIPE
    with subprocess.Popen(["sh", "-c", line], stdin=pipe, stdout=pipe, stderr=pipe, **options) as running:
        try:
            running.stdin.write(stdin)
            running.stdin.flush()
            yield running
        finally:
            running.kill()


def ended_by_alarm(running):
    return running.wait(60) in (-signal.SIGALRM, 128 + signal.SIGALRM)


def request_of(name, request, limit_s=1):
    here = ConnectedHost(LocalTransport("here"), sys.executable, None, ".")
    return call.program_input(here, name, request, "MARK", b"", limit_s)


def test_a_program_that_never_comes_whole_ends(monkeypatch):
    monkeypatch.setattr(shell, "ARRIVE_S", 1)
    for part in (0, 3, 5000):
        with program("control", request_of("control", {"action": "status"})[:part]) as running:
            assert ended_by_alarm(running)


def test_a_program_with_a_deadline_ends_after_it(tmp_path):
    request = {"action": "prepare", "workdir": str(tmp_path), "node": {"job": "j"}, "plan": {}, "blob_bytes": 9}
    with program("prepare", request_of("prepare", request)) as running:  # waits for code that never comes
        assert ended_by_alarm(running)
    monkeypatched = ConnectedHost(LocalTransport("here"), sys.executable, None, str(tmp_path))
    assert ask(monkeypatched, "control", {"action": "status", "workdir": str(tmp_path)}, timeout_s=60) == {"jobs": {}}


@pytest.mark.parametrize("name", ["reader", "receive", "sender"])
def test_a_program_whose_words_nobody_takes_ends_and_one_that_is_heard_goes_on(name, tmp_path, monkeypatch):
    sources = {key: text.replace("STUCK_S = 120", "STUCK_S = 2") for key, text in call.shipped_sources().items()}
    monkeypatch.setattr(call, "shipped_sources", lambda: sources)
    job = WorkFolder(str(tmp_path)).job("j")
    (job.root / "rank-0").mkdir(parents=True)
    flood = b"x" * (1 << 20)
    (job.root / "rank-0" / "stdout.log").write_bytes(flood)
    me = processes.identify(os.getpid())._asdict()
    write_json(job.agent, {"state": "running", **me})
    request = {
        "reader": {"ranks": [0], "offsets": {}, "follow": True, "files": ["stdout.log"], **WHOLE},
        "sender": {"files": [["rank-0/stdout.log", len(flood), 0, 0, 0]]},
        # What is to come does not come, and it says so once a second; each word is made longer than a pipe's room.
        "receive": {"folder": str(tmp_path / "data"), "files": [["a", 1 << 30, "0" * 64]]},
    }[name]
    stdin = request_of(name, {"workdir": str(tmp_path), "job": "j", **request}, 60)
    if name != "sender":  # that one is done when it has been heard
        with program(name, stdin) as running:
            took = time.monotonic()
            while time.monotonic() < took + 4:
                if select.select([running.stdout], [], [], 0.1)[0]:
                    os.read(running.stdout.fileno(), 1 << 20)
                assert running.poll() is None
    with program(name, stdin) as running:
        if name == "receive":
            fill(running.stdout.fileno())
        assert ended_by_alarm(running)


def fill(pipe):
    """Leaves a pipe no room, whoever writes to it."""
    with (
        open(f"/proc/self/fd/{pipe}", "wb", buffering=0, opener=nonblocking) as entry,
        contextlib.suppress(BlockingIOError),
    ):
        while entry.write(b"\n" * 4096):
            pass
        while entry.write(b"\n"):
            pass


def nonblocking(path, flags):
    return os.open(path, flags & ~(os.O_CREAT | os.O_TRUNC) | os.O_NONBLOCK)


def waits_for_input(pid):
    """Is it in a read of its standard input? As x86-64 and ARM number that call."""
    return Path(f"/proc/{pid}/syscall").read_text().startswith(("0 0x0 ", "63 0x0 "))


def test_reap_finds_what_is_stuck_and_nothing_that_is_at_work(tmp_path, monkeypatch):
    job = WorkFolder(str(tmp_path)).job("j")
    job.root.mkdir(parents=True)
    write_json(job.agent, {"state": "running", **processes.identify(os.getpid())._asdict()})
    follows = {
        "workdir": str(tmp_path),
        "job": "j",
        "ranks": [],
        "offsets": {},
        "follow": True,
        "files": ["stdout.log"],
        **WHOLE,
    }
    with (
        program("control", b"") as stuck,
        program("reader", request_of("reader", follows, 60)) as at_work,
        subprocess.Popen(["sleep", "60"]) as foreign,
    ):
        assert at_work.stdout.read(4) == b"MARK"
        both = {stuck.pid, at_work.pid, *children(stuck.pid), *children(at_work.pid)}
        wait_for(lambda: len(both & {one.pid for one in belongings.our_programs()}) == 2)
        wait_for(lambda: any(waits_for_input(pid) for pid in {stuck.pid, *children(stuck.pid)}))  # it has begun
        found = belongings.forgotten(old_s=0.0)
        ours = {one.pid for one in found} & both
        assert ours and ours <= {stuck.pid, *children(stuck.pid)}
        assert both.isdisjoint({one.pid for one in belongings.forgotten()})  # too young
        processes.end_all([one for one in found if one.pid in ours], signal.SIGKILL)
        stuck.wait(60)
        assert at_work.poll() is None and foreign.poll() is None
        foreign.kill()


def children(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{pid}/children") as listed:
        return [int(word) for word in listed.read().split()]
    return []


def wait_for(condition, within_s=60):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
