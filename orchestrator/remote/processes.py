"""Identifies processes safely, finds all processes of a job, and ends only those.

A process is identified by pid, start time and boot id, since pids are reused and records may outlive a reboot. A job's
processes descend from the supervisor, a subreaper for daemonised children (prctl(2), PR_SET_CHILD_SUBREAPER), or have
the job's folder in their environment.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

MARK = "ORCH_JOB_DIR"
LAST_OUTPUT_S = 2.0  # time for rank wrappers to write their ranks' last output into the logs
LOADING_S, LOADING_LOOKS = 0.002, 50
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Identity(NamedTuple):
    """start_time: clock ticks since boot (proc(5), field 22 of stat)."""

    pid: int
    start_time: int
    boot_id: str

    def is_alive(self) -> bool:
        return self.boot_id == boot_id() and start_time(self.pid) == self.start_time

    def signal(self, signum: int) -> None:
        # Opens a pidfd first and checks the identity on it, so that no other process is hit.
        # Not permitted if it changed its user (sudo); it is then listed as left over.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            handle = os.pidfd_open(self.pid)
            try:
                if self.is_alive():
                    signal.pidfd_send_signal(handle, signum)
            finally:
                os.close(handle)


@functools.cache
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def start_time(pid: int) -> int | None:
    """None for a missing process or a zombie."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def identify(pid: int) -> Identity:
    started = start_time(pid)
    if started is None:
        raise ProcessLookupError(pid)
    return Identity(pid, started, boot_id())


def age_s(process: Identity) -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_time / os.sysconf("SC_CLK_TCK")


def descendants(root: int) -> list[Identity]:
    children: dict[int, list[Identity]] = {}
    for pid in pids():
        fields = _stat(pid)
        if fields and fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(Identity(pid, int(fields[19]), boot_id()))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += [process.pid for process in below]
    return found


class Use(NamedTuple):
    """CPU time of a process, its descendants and their ended children; state of the process itself."""

    cpu_ticks: int
    state: str  # a letter of proc(5): R runs or is ready, S sleeps, D waits in the kernel, T is stopped


def uses(roots: Mapping[int, int]) -> dict[int, Use]:
    """roots: process whose state is reported -> process from which on CPU time is counted, inclusive. Missing processes
    are left out.
    """
    stats = {pid: fields for pid in pids() if (fields := _stat(pid))}
    children: dict[int, list[int]] = {}
    for pid, fields in stats.items():
        children.setdefault(int(fields[1]), []).append(pid)
    found = {}
    for asked, root in roots.items():
        ticks, todo = 0, [root]
        while todo:
            pid = todo.pop()
            ticks += sum(map(int, stats[pid][11:15])) if pid in stats else 0
            todo += children.get(pid, ())
        if asked in stats and stats[asked][0] not in "ZX":
            found[asked] = Use(ticks, stats[asked][0])
    return found


def marked(job_dir: Path) -> list[Identity]:
    mark = f"{MARK}={job_dir}".encode()
    found = []
    for pid in pids():
        # Another user's environment is unreadable, and not ours.
        with contextlib.suppress(OSError):
            if _has_mark(pid, mark):
                process = identify(pid)
                if _has_mark(pid, mark):  # checked again: the pid may have been reused
                    found.append(process)
    return found


def _has_mark(pid: int, mark: bytes) -> bool:
    environment = environment_of(pid)
    return mark in environment and mark in environment.split(b"\0")


def environment_of(pid: int) -> bytes:
    # During execve(2) environment and command line are empty, so that they are read again.
    for _ in range(LOADING_LOOKS):
        if found := _read(f"/proc/{pid}/environ"):
            return found
        if _read(f"/proc/{pid}/cmdline"):  # it has no environment, or has it by now
            return _read(f"/proc/{pid}/environ")
        os.readlink(f"/proc/{pid}/exe")  # OSError: a kernel thread, or ended
        time.sleep(LOADING_S)
    return b""


def below_or_marked(job_dir: Path) -> list[Identity]:
    """Every living process of the job except this one, also if it lost either its parent or its environment."""
    return sorted(found for found in {*descendants(os.getpid()), *marked(job_dir)} if found.pid != os.getpid())


def process_group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def pulse(pid: int) -> int:
    """A number that grows whenever this process gets to run (proc(5), status); -1 without such a process.

    It does not grow while the process is stopped or stuck in the kernel.
    """
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if "voluntary_ctxt_switches" in line)
    return -1


def catches(pid: int, signum: int) -> bool:
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return any(int(line.split()[1], 16) >> (signum - 1) & 1 for line in lines if line.startswith("SigCgt:"))
    return False


def is_stopped(pid: int) -> bool:
    # By SIGSTOP or a terminal (T), or a debugger (t).
    return _stat(pid)[:1] in (["T"], ["t"])


def end_all(processes: Iterable[Identity], signum: int) -> None:
    for process in processes:
        process.signal(signum)


class Killing:
    """SIGKILL to the rest of a job, called repeatedly. Rank wrappers write their ranks' last output into the logs and
    then end by themselves, so they are spared while other processes exist, and for LAST_OUTPUT_S after that: on a busy
    machine they may get no processor before the next call.
    """

    def __init__(self) -> None:
        self._output_until_s: float | None = None

    def of(self, left: Iterable[Identity]) -> None:
        found = list(left)
        if others := [process for process in found if not _is_wrapper(process.pid)]:
            end_all(others, signal.SIGKILL)
            return
        if self._output_until_s is None:
            self._output_until_s = time.monotonic() + LAST_OUTPUT_S
        if time.monotonic() >= self._output_until_s:
            end_all(found, signal.SIGKILL)


def _is_wrapper(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:3] == [b"-m", b"orch_remote.rank"]
    return False


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"SIG{signum}"


def describe(process: Identity) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"pid {process.pid} ({command.strip()[:80]})"
    return f"pid {process.pid}"


def adopt_orphans() -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(script: int) -> None:
    """Reaps daemonised descendants of a script, our children now; leaves the script itself."""
    look = os.WEXITED | os.WNOHANG | os.WNOWAIT
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitid(os.P_ALL, 0, look)) and found.si_pid != script:
            os.waitpid(found.si_pid, 0)


def die_with_parent(signum: int) -> None:
    """The kernel sends us `signum` when our parent ends. The caller checks that it has not ended before."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def _prctl(option: int, value: int) -> None:
    import ctypes  # slow to import, and only long-lived processes need it

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _stat(pid: int) -> list[str]:
    # /proc/<pid>/stat from the state on (the name before it may contain spaces and parentheses); [] if gone.
    try:
        return _read(f"/proc/{pid}/stat").rpartition(b")")[2].decode().split()
    except OSError:
        return []


def _read(path: str) -> bytes:
    # The cheapest way to read /proc: a scan reads one file per process.
    with open(path, "rb", buffering=0) as file:
        return file.read()


# Hides a shell command from other users: they can read command lines, but not environments.
#
#     argv, environment = unseen_line("curl -H 'Authorization: ...' ...", os.environ)
#
# Programs that the command starts have visible command lines of their own, but not this variable.

_LINE = "ORCH_LINE"


def unseen_line(line: str, environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment to start. $0 is `sh`, as with `sh -c`."""
    return ["sh", "-c", f'eval "unset {_LINE}\n${_LINE}"'], {**environment, _LINE: line}
