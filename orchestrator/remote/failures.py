"""What went wrong with a process of ours, from its exit code, its log and the kernel's count of memory kills.

failures = FailureDiagnosis("beta")
failures.of_program("prepare", "the `prepare` command exited 3", job.prepare_log, 3)
failures.of_rank({"rank": 1, "exit_code": 7, "signal": None}, log)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .logs import advice, is_secondary, log_tail, telling_line
from .memory import out_of_memory_kills
from .messages import Failure, failure
from .processes import signal_name

OUT_OF_MEMORY = "this host, or the cgroup that it runs in, ran out of memory, and the kernel ended a process"


class FailureDiagnosis:
    """node: this host's name."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._memory_kills = out_of_memory_kills()

    def forget_memory_kills(self) -> None:
        """What the kernel ended until now was none of what is to come."""
        self._memory_kills = out_of_memory_kills()

    def of_program(self, kind: str, reason: str, log: Path, code: int) -> Failure:
        """code: its exit code, negative for a signal. log: where the cause may stand."""
        cause = failure(kind, self._node, reason)
        cause["exit_code"] = code if code > 0 else None
        cause["signal"] = signal_name(-code) if code < 0 else None
        return self._explained(cause, log)

    def of_rank(self, event: dict[str, Any], log: Path) -> Failure:
        """event: as the rank's wrapper reports its end (`rank`). Raises KeyError where that is not of this form."""
        if "trouble" in event:
            cause = failure("rank", self._node, f"rank {event['rank']} did not start: {event['trouble']}")
            cause["rank"], cause["exit_code"] = event["rank"], event["exit_code"]
            return self._explained(cause, None)
        how = f"was killed by {event['signal']}" if event["signal"] else f"exited {event['exit_code']}"
        cause = failure("rank", self._node, f"rank {event['rank']} {how}")
        cause["rank"], cause["exit_code"], cause["signal"] = event["rank"], event["exit_code"], event["signal"]
        return self._explained(cause, log)

    def _explained(self, cause: Failure, log: Path | None) -> Failure:
        if cause["signal"] == "SIGKILL" and out_of_memory_kills() > self._memory_kills:
            cause["reason"] += f": {OUT_OF_MEMORY}"
        # Nobody who is killed from outside says why; one who aborts (NCCL's watchdog does) has said it before.
        if cause["signal"] in (None, "SIGABRT"):
            lines = log_tail(log) if log else []
            cause["log_line"], cause["secondary"] = telling_line(lines), is_secondary(lines)
            if known := advice(lines):
                cause["reason"] += f": {known}"
        return cause


def how_it_ended(code: int) -> str:
    """code: an exit code, negative for a signal."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"exited {code}"
