"""Notifies the user after the end of a job that no controller follows: a command on the master, or a webhook.

    how = notify(job, node, record)     # "the webhook answered 200"; never the address, which may be a secret

Both get ATTEMPT_S at most. The command is a line of shell in the job's folder, with ORCH_JOB, ORCH_STATE,
ORCH_EXIT_CODE, ORCH_REASON, ORCH_CLUSTER and ORCH_FOLDER. The webhook gets them as JSON, with a sentence as `text`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import Any

from .layout import JobFolder
from .processes import MARK, unseen_line

LIMIT_S = 30.0  # shorter than `orch down` waits for a job's end
TRY_S, TRIES, PAUSE_S = 8.0, 3, 2.0
URL = re.compile(r"https?://", re.IGNORECASE)


def notify(job: JobFolder, node: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    facts = facts_of(job, node, record)
    return post(node["notify"], facts) if URL.match(node["notify"]) else run(job, node["notify"], facts)


def facts_of(job: JobFolder, node: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    cause = record.get("first_failure")
    reason = f"{cause['node']}: {cause['reason']}" if cause else ""
    state = record["state"]
    return {
        "job": job.id,
        "state": state,
        "exit_code": None if state == "cancelled" else _exit_code(state, cause),
        "reason": reason,
        "cluster": node["cluster"],
        "exp": node["exp"],
        "nodes": node["members"],
        "attempts": len(record.get("earlier", ())) + 1,
        "folder": str(job.root),
        "text": f"{job.id} {state}" + (f": {reason}" if reason else ""),
    }


def _exit_code(state: str, cause: Mapping[str, Any] | None) -> int:
    if state == "succeeded":
        return 0
    name = (cause or {}).get("signal") or ""
    if name in signal.Signals.__members__:
        return 128 + signal.Signals[name].value
    return (cause or {}).get("exit_code") or 1


def run(job: JobFolder, line: str, facts: Mapping[str, Any]) -> str:
    named = {name: facts[name] for name in ("job", "state", "exit_code", "reason", "cluster", "folder")}
    given = {f"ORCH_{name.upper()}": "" if value is None else str(value) for name, value in named.items()}
    inherited = {name: value for name, value in os.environ.items() if name != MARK}
    argv, environment = unseen_line(line, {**inherited, **given})
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, cwd=job.root, env=environment, start_new_session=True
        )
    except OSError as error:
        return f"the command could not be started ({error.strerror})"
    try:
        code = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"the command took longer than {LIMIT_S:g} s and was ended"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # its leftovers
        process.wait()
    return f"the command ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"


class TooLongError(BaseException):
    """No `except Exception` of a library catches it."""


def post(url: str, facts: Mapping[str, Any]) -> str:
    def too_long(signum: int, frame: object) -> None:
        raise TooLongError

    signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)  # a time limit of urllib begins anew with every byte
    try:
        return _post(url, facts)
    except TooLongError:
        return f"the webhook took longer than {LIMIT_S:g} s"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _post(url: str, facts: Mapping[str, Any]) -> str:
    import urllib.error
    import urllib.request

    how = ""
    for number in range(TRIES):
        time.sleep(PAUSE_S if number else 0.0)
        try:
            body = json.dumps(facts).encode()
            request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "orch"})
            with urllib.request.urlopen(request, timeout=TRY_S) as answer:
                return f"the webhook answered {answer.status}"
        except urllib.error.HTTPError as error:
            how = f"the webhook answered {error.code}"
            if error.code < 500:
                return how
        except Exception as error:  # of many kinds, also for a malformed address; their words may contain it
            how = f"the webhook was not reached ({_kind(error)})"
    return how


def _kind(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    return (reason.strerror or type(reason).__name__) if isinstance(reason, OSError) else type(reason).__name__
