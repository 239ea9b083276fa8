"""All file names on the controller, $ORCH_HOME (`Home`) and a collected run (`RunFolder`).
File names on hosts are in `orchestrator/remote/`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

RUNS = Path("runs")


@dataclass(frozen=True)
class Home:
    """Mode 0700."""

    root: Path

    @classmethod
    def default(cls) -> Home:
        """XDG Base Directory Specification 0.8."""
        chosen = os.environ.get("ORCH_HOME")
        if chosen:
            return cls(Path(chosen).expanduser().absolute())
        state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        return cls(Path(state).expanduser() / "orch")

    @property
    def known_hosts(self) -> Path:
        return self.root / "known_hosts"

    @property
    def ssh_configs(self) -> Path:
        """A file per cluster, see `orch ssh-config --keep`."""
        return self.root / "ssh"

    @property
    def current_cluster(self) -> Path:
        return self.root / "current"

    @property
    def owner(self) -> Path:
        """See `paths`."""
        return self.root / "owner.json"

    @property
    def metrics_token(self) -> Path:
        """Secret part of the address of `orch ui`'s metrics."""
        return self.root / "metrics-token"

    @property
    def clusters(self) -> Path:
        return self.root / "clusters"

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    @property
    def sweeps(self) -> Path:
        return self.root / "sweeps"

    @property
    def last_number(self) -> Path:
        return self.root / "last-number"

    @property
    def profiles(self) -> Path:
        return self.root / "profiles"

    def profile(self, key: str) -> Path:
        """key: `profiles.Kind.key`."""
        return self.profiles / f"{key}.json"

    def cluster(self, name: str) -> Path:
        return self.clusters / f"{name}.json"

    def job_folder(self, job: str) -> Path:
        return self.jobs / job

    def uncollected(self, job: str) -> Path:
        """Exists while hosts may hold files of this job that were not collected after its end."""
        return self.job_folder(job) / "uncollected"

    def removed(self, job: str) -> Path:
        """Exists after `orch down` removed files of this job."""
        return self.job_folder(job) / "removed.json"

    def collected(self, job: str) -> Path:
        """The job's run folders, newest first."""
        return self.job_folder(job) / "collected.json"

    def allowed(self, digest: str) -> Path:
        """Exists if the user allowed an inventory's commands on this machine."""
        return self.root / "allowed" / digest

    def carried(self, job: str) -> Path:
        """Files of an earlier job on their way to another host."""
        return self.job_folder(job) / "carried"

    def launching(self, job: str) -> Path:
        """Exists, locked, until every host was asked to start the job."""
        return self.job_folder(job) / "launching"


@dataclass(frozen=True)
class RunFolder:
    """`<out>/<job id>/`."""

    root: Path

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    @property
    def pull_lock(self) -> Path:
        return self.root / ".pull.lock"

    @property
    def plan(self) -> Path:
        return self.root / "plan.json"

    @property
    def job(self) -> Path:
        return self.root / "job.json"

    @property
    def job_file(self) -> Path:
        """`orch run FILE` repeats the run."""
        return self.root / "job.yaml"

    @property
    def nodes(self) -> Path:
        return self.root / "nodes"

    @property
    def steps(self) -> Path:
        return self.root / "steps.parquet"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def timeline(self) -> Path:
        """One step of a pipeline; absent for other jobs."""
        return self.root / "timeline.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def chart(self) -> Path:
        return self.root / "throughput.png"

    def node(self, node: str) -> Path:
        return self.nodes / node

    def agent(self, node: str) -> Path:
        return self.node(node) / "agent.json"

    def left(self, node: str) -> Path:
        """By log: bytes not collected."""
        return self.node(node) / "left.json"

    def files(self, node: str) -> Path:
        """Output files besides logs, with their names in the job's folder."""
        return self.node(node) / "files"

    def incoming(self, node: str) -> Path:
        return self.node(node) / ".incoming"

    def gpu(self, node: str) -> Path:
        return self.node(node) / "gpu.jsonl"

    def rank(self, node: str, rank: int) -> Path:
        return self.node(node) / f"rank-{rank}"

    def metrics(self, node: str, rank: int) -> Path:
        return self.rank(node, rank) / "metrics.jsonl"
