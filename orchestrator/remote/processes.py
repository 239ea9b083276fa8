"""Who is who among this host's processes, and how to end exactly ours.

A process is known by pid, start time and boot id together: pids are reused, and a record may outlive a reboot. Ours are
those that descend from the supervisor (it is their subreaper, so daemonised children come back to it: prctl(2),
PR_SET_CHILD_SUBREAPER) or carry our job's folder in their environment.
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
LAST_WORDS_S = 2.0
"""So long rank wrappers may carry what their ranks have printed into the logs."""
LOADING_S, LOADING_LOOKS = 0.002, 50
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Identity(NamedTuple):
    """One process, unmistakably. start_time: clock ticks since boot (proc(5), field 22 of stat)."""

    pid: int
    start_time: int
    boot_id: str

    def is_alive(self) -> bool:
        """Whether this very process runs; a zombie does not."""
        return self.boot_id == boot_id() and start_time(self.pid) == self.start_time

    def signal(self, signum: int) -> None:
        """Signals this process and no other: the pidfd is opened first, then the identity is checked on it."""
        # Not permitted: it took another user (sudo). It stays, and is listed as what stayed.
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
    """None where there is no such process, or only its zombie."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def identify(pid: int) -> Identity:
    """Raises ProcessLookupError where there is no such process."""
    started = start_time(pid)
    if started is None:
        raise ProcessLookupError(pid)
    return Identity(pid, started, boot_id())


def age_s(process: Identity) -> float:
    """How long ago it was started."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_time / os.sysconf("SC_CLK_TCK")


def descendants(root: int) -> list[Identity]:
    """Every living process below `root`, itself left out."""
    children: dict[int, list[Identity]] = {}
    for pid in _pids():
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
    """What a process and all below it have used: CPU time, that of its ended children too; and its own state."""

    cpu_ticks: int
    state: str
    """A letter of proc(5): R runs or wants to, S sleeps, D waits in the kernel, T is stopped."""


def uses(roots: Mapping[int, int]) -> dict[int, Use]:
    """roots: by the process whose state is asked for, the one below which CPU time is counted, itself included. Those
    that are gone are left out.
    """
    stats = {pid: fields for pid in _pids() if (fields := _stat(pid))}
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
    """Every living process of ours that was started with this job's mark in its environment."""
    mark = f"{MARK}={job_dir}".encode()
    found = []
    for pid in _pids():
        # Another user's environment cannot be read, and is none of ours.
        with contextlib.suppress(OSError):
            if _bears(pid, mark):
                process = identify(pid)
                if _bears(pid, mark):  # again: who has taken the pid meanwhile is another
                    found.append(process)
    return found


def _bears(pid: int, mark: bytes) -> bool:
    environment = _environment(pid)
    return mark in environment and mark in environment.split(b"\0")


def _environment(pid: int) -> bytes:
    """While a process begins another program (execve(2)) it has neither environment nor words: it is read again."""
    for _ in range(LOADING_LOOKS):
        if found := _read(f"/proc/{pid}/environ"):
            return found
        if _read(f"/proc/{pid}/cmdline"):  # it has none, or has it since
            return _read(f"/proc/{pid}/environ")
        os.readlink(f"/proc/{pid}/exe")  # OSError: the kernel's own, or ended
        time.sleep(LOADING_S)
    return b""


def below_or_marked(job_dir: Path) -> list[Identity]:
    """Every living process of the job but ourselves: whether it forgot its parent or its environment, not both."""
    return sorted(found for found in {*descendants(os.getpid()), *marked(job_dir)} if found.pid != os.getpid())


def process_group(pid: int) -> int:
    """-1 where there is no such process."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def pulse(pid: int) -> int:
    """A number that grows whenever this process gets to run; -1 where there is none (proc(5), status).

    A process that is stopped, or stuck in the kernel, keeps its pid and its open files and has no pulse.
    """
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if "voluntary_ctxt_switches" in line)
    return -1


def catches(pid: int, signum: int) -> bool:
    """Whether this process has a handler of its own for the signal (proc(5), status: SigCgt)."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return any(int(line.split()[1], 16) >> (signum - 1) & 1 for line in lines if line.startswith("SigCgt:"))
    return False


def is_stopped(pid: int) -> bool:
    """By SIGSTOP or a terminal (T), or held by a debugger (t)."""
    return _stat(pid)[:1] in (["T"], ["t"])


def end_all(processes: Iterable[Identity], signum: int) -> None:
    for process in processes:
        process.signal(signum)


class Killing:
    """SIGKILL to what is left of a job, look after look until nothing is. Rank wrappers carry their ranks' last words
    into the logs, then end by themselves: they are spared as long as there is anything else, and LAST_WORDS_S when they
    are alone, since on a busy machine the next look comes before they had the processor.
    """

    def __init__(self) -> None:
        self._words_until_s: float | None = None

    def of(self, left: Iterable[Identity]) -> None:
        found = list(left)
        if others := [process for process in found if not _is_wrapper(process.pid)]:
            end_all(others, signal.SIGKILL)
            return
        if self._words_until_s is None:
            self._words_until_s = time.monotonic() + LAST_WORDS_S
        if time.monotonic() >= self._words_until_s:
            end_all(found, signal.SIGKILL)


def _is_wrapper(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:3] == [b"-m", b"orch_remote.rank"]
    return False


def signal_name(signum: int) -> str:
    """`SIGKILL`; `SIG40` for one without a name of its own (real-time signals)."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"SIG{signum}"


def describe(process: Identity) -> str:
    """`pid 4711 (python train.py)`: for the list of what would not end. At most 80 characters of the command."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{process.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return f"pid {process.pid} ({command.strip()[:80]})"
    return f"pid {process.pid}"


def adopt_orphans() -> None:
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(signum: int) -> None:
    """Have the kernel send us `signum` when our parent ends. The caller checks that it had not ended before."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def _prctl(option: int, value: int) -> None:
    import ctypes  # only the long-lived processes need it, and it is slow to import

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _stat(pid: int) -> list[str]:
    """/proc/<pid>/stat from the state on (the name before it may hold blanks and brackets); [] if it is gone."""
    try:
        return _read(f"/proc/{pid}/stat").rpartition(b")")[2].decode().split()
    except OSError:
        return []


def _read(path: str) -> bytes:
    """A file of /proc, in the cheapest way: a look at all processes reads one for each."""
    with open(path, "rb", buffering=0) as file:
        return file.read()
