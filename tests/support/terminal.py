"""A person at a terminal in the lab's controller: types `orch` commands, reads what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lab_net

from tests.support import forks
from tests.support.lab import Lab

# Looks through every process but itself for the words it is given, in environment and command line.
LOOK = r"""
for entry in /proc/[0-9]*; do
    [ "$entry" = "/proc/$$" ] && continue
    if grep -qs "$1" "$entry/environ" "$entry/cmdline"; then tr '\0' ' ' 2>/dev/null <"$entry/cmdline"; echo; fi
done
"""
ORCH = [sys.executable, "-m", "orchestrator.cli"]


@dataclass(frozen=True)
class Person:
    """home: their $ORCH_HOME. Commands run in the lab's controller network, in `folder`."""

    lab: Lab
    home: Path
    folder: Path

    @property
    def environment(self) -> Mapping[str, str]:
        return {**os.environ, "ORCH_HOME": str(self.home), "ORCH_SSH_CONFIG": "/dev/null"}

    def types(self, *words: str, exit_code: int | None = 0, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        """Runs `orch WORDS` to its end and checks its exit code."""
        network = lab_net.NETNS / lab_net.controller_namespace(self.lab.cluster)
        place = {"env": self.environment, "cwd": self.folder, "network": network}
        done = forks.run(forks.ORCH, words, timeout=timeout_s, **place)
        assert exit_code in (None, done.returncode), f"{words} gave {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done

    def starts(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return self.lab.popen([*ORCH, *words], env=self.environment, cwd=self.folder, **{**streams, **options})

    def asks(self, *words: str, exit_code: int | None = 0) -> dict[str, Any]:
        """The document of a command with --json, which stands before a script's own words."""
        own = words.index("--") if "--" in words else len(words)
        return json.loads(self.types(*words[:own], "--json", *words[own:], exit_code=exit_code).stdout)

    def job(self, job: str) -> dict[str, Any]:
        return next(found for found in self.asks("jobs")["jobs"] if found["id"] == job)

    def agent(self, node: str, job: str) -> dict[str, Any]:
        """The supervisor's record, as it lies on the host."""
        path = f"/home/lab/.orch/jobs/{job}/agent.json"
        return json.loads(self.lab.host_exec(node, ["cat", path]).stdout)

    def processes_of(self, job: str) -> list[str]:
        """Every process on any host that carries this job's mark or works for its supervisor."""
        found = []
        for node in self.lab.nodes:
            lines = self.lab.host_exec(node["name"], ["/bin/sh", "-s", f"jobs/{job}"], input=LOOK).stdout.splitlines()
            found += [f"{node['name']}: {line}" for line in lines]
        return found


def until_said(run: subprocess.Popen[str], words: str) -> str:
    """What a command prints up to a line with these words."""
    assert run.stdout
    shown = ""
    while words not in shown:
        line = run.stdout.readline()
        assert line, f"it ended before it said {words!r}: {shown}"
        shown += line
    return shown
