"""Everything that one host can report without the others: `probe`'s answer, and slower or intrusive checks.

Request: as for `probe`, and "data": a folder to list. The answer is that of `probe`, with "data" and "disk" in its
health, a computation by torch on each GPU, and

    {"began": a process that should outlive this connection (`outlives`)}
"""

from __future__ import annotations

import json
import sys
from typing import Any

from . import outlives
from .commands import printed
from .probe import answer_of

# Prints the names in a folder, or null if it does not exist.
DATA = """
import json, os, sys
path = os.path.expanduser(sys.argv[1])
print(json.dumps(sorted(os.listdir(path))[:64] if os.path.isdir(path) else None))
"""
# Prints the disk on which a folder is or would be created, with the fields of `Disk`.
DISK = """
import json, os, sys
path = os.path.realpath(os.path.expanduser(sys.argv[1]))
there = path
while not os.path.isdir(there):
    there = os.path.dirname(there)
os.statvfs(there)  # has an automounter mount it
best = ("", "", "", "/")
for line in open("/proc/self/mountinfo", encoding="utf-8", errors="replace"):
    about, _, kind = line.partition(" - ")
    root, point = [word.encode().decode("unicode_escape") for word in about.split()[3:5]]
    if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[3]):
        best = (*kind.split()[:2], root, point)
within = os.path.normpath(best[2] + "/" + os.path.relpath(path, best[3]))
print(json.dumps({"kind": best[0], "source": best[1], "path": within, "device": os.stat(there).st_dev}))
"""


def main(request: dict[str, Any]) -> None:
    answer = examine(request)
    try:
        sys.stdout.write(request["marker"] + json.dumps(answer) + request["marker"])
        sys.stdout.flush()
    except OSError:  # the controller has left, and will not ask about the process
        outlives.end(answer["began"])
        raise


def examine(request: dict[str, Any]) -> dict[str, Any]:
    python = [sys.executable, "-S", "-c"]
    more = {"data": [*python, DATA, request["data"]], "disk": [*python, DISK, request["workdir"]]}
    answer, done = answer_of({**request, "computes": True}, more)
    answer["health"] |= {"data": printed(done["data"], list), "disk": printed(done["disk"], dict)}
    return {**answer, "began": outlives.start()}
