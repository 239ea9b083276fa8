"""Running a program with a time limit, its output in a file, and nothing of it left behind.

ended = run([sys.executable, "-m", "trainer", ...], log=Path("alone.log"), limit_s=60)
ended.exit_code, ended.cause            1, "out of memory: ..."
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .here import ROOT

_GRACE_S = 8.0
"""From SIGTERM to SIGKILL: the trainer itself gives a stuck collective 3 s."""
_TELLS = re.compile(r"^(error: |E   |(\[rank\d+\]: )?[\w.]*(Error|Exception)(: |$))")
_SAYS_NOTHING = re.compile(
    r"^\s*$|^\[?\s*(rank\s?\d+\]:?\s*)?(\^+|~+)\s*$|exited \d+; the other|^\s*File \"|^frame #\d|^interrupted by "
)


@dataclass(frozen=True)
class Ended:
    """exit_code: None where the time limit ended it."""

    exit_code: int | None
    log: Path
    limit_s: float

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def cause(self) -> str:
        """One line that says why it failed, as far as its output knows."""
        error, last = error_in(self.output), last_word(self.output)
        if self.exit_code is not None and error:
            return error
        return f"{self._how_it_ended}{f'; last: {error or last}' if error or last else ', without a word'}"

    @property
    def _how_it_ended(self) -> str:
        if self.exit_code is None:
            return f"not done within {self.limit_s:.0f} s"
        number = -self.exit_code if self.exit_code < 0 else self.exit_code - 128  # the latter from a shell or from pair
        with contextlib.suppress(ValueError):
            return f"ended by {signal.Signals(number).name}"
        return f"exit code {self.exit_code}"


def error_in(output: str) -> str:
    """The first line that names an error; empty where none does."""
    return next((line.removeprefix("error: ") for line in _lines(output) if _TELLS.search(line)), "")[:300]


def last_word(output: str) -> str:
    """The last line that says anything."""
    return next(reversed(_lines(output)), "")[:300]


def _lines(output: str) -> list[str]:
    return [line.strip() for line in output.splitlines() if not _SAYS_NOTHING.search(line)]


def run(command: Sequence[str], log: Path, limit_s: float, environment: Mapping[str, str] | None = None) -> Ended:
    """In a session of its own, so that all of it can be ended. KeyboardInterrupt ends it, too, and goes on."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            list(command),
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            exit_code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            _end(process)
    return Ended(exit_code, log, limit_s)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The whole session: first asked, then ended."""
    try:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    finally:  # also where a second Ctrl-C comes
        _signal(process, signal.SIGKILL)
        process.wait()


def _signal(process: subprocess.Popen[bytes], signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signum)
