"""The Slurm cluster of the tests: two starts and ends leave nothing behind."""

import os
import subprocess
from pathlib import Path

from tests.support.slurm_lab import slurm_lab


def test_the_cluster_starts_runs_a_job_and_leaves_nothing():
    for _ in range(2):
        with slurm_lab(NODES="a2000:a2000:1:1:2500mbit v100:v100:1:1:2500mbit") as lab:
            names = lab.exec("srun", "--nodes=2", "--gres=gpu:1", "sh", "-c", "echo $(hostname):$CUDA_VISIBLE_DEVICES")
            assert sorted(names.split()) == ["a2000:0", "v100:0"]
        spaces = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
        name = lab.environment["NAME"]
        assert f"{name}-" not in spaces
        assert not lab.folder.exists()
        assert not Path(f"/sys/class/net/{name}-br").exists()
        assert not Path(f"/sys/fs/cgroup/freezer/{name}").exists()
        assert not [line for line in _commands() if str(lab.folder) in line]


def _commands() -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.append(Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return found
