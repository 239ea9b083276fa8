"""Programs of ours on this host that nobody waits for: a link that fell silent may leave them.

    for program in forgotten(): program.signal(signal.SIGKILL)

One that is at work says something every second: a program that is old and does not stir while it is looked at is stuck.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from .processes import Identity, age_s, identify

OLD_S = 600.0
LOOK_S = 2.0
_BOOTSTRAP = "exec(compile(i.read(int(i.readline())),sys.argv[1],sys.argv[2]))"
"""As `orchestrator/transport/shell.py` starts each of them."""


def forgotten(old_s: float = OLD_S) -> list[Identity]:
    """This user's forgotten programs. old_s: younger ones are not looked at."""
    stirred = {program: _stirred(program.pid) for program in _programs() if age_s(program) > old_s}
    if stirred:
        time.sleep(LOOK_S)
    return [program for program, before in stirred.items() if program.is_alive() and _stirred(program.pid) == before]


def _programs() -> list[Identity]:
    found = []
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and int(name) != os.getpid() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                program = identify(int(name))  # before its command line is read: who takes the pid later is another
                words = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace").split("\0")[1:5]
                if _is_ours(words):
                    found.append(program)
    return found


def _is_ours(words: list[str]) -> bool:
    if words[:1] == ["-c"]:  # a shell that waits for its `activate` line
        return len(words) == 3 and _BOOTSTRAP in words[1] and " orch-" in words[1]
    return len(words) == 4 and words[0] == "-Suc" and _BOOTSTRAP in words[1] and words[2].startswith("orch-")


def _stirred(pid: int) -> int:
    """How often its threads have given up the processor."""
    count = 0
    with contextlib.suppress(OSError, ValueError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            lines = (thread / "status").read_text().splitlines()
            count += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return count
