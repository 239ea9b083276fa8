"""Faults on purpose, by a seed: real supervisors, sshd and links, and after every round a look at what must hold.

    .venv/bin/python -m tests.chaos --faults 60 --seed 7          # needs root: it stands on the lab

`world` is the hosts and what is seen on them, `rounds` is one job with one fault, `faults` is what can go wrong and
what is then expected, `invariants` is what must hold whatever happens.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "deploy"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
