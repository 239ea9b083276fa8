"""Identity of processes: the wrong one is never signalled."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.remote import processes
from orchestrator.remote.agent import lives
from orchestrator.remote.processes import Identity


@pytest.fixture
def sleeper():
    child = subprocess.Popen(["sleep", "1000"])
    yield child
    child.kill()
    child.wait()


def test_a_process_is_alive_under_its_own_identity(sleeper):
    assert processes.identify(sleeper.pid).is_alive()


def test_a_reused_pid_is_another_process_and_is_not_signalled(sleeper):
    stale = Identity(sleeper.pid, processes.start_time(sleeper.pid) - 1, processes.boot_id())
    assert not stale.is_alive()
    stale.signal(signal.SIGKILL)
    assert sleeper.poll() is None


def test_a_record_from_before_a_reboot_is_another_process(sleeper):
    stale = Identity(sleeper.pid, processes.start_time(sleeper.pid), "00000000-0000-0000-0000-000000000000")
    stale.signal(signal.SIGKILL)
    assert not stale.is_alive()
    assert sleeper.poll() is None


def test_a_zombie_is_not_alive():
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert processes.start_time(child.pid) is None
    child.wait()


def test_a_name_with_brackets_and_blanks_does_not_confuse_the_parser(tmp_path):
    odd = tmp_path / "a) S 1 (b"
    odd.symlink_to("/bin/sleep")
    child = subprocess.Popen([str(odd), "1000"])
    try:
        assert child.pid in {found.pid for found in processes.descendants(os.getpid())}
        assert processes.identify(child.pid).is_alive()
    finally:
        child.kill()
        child.wait()


def test_the_mark_finds_a_process_that_left_its_parent(tmp_path):
    child = "subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=-3, stderr=-3)"  # -3: DEVNULL
    program = f"import subprocess; print({child}.pid)"
    environment = {**os.environ, processes.MARK: str(tmp_path)}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    pid = int(found.stdout)
    try:
        assert processes.marked(tmp_path) == [processes.identify(pid)]
        assert processes.marked(tmp_path / "other") == []
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_process_that_begins_another_program_is_looked_at_again(sleeper, monkeypatch):
    """Its environment is empty for a moment, and so are its words."""
    looks = []

    def loading(path, *how, **options):
        looks.append(path)
        return io.BytesIO() if len(looks) < 6 else open(path, *how, **options)

    monkeypatch.setattr(processes, "open", loading, raising=False)
    assert processes.environment_of(sleeper.pid) == Path(f"/proc/{sleeper.pid}/environ").read_bytes()
    assert len(looks) > 5


def test_who_has_no_environment_is_not_waited_for(monkeypatch):
    child = subprocess.Popen(["sleep", "1000"], env={})
    while not Path(f"/proc/{child.pid}/cmdline").read_bytes():  # it begins its program yet
        pass
    monkeypatch.setattr(processes.time, "sleep", lambda _: pytest.fail("waited"))
    try:
        assert processes.environment_of(child.pid) == b""
        with pytest.raises(OSError):
            processes.environment_of(2)  # a kernel thread, or not there
    finally:
        child.kill()
        child.wait()


def test_a_list_of_processes_made_before_a_pid_was_reused_harms_nobody(sleeper):
    before = Identity(sleeper.pid, processes.start_time(sleeper.pid) - 1, processes.boot_id())
    processes.end_all([before], signal.SIGKILL)
    assert sleeper.poll() is None


def test_a_stale_record_whose_pid_is_a_strangers_is_not_alive(sleeper):
    stranger = processes.identify(sleeper.pid)
    record = {**stranger._asdict(), "start_time": stranger.start_time - 1}
    assert lives({**stranger._asdict(), "keeper": record})
    assert not lives({**record, "keeper": record})
    assert not lives({**stranger._asdict(), "boot_id": "another"})


def test_a_process_has_a_pulse_until_it_is_stopped():
    child = subprocess.Popen([sys.executable, "-c", "import time\nwhile True: time.sleep(0.01)"])
    try:
        until_it_beats(child.pid)
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        stopped = processes.pulse(child.pid)
        time.sleep(0.2)
        assert processes.pulse(child.pid) == stopped
        child.send_signal(signal.SIGCONT)
        until_it_beats(child.pid)
    finally:
        child.kill()
        child.wait()
    assert processes.pulse(child.pid) == -1


def until_it_beats(pid):
    before, deadline = processes.pulse(pid), time.monotonic() + 10
    while processes.pulse(pid) <= before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
