"""Stands in for torchrun where a test trains nothing: starts the rank wrappers, ends them when one fails.

python gang_launcher.py RANKS FIRST_RANK WORLD_SIZE JOB_DIR
"""

import os
import subprocess
import sys

ranks, first, world, job_dir = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
children = {}
for local in range(ranks):
    environment = {
        **os.environ,
        "RANK": str(first + local),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "orch_remote.rank", job_dir], env=environment, start_new_session=True
    )
    children[child.pid] = child
failed = False
while children:
    pid, status = os.wait()
    children.pop(pid)
    if status != 0:
        failed = True
        for child in children.values():
            child.terminate()
sys.exit(1 if failed else 0)
