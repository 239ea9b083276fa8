"""`--notify CMD`: runs the user's shell command on this machine after the job has ended.

It gets no variables of the job's ranks, which may be secrets. Its failure is only a warning.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress

from orchestrator.jobs.job_store import JobRecord
from orchestrator.paths import RUNS, RunFolder
from orchestrator.views import console

LIMIT_S = 60.0


def variables(record: JobRecord) -> dict[str, str]:
    """ORCH_RUN is the folder that `orch collect` would write from here."""
    return {
        "ORCH_JOB": record.id,
        "ORCH_STATE": record.state,
        "ORCH_EXIT_CODE": "" if record.exit_code is None else str(record.exit_code),
        "ORCH_RUN": str(RunFolder(RUNS / record.id).root.absolute()),
    }


def notify(command: str, record: JobRecord, limit_s: float = LIMIT_S) -> None:
    console.err.file.flush()
    if why := _run(command, {**os.environ, **variables(record)}, limit_s):
        console.warn(f"--notify: the command {why}; the job itself is {record.state}")


def _run(command: str, environment: Mapping[str, str], limit_s: float) -> str:
    """Why it failed, else ""."""
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        return f"could not be started ({error.strerror})"
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"took longer than {limit_s:g} s and was ended"
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}" if code else ""
