"""Time from submission to a job's first step on Slurm: `orch run` next to sbatch, srun and torchrun of the same script.

    python tests/bench/slurm_start.py --times 3          # needs root, and Slurm (`make packages`)

Both run on the same two hosts of a cluster made for it, one rank each, in turn. The clock starts with the command and
stops as rank 0 has done its first all-reduce. The last line has the medians.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.slurm.conftest import A2000, V100, Person
from tests.support.slurm_lab import SlurmLab, slurm_lab

SCRIPT = """import os, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if os.environ["RANK"] == "0":
    print("FIRST", time.time(), flush=True)
dist.destroy_process_group()
"""
BY_HAND = """#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=1 --gres=gpu:a2000:1
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks-per-node=1 --gres=gpu:v100:1
export GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1
srun --het-group=0,1 bash -c 'exec {python} -m torch.distributed.run --nnodes=2 --node-rank=$SLURM_PROCID \\
    --nproc-per-node=1 --master-addr=a2000 --master-port=29400 {folder}/train.py'
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--first", action="store_true", help="of the first job after `orch up`, each time")
    asked = parser.parse_args()
    rows: list[tuple[float, float, float]] = []
    with slurm_lab() as lab, tempfile.TemporaryDirectory() as folder:
        person = Person(lab, Path(folder))
        person.up(A2000, V100)
        (person.folder / "train.py").write_text(SCRIPT)
        print(f"{'orch run':>10} {'by hand':>10} {'more':>10}   seconds to the first step")
        for _ in range(asked.times):
            if asked.first:
                person("down", "--yes")
                person.up(A2000, V100)
            ours_s, theirs_s = orch_s(person), by_hand_s(lab)
            rows.append((ours_s, theirs_s, ours_s - theirs_s))
            print(" ".join(f"{figure:10.1f}" for figure in rows[-1]), flush=True)
        print(" ".join(f"{statistics.median(column):10.1f}" for column in zip(*rows, strict=True)))


def orch_s(person: Person) -> float:
    began = time.time()
    return _first(person("run", "train.py")) - began


def by_hand_s(lab: SlurmLab) -> float:
    folder = lab.work / "by-hand"
    lab.exec("mkdir", "-p", str(folder))
    (folder / "train.py").write_text(SCRIPT)
    (folder / "job.sh").write_text(BY_HAND.format(python=lab.python, folder=folder))
    for path in folder.glob("*.*"):
        path.chmod(0o755)
    out = folder / "out"
    out.unlink(missing_ok=True)
    began = time.time()
    lab.exec("sbatch", "--wait", f"--output={out}", str(folder / "job.sh"))
    return _first(out.read_text()) - began


def _first(text: str) -> float:
    return float(text.partition("FIRST ")[2].split()[0])


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"{error}: {error.stdout}{error.stderr}")
