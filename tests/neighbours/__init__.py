"""Neighbours on the same hosts, by a seed: whatever one of them types, nobody else loses anything.

    .venv/bin/python -m tests.neighbours --rounds 50 --seed 1          # needs root: it stands on the lab

`people` is who they are and what they type in a round, `street` is the hosts and their homes, `watch` is what is seen
after every step and what of it may have changed, `script` is what their ranks do.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
for folder in (ROOT, ROOT / "deploy"):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
