"""How long `orch up` takes for many hosts of which many are silent: a dead switch must not take healthy ones along.
Then the costs of a job of many ranks, four per host: they should grow with the ranks.

    .venv/bin/python tests/bench/scale.py [HEALTHY:SILENT ...] [RANKS ...]       # 250:250 16:64 16:0 32 64 128

The silent hosts stand first in the inventory. Prints when the last healthy host was heard (its probe had ended, by the
host's own word), when `orch up` had ended, and the most memory that it took. See `tests/support/crowd.py` for what the
hosts are: all of them share this machine's cores with `orch`, while those of a real cluster have their own. So those of
the large case answer with a recorded probe; `--real` lets them run it. Needs root.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import yaml

from tests.support.crowd import Crowd, crowd
from tests.support.quick_python import quick_python
from tests.support.terminal import ORCH, Person

MOST_REAL = 64  # more hosts than this do not run the probe themselves: the two cores would be theirs alone
CASES = ("16:0", "16:64", "250:250", "32", "64", "128")
PER_HOST = 4


def main() -> None:
    given = [word for word in sys.argv[1:] if word != "--real"]
    given = given or [*CASES]
    cases = [tuple(map(int, case.split(":"))) for case in given if ":" in case]
    print(f"{platform.machine()}, {os.cpu_count()} cores, python {platform.python_version()}")
    print("hosts: addresses of one lab host and its one sshd (MaxStartups raised); their torch is a stub")
    with tempfile.TemporaryDirectory() as folder, crowd() as hosts:
        for healthy, silent in cases:
            show(hosts, Path(folder), healthy, silent, quick=healthy > MOST_REAL and "--real" not in sys.argv)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        python = quick_python(Path(folder, "python"))  # its torchrun and torch are stubs
        with crowd(binds=[folder]) as hosts:
            for ranks in (int(case) for case in given if ":" not in case):
                show_ranks(hosts, Path(folder), ranks, python)


def show_ranks(hosts: Crowd, folder: Path, ranks: int, python: str) -> None:
    person = Person(hosts.lab, folder / f"home-{ranks}", folder)
    inventory = hosts.inventory(folder, silent=0, healthy=ranks // PER_HOST)
    content = yaml.safe_load(inventory.read_text())
    for node in content["nodes"]:
        node |= {"python": python, "gpus": PER_HOST, "workdir": f"~/ranks/{ranks}/{node['name']}"}
    inventory.write_text(yaml.safe_dump({**content, "cluster": f"ranks{ranks}"}))
    (folder / "stub.sh").write_text('echo "rank $RANK of $WORLD_SIZE"\n')
    for words in (["up", str(inventory)], ["run", "stub.sh"], ["doctor"], ["collect"]):
        load, began = os.getloadavg()[0], time.time()
        line = ["/usr/bin/env", "time", "-f", "%M %U %S", *ORCH, *words]
        done = hosts.lab.controller_exec(line, env=person.environment, cwd=folder, timeout=600)
        kib, user_s, system_s = done.stderr.splitlines()[-1].split()
        print(
            f"{ranks} ranks of a stub on {ranks // PER_HOST} hosts: orch {words[0]} took {time.time() - began:.1f} s, "
            f"{float(user_s) + float(system_s):.1f} s of CPU, {int(kib) / 1024:.0f} MiB at most, exit "
            f"{done.returncode}{_ranks_heard(words, done.stdout)}; load before {load:.1f}",
            flush=True,
        )


def _ranks_heard(words: list[str], out: str) -> str:
    return f", {len(set(re.findall(r'rank [0-9]+ of', out)))} ranks printed" if words[0] == "run" else ""


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
