"""Retries by the supervisors themselves (`--retries` with `--detach`): the same job, hosts, plan and folder.

After a failed attempt every host's keeper ends all that is left of it, puts its logs aside and starts the next
supervisor, which rests, queues again if the job queues, and meets the others at the same ports. Each attempt has a
token of its own: a supervisor of another attempt is turned away. So two attempts never run at once.

    judge(failure)                      whose fault it is: "hosts", "script" or "person"
    goes_on(node, earlier, failure)     whether another attempt follows
    token_of(token, 2)
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from .layout import JobFolder
from .messages import Earlier, Failure, Whose

AGAIN = 75
"""Exit code of a supervisor whose job is tried again."""
LONGEST_WAIT_S = 360.0
WHY_CHARS = 200

# No script causes these.
_OF_HOSTS = {"lost", "network", "supervisor", "port"}
# A removed folder or a time limit, of the run or of its wait.
_OF_PERSONS = {"folder", "time", "queue"}
# The next attempt leaves the host out, if a controller starts it.
_LOSES_HOST = {"lost", "network", "supervisor"}
# Sent by the kernel (out of memory), a shutdown or a person, not by the process itself.
_FROM_OUTSIDE = {"SIGKILL", "SIGTERM", "SIGHUP", "SIGINT", "SIGPWR"}
# A shell's exit code after SIGKILL.
_KILLED = 128 + 9
_GPU_GONE = re.compile(
    r"fallen off the bus|GPU is lost|ECC error|ECC_UNCORRECTABLE|busy or unavailable|no CUDA-capable device|"
    r"CUDA_ERROR_(NO_DEVICE|DEVICE_UNAVAILABLE)|device handle for GPU",
    re.IGNORECASE,
)
_WORKER_KILLED = re.compile(r"worker \(pid \S+\) is killed by signal: Killed")
# A rank waited in vain for another, which usually is busy with something else: the fault of the script.
_MISSED = re.compile(r"watchdog|collective operation|wait timeout|timed out waiting", re.IGNORECASE)
_NOT_STARTED = re.compile(r"(rank \d+|torchrun|the `prepare` command) did not start: ")


def judge(failure: Mapping[str, Any]) -> Whose:
    if failure["kind"] in _OF_PERSONS:
        return "person"
    line = failure["log_line"] or ""
    if failure["kind"] in _OF_HOSTS or _GPU_GONE.search(f"{failure['reason']} {line}"):
        return "hosts"
    return "hosts" if _is_from_outside(failure, line) else "script"


def judged(failure: Failure | None) -> Failure | None:
    """For the final record, by which a controller decides on the next attempt."""
    if failure is None:
        return None
    gone = _GPU_GONE.search(f"{failure['reason']} {failure['log_line'] or ''}")
    return {**failure, "whose": judge(failure), "loses_host": failure["kind"] in _LOSES_HOST or bool(gone)}


def _is_from_outside(failure: Mapping[str, Any], line: str) -> bool:
    if failure["secondary"]:
        return not _MISSED.search(line)
    if failure["signal"]:
        return failure["signal"] in _FROM_OUTSIDE
    killed = failure["exit_code"] == _KILLED or _WORKER_KILLED.search(line)
    return bool(killed or _NOT_STARTED.match(failure["reason"]))


def goes_on(node: Mapping[str, Any], earlier: Sequence[Earlier], cause: Failure | None) -> bool:
    """cause: of the attempt after these; None if it did not fail."""
    asked = node.get("retries")
    if not asked or cause is None or len(earlier) + 1 >= asked["most"]:
        return False
    whose = judge(cause)
    return whose == "hosts" or (whose == "script" and bool(asked["any_cause"]))


def with_failed(earlier: Sequence[Earlier], cause: Failure) -> list[Earlier]:
    why = f"{cause['node']}: {cause['reason'][:WHY_CHARS]}"
    return [*earlier, Earlier(why=why, ended=time.time())]


def pause_s(node: Mapping[str, Any], earlier: Sequence[Earlier]) -> float:
    """Before the attempt after these."""
    return float(min(LONGEST_WAIT_S, node["retries"]["wait_s"] * 2.0 ** (len(earlier) - 1))) if earlier else 0.0


def token_of(token: bytes, number: int) -> bytes:
    return token if number == 1 else hmac.new(token, b"attempt %d" % number, hashlib.sha256).digest()


def put_aside(job: JobFolder, number: int) -> None:
    """Moves the logs and metrics of this attempt's ranks into a folder of its own."""
    kept = job.attempt(number)
    with contextlib.suppress(OSError):  # a failing disk: the next attempt's output follows this one's
        kept.mkdir(exist_ok=True)
        for path in (*job.root.glob("rank-*"), job.gpu_log, job.torchrun_log, job.prepare_log):
            if path.exists():
                path.replace(kept / path.name)
