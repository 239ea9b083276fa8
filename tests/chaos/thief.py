"""Before torchrun's stand-in: says which port it is about to listen on, and waits until somebody has taken it.

python thief.py PORT LAUNCHER...
"""

import os
import pathlib
import sys
import time

folder = pathlib.Path(os.environ["ORCH_JOB_DIR"], "src")
if os.environ.get("THEFTS") and not (folder / "enough").exists():
    (folder / f"wants-{sys.argv[1]}").touch()
    while not (folder / f"taken-{sys.argv[1]}").exists():
        time.sleep(0.01)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
