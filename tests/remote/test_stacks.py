"""Where a script stands: it writes its stacks when it is asked, and notices nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import remote
from orchestrator.remote.layout import JobFolder
from orchestrator.remote.rank import watched
from orchestrator.remote.stacks import ASKS, Thread, asking, frames_of
from orchestrator.remote.why import full_pipes, see, state_of

BEGINS = "import os, signal, sys, threading, time\ndef say(word): print(word, flush=True)\n"
SLEEPS = "def inner():\n    say('up')\n    time.sleep(600)\ninner()\n"


@contextlib.contextmanager
def started(tmp_path: Path, script: str, *flags: str) -> Iterator[tuple[JobFolder, subprocess.Popen[str]]]:
    """A script as a rank's wrapper starts it, once it has said its first word."""
    job = JobFolder(tmp_path / "job")
    for folder in (job.bin, job.src, job.rank(0)):
        folder.mkdir(parents=True)
    (job.bin / "orch_remote").symlink_to(Path(remote.__file__).parent)
    (job.src / "script.py").write_text(BEGINS + script)
    environment = dict(os.environ)
    environment |= watched(job, environment, steps=False, stacks=job.stacks(0))
    words = [sys.executable, *flags, "script.py"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=job.src, env=environment, stdin=pipe, stdout=pipe, text=True) as child:
        try:
            assert child.stdout and child.stdout.readline() == "up\n"
            while state_of(child.pid) not in ("S", "Z"):
                time.sleep(0.01)
            yield job, child
        finally:
            child.kill()


def said(child: subprocess.Popen[str]) -> str:
    """The rest of what it prints: its input ends, and it goes on."""
    assert child.stdin and child.stdout
    child.stdin.close()
    return child.stdout.read()


def asked(job: JobFolder, pid: int) -> list[Thread] | None:
    with asking(job.stacks(0)) as ask:
        return ask(pid)


def asked_at_rest(job: JobFolder, pid: int, threads: int) -> list[Thread] | None:
    """Once all of them wait: one that has just been asked may be on its way back to where it waits, and is left out."""
    for _ in range(500):
        found = asked(job, pid)
        if found is not None and len(found) == threads:
            break
        time.sleep(0.02)
    return found


def places(thread: Thread) -> list[tuple[str, int, str]]:
    return [(Path(file).name, line, name) for file, line, name in thread.frames]


def test_each_thread_is_shown_where_it_stands_and_nothing_is_left_in_the_file(tmp_path: Path) -> None:
    thread = "def other():\n    time.sleep(600)\nthreading.Thread(target=other, daemon=True).start()\n"
    with started(tmp_path, thread + SLEEPS) as (job, child):
        header = job.stacks(0).read_text()
        for _ in range(3):
            found = asked_at_rest(job, child.pid, 2)
            assert found is not None
            assert [one.is_main for one in found] == [True, False]
            assert places(found[0]) == [("script.py", 8, "inner"), ("script.py", 9, "<module>")]
            assert places(found[1])[0] == ("script.py", 4, "other")
        assert job.stacks(0).read_text() == header
        assert job.stacks(0).stat().st_mode & 0o777 == 0o600
        assert child.poll() is None


def test_a_wait_goes_on_and_nothing_is_printed(tmp_path: Path) -> None:
    waits = "say('up')\nread, write = os.pipe()\n"
    late = "threading.Thread(target=lambda: os.write(write, sys.stdin.read().encode() or b'x')).start()\n"
    with started(tmp_path, waits + late + "say(os.read(read, 1))\n") as (job, child):
        for _ in range(20):
            assert asked(job, child.pid)
        assert said(child) == "b'x'\n"
        assert child.wait() == 0


def test_the_script_sees_nothing_of_it(tmp_path: Path) -> None:
    looks = (
        "say('up')\nours = [name for name in os.environ if 'ORCH_S' in name]\n"
        "say((ours, os.open('/', 0), signal.getsignal(signal.SIGURG), signal.signal.__doc__))\n"
    )
    words = [sys.executable, "-c", BEGINS + looks]
    plain = subprocess.run(words, capture_output=True, text=True, check=True, stdin=subprocess.PIPE).stdout
    with started(tmp_path, looks) as (_, child):
        seen = said(child)
    assert f"up\n{seen}" == plain


def test_forked_children_write_theirs_too(tmp_path: Path) -> None:
    forks = "def child():\n    say('up')\n    time.sleep(600)\nif os.fork() == 0: child()\ntime.sleep(600)\n"
    with started(tmp_path, forks) as (job, child):
        while not all(one.state == "S" for one in see(job, 0, child.pid)[0]):
            time.sleep(0.01)
        found, more = see(job, 0, child.pid)
        assert more == 0
        assert [one.main and places(one.main)[0] for one in found] == [
            ("script.py", 7, "<module>"),
            ("script.py", 5, "child"),
        ]
        os.kill(found[1].pid, signal.SIGKILL)


OWN = {
    "signal": "signal.signal(signal.SIGURG, lambda *_: say('mine'))\n",
    "asyncio": "import asyncio\nloop = asyncio.new_event_loop()\n"
    "loop.add_signal_handler(signal.SIGURG, lambda: say('mine'))\n",
    "ignored": "signal.signal(signal.SIGURG, signal.SIG_IGN)\n",
    "blocked": "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGURG])\n",
    "faulthandler": "import faulthandler\nfaulthandler.register(signal.SIGURG, open('stacks', 'w'))\n",
    "closed": "os.closerange(3, 1000)\n",
    "its number taken": "os.dup2(os.open('stacks', os.O_RDWR | os.O_CREAT), 100)\n",
    "another program": "os.execvp('sh', ['sh', '-c', 'echo up; exec sleep 600'])\n",
}


@pytest.mark.parametrize("way", OWN)
def test_a_process_that_has_the_signal_or_the_file_for_itself_is_left_alone(tmp_path: Path, way: str) -> None:
    then = "say('up')\nfor line in sys.stdin: pass\nwhile True: time.sleep(0.01)\n"
    with started(tmp_path, OWN[way] + then) as (job, child):
        assert asked(job, child.pid) is None
        child.terminate()
        assert said(child) == ""
        assert [path.read_bytes() for path in job.src.glob("stacks")] in ([], [b""])


def test_a_program_without_our_start_is_known_by_its_state_alone(tmp_path: Path) -> None:
    with started(tmp_path, "say('up')\ntime.sleep(600)\n", "-S") as (job, child):
        ((one,), _) = see(job, 0, child.pid)
        assert (one.threads, one.state, one.name) == (None, "S", one.name)


def test_who_has_no_handler_does_not_notice_the_signal() -> None:
    with subprocess.Popen(["sleep", "600"]) as sleeps:
        sleeps.send_signal(ASKS)
        with pytest.raises(subprocess.TimeoutExpired):
            sleeps.wait(0.2)
        sleeps.kill()


def test_a_stream_that_takes_nothing_more_is_seen(tmp_path: Path) -> None:
    writes = "say('up')\nos.write(1, b'x' * (1 << 20))\n"
    with started(tmp_path, "say('up')\ntime.sleep(600)\n") as (_, child):
        assert full_pipes(child.pid) == []
    with started(tmp_path / "two", writes) as (_, child):
        while full_pipes(child.pid) != ["stdout"]:
            assert child.poll() is None


@pytest.mark.parametrize("text", ["", "Fatal", "Stack (most recent call first):\n  <no Python frame>\n"])
def test_what_is_no_stack_shows_no_frames(text: str) -> None:
    assert frames_of(text) == []


def test_frames_are_read_as_they_are_written() -> None:
    text = 'Stack (most recent call first):\n  File "a \\"b\\".py", line 3 in g\n  File "c.py", line 9 in <module>\n'
    assert frames_of(text) == [('a \\"b\\".py', 3, "g"), ("c.py", 9, "<module>")]


def test_threads_that_run_are_not_looked_into(tmp_path: Path) -> None:
    """Who reads the frames of a running thread ends the script by SIGSEGV, within some tens of times."""
    runs = (
        "def deep(n): return n and deep(n - 1)\n"
        "def run():\n    while True: deep(900); exec('def f(): return []\\nf()', {})\n"
        "for _ in range(3): threading.Thread(target=run, daemon=True).start()\n"
    )
    with started(tmp_path, f"{runs}say('up')\nwhile True: time.sleep(0.001)\n") as (job, child):
        answers = [asked(job, child.pid) for _ in range(300)]
        assert child.poll() is None
        assert sum(1 for found in answers if found and found[0].is_main) > 200


def test_the_main_thread_is_known_among_many_others(tmp_path: Path) -> None:
    many = "lock = threading.Lock(); lock.acquire()\n"
    many += "for _ in range(120): threading.Thread(target=lock.acquire, daemon=True).start()\n"
    with started(tmp_path, many + SLEEPS) as (job, child):
        found = asked(job, child.pid)
        assert found is not None
        assert len(found) > 1
        assert places(found[0])[0] == ("script.py", 7, "inner")


def test_a_script_with_few_descriptors_keeps_their_numbers(tmp_path: Path) -> None:
    limited = [sys.executable, "-c", "import os; print(os.open('/', 0))"]
    job = JobFolder(tmp_path / "job")
    for folder in (job.bin, job.rank(0)):
        folder.mkdir(parents=True)
    (job.bin / "orch_remote").symlink_to(Path(remote.__file__).parent)
    environment = dict(os.environ) | watched(job, os.environ, steps=False, stacks=job.stacks(0))
    words = ["sh", "-c", 'ulimit -n 64; exec "$0" "$@"', *limited]
    plain, ours = (subprocess.check_output(words, env=env) for env in (os.environ, environment))
    assert plain == ours
