"""Does `orch profile` find the paces of the A2000 and V100 twins, keep them, and do shares go by them?

    .venv/bin/python tests/bench/profiles.py [TIMES]

Each time (default 5) with a new $ORCH_HOME: both hosts are profiled for ResNet-152, then six updates run with
shares=measured. A time counts where both profiles are kept, within 2 % of the pace, and the run succeeds. Prints how
late each batch size was, and the machine's load: what other work does to it. Exits 1 where a time does not count.
Needs root, as the lab does.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from rack import ROOT, Person, lab, show_machine

PACES = {"a2000": 333, "v100": 833}
WITHIN = 0.02
EXP = ("--exp", "resnet152_cifar")


def main() -> int:
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    show_machine()
    with lab(ROOT / "inventory" / "lab_a2000_v100.yaml") as hosts, tempfile.TemporaryDirectory() as folder:
        counted = sum(once(Person(hosts, Path(folder, str(turn)), Path(folder))) for turn in range(times))
    print(f"{counted} of {times}: both kept, within {100 * WITHIN:g} % of their pace, and shares=measured ran")
    return 0 if counted == times else 1


def once(person: Person) -> bool:
    person.types("up", str(person.lab.inventory))
    ranks = person.asks("profile", *EXP, exit_code=None)["ranks"]
    good = [show(rank) for rank in ranks]
    run = person.types("run", *EXP, "--set", "steps=6", "--set", "shares=measured", exit_code=None)
    print(f"  run with shares=measured: exit code {run.returncode}, load {os.getloadavg()[0]:.1f}", flush=True)
    return all(good) and len(good) == len(PACES) and run.returncode == 0


def show(rank: dict[str, Any]) -> bool:
    """Whether it is kept and right."""
    off = rank["samples_per_s"] / PACES[rank["node"]] - 1
    late = ", ".join(f"{size} {late:.1%}" for size, late in zip(rank["samples"], rank["lateness"], strict=True))
    kept = "kept" if rank["valid"] else "not kept"
    print(f"{rank['node']:6} {rank['samples_per_s']:.1f} samples/s ({off:+.1%}), {kept}; late at {late}", flush=True)
    return bool(rank["valid"]) and abs(off) <= WITHIN


if __name__ == "__main__":
    sys.exit(main())
