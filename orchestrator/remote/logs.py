"""Finds in the end of a log why its program ended, and advice for known errors."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

TAIL_BYTES = 1 << 16
LINE_CHARS = 500  # longer lines are cut first: some patterns take time quadratic in the length, and block an event loop
_LAST_LINES = 20

# Printed by ranks when another one died (Gloo, NCCL, TCPStore): an effect, never the cause.
_SECONDARY = re.compile(
    r"connection (was likely )?(closed|reset)( by (remote )?peer)?|recv, got 0 bytes|broken pipe|"
    r"connectFullMesh failed|remote process exit|ncclRemoteError|socket (closed|timeout)|failed to recv|"
    r"connection (refused|timed out)|application timeout caused pair|watchdog caught collective|"
    r"timed out waiting|wait timeout|no route to host|"
    r"another rank ended the run|"
    r"aborting process on rank|collective operation timed out|timeout watchdog detected operation",
    re.IGNORECASE,
)

# Printed only by the rank that fails: a cause, even if connection errors follow.
_PRIMARY = re.compile(
    r"ECC error|ECC_UNCORRECTABLE|busy or unavailable|fallen off the bus|illegal memory access|device-side assert|"
    r"Mismatched NCCL version|creating shared memory segment \S*nccl-|failed to extend \S*nccl-",
    re.IGNORECASE,
)

_PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)

# (pattern, meaning and advice); the first row that matches the last lines counts.
_KNOWN = [
    (
        r"CUDA out of memory|CUDA error: out of memory|CU(BLAS|DNN)_STATUS_ALLOC_FAILED|"
        r"unable to find (an engine to execute|a valid cudnn algorithm)",
        "this GPU's memory is too small for its share of the batch; use a smaller batch, or `--set accumulate=4`",
    ),
    (
        r"creating shared memory segment \S*nccl-|failed to extend \S*nccl-",
        "/dev/shm is too small for NCCL; enlarge it (a container's `--shm-size`), or set NCCL_SHM_DISABLE=1 in `env:`",
    ),
    (
        r"No space left on device|Errno 28\b",
        "a disk is full on this host; free some space, or give the node another `workdir:`",
    ),
    (
        r"finished reduction in the prior iteration",
        "some parameter got no gradient: the script's fault; use them all, or `find_unused_parameters=True`",
    ),
    (
        r"mismatch(ed)? (between )?collective|collective.*mismatch",
        "ranks disagree on which collective comes next: the script's fault; look for a branch that depends on the rank",
    ),
    (
        r"no kernel image is available",
        "this PyTorch was not built for this GPU; install a build that was",
    ),
    (
        r"driver/library version mismatch|CUDA driver version is insufficient",
        "this host's GPU driver does not fit its libraries; a reboot ends a half-done upgrade",
    ),
    (
        r"Mismatched NCCL version",
        "hosts have different versions of NCCL; give all of them one build of torch (`orch setup --torch X.Y.Z`)",
    ),
    (
        r"uncorrectable ECC error|ECC_UNCORRECTABLE",
        "this GPU's memory failed (`nvidia-smi -q -d ECC`); reset it or reboot, and leave it out if that comes again",
    ),
    (
        r"busy or unavailable",
        "another process has this GPU for itself, or it hangs; `nvidia-smi` there shows who, and its compute mode",
    ),
    (
        r"insufficient shared memory|\(shm\)|Bus error",
        "/dev/shm is too small for the data loader; set `num_workers=0`, or enlarge it",
    ),
    (
        r"Too many open files",
        "too few open files are allowed (`ulimit -n`); lower `num_workers`, or raise the limit",
    ),
    (
        r"Resource temporarily unavailable|can't start new thread",
        "this user may start no further process or thread (`ulimit -u`); end some, or raise the limit",
    ),
    (
        r"ibv_(reg_mr|create_cq|create_qp).*(Cannot allocate memory|ENOMEM)",
        "too little memory may be locked for InfiniBand; raise `ulimit -l`, or set NCCL_IB_DISABLE=1 in `env:`",
    ),
    (
        r"No module named '?[A-Za-z_]",
        "this host's Python lacks a module; `orch run --requirements FILE` installs packages for the job",
    ),
    (
        r"FileNotFoundError: \[Errno 2\]|Dataset not found",
        "this host lacks a file; `orch data push` brings data to ~/data, which a script finds as $ORCH_DATA",
    ),
    (
        r"client socket has timed out|RendezvousTimeoutError|timed out after \d+ seconds waiting for clients",
        "not every host reached the meeting point; a firewall may stand between the hosts",
    ),
    (
        _PORT_TAKEN.pattern,
        "another program on this host uses a port that this rank needs; `ss -ltnp` there shows which",
    ),
]


def advice(lines: list[str]) -> str | None:
    ending = last_lines(lines)
    known = (said for pattern, said in _KNOWN if any(re.search(pattern, line, re.IGNORECASE) for line in ending))
    return next(known, None)


def last_lines(lines: list[str]) -> list[str]:
    starts = [index for index, line in enumerate(lines) if line.endswith("Traceback (most recent call last):")]
    return lines[starts[-1] :] if starts else lines[-_LAST_LINES:]


def is_secondary(lines: list[str]) -> bool:
    """The last lines blame a connection, and no error of the rank itself."""
    ending = last_lines(lines)
    return any(_SECONDARY.search(line) for line in ending) and not any(_PRIMARY.search(line) for line in ending)


def log_tail(log: Path) -> list[str]:
    try:
        with open(os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):  # not a regular file: reading might never end
                return []
            file.seek(max(0, found.st_size - TAIL_BYTES))
            lines = file.read(TAIL_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line.strip()[:LINE_CHARS] for line in lines if line.strip()]


def telling_line(lines: list[str]) -> str | None:
    """The line most likely to name the cause: the last with an error and more than its label, or the last line."""
    worth = [
        line for line in lines if not line.startswith(("[W", "warnings.warn")) and not line.endswith("Last error:")
    ]
    errors = [line for line in worth if "Error" in line or "error:" in line.lower()]
    found = (errors or worth)[-1:]
    return found[0][:400] if found else None
