"""How long `orch up` takes for many hosts of which many are silent: a dead switch must not take healthy ones along.

    .venv/bin/python tests/bench/scale.py [HEALTHY:SILENT ...]       # 250:250 16:64 16:0

The silent hosts stand first in the inventory. Prints when the last healthy host was heard (its probe had ended, by the
host's own word), when `orch up` had ended, and the most memory that it took. See `tests/support/crowd.py` for what the
hosts are: all of them share this machine's cores with `orch`, while those of a real cluster have their own. So those of
the large case answer with a recorded probe; `--real` lets them run it. Needs root.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.support.crowd import Crowd, crowd
from tests.support.terminal import ORCH, Person

MOST_REAL = 64  # more hosts than this do not run the probe themselves: the two cores would be theirs alone
CASES = ("16:0", "16:64", "250:250")


def main() -> None:
    given = [word for word in sys.argv[1:] if word != "--real"]
    cases = [tuple(map(int, case.split(":"))) for case in given or CASES]
    print(f"{platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}")
    print("hosts: addresses of one lab host and its one sshd (MaxStartups raised); their torch is a stub")
    with tempfile.TemporaryDirectory() as folder, crowd() as hosts:
        for healthy, silent in cases:
            show(hosts, Path(folder), healthy, silent, quick=healthy > MOST_REAL and "--real" not in sys.argv)


def show(hosts: Crowd, folder: Path, healthy: int, silent: int, *, quick: bool) -> None:
    person = Person(hosts.lab, folder / f"home-{healthy}-{silent}", folder)
    inventory = hosts.inventory(folder, silent=silent, healthy=healthy, quick=quick)
    hosts.heard_at()
    load = os.getloadavg()[0]
    began = time.time()
    up = ["/usr/bin/env", "time", "-f", "%M %U %S", *ORCH, "up", str(inventory)]
    done = hosts.lab.controller_exec(up, env=person.environment, cwd=folder, timeout=600)
    total_s = time.time() - began
    heard = hosts.heard_at()
    *said, figures = done.stderr.splitlines()
    kib, user_s, system_s = figures.split()
    if not heard:
        print(f"{healthy} healthy, {silent} silent: none heard; up took {total_s:.1f} s")
        return
    errors = [line for line in said if line.startswith("error: h")]
    answers = " (recorded answers)" if quick else ""
    print(
        f"{healthy} healthy{answers}, {silent} silent: "
        f"heard {len(heard)}, first after {heard[0] - began:.1f} s, last after {heard[-1] - began:.1f} s; "
        f"up took {total_s:.1f} s, {float(user_s) + float(system_s):.1f} s of CPU, {int(kib) / 1024:.0f} MiB at most; "
        f"{len(errors)} healthy hosts not usable; load before {load:.1f}",
        flush=True,
    )
    for line in errors[:3]:
        print(f"    {line}")


if __name__ == "__main__":
    main()
