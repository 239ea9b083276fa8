"""What a rank of a neighbour does: writes weights, says so, and with `stay` goes on until it is ended."""

import os
import random
import sys
import time
from pathlib import Path

SIZE = 60_000


def outputs(job, rank):
    """Name in the job's folder -> content: the same whenever it is asked for."""
    rng = random.Random(f"{job}/{rank}")
    return {name: rng.randbytes(SIZE) for name in (f"src/snapshot-{rank}.pt", f"checkpoints/best-{rank}.pt")}


def main():
    snapshot, best = outputs(os.environ["ORCH_JOB"], rank := os.environ["RANK"]).values()
    Path(f"snapshot-{rank}.pt").write_bytes(snapshot)
    Path(os.environ["ORCH_CHECKPOINTS"], f"best-{rank}.pt").write_bytes(best)
    print("wrote", flush=True)
    number = 0
    while sys.argv[1:] == ["stay"]:
        time.sleep(0.2)
        number += 1
        print(number, flush=True)


if __name__ == "__main__":
    main()
