"""Every file name on the controller's side, in one place.

`Home` is $ORCH_HOME: what this person's controller remembers (the hosts are the truth). `RunFolder` is one collected
run: analyse and report need nothing else. What lies on a host is known to `orchestrator/remote/` alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

RUNS = Path("runs")
"""Where collected runs lie by default."""


@dataclass(frozen=True)
class Home:
    """$ORCH_HOME, mode 0700."""

    root: Path

    @classmethod
    def default(cls) -> Home:
        """$ORCH_HOME, else `orch` in the XDG state folder (XDG Base Directory Specification 0.8)."""
        chosen = os.environ.get("ORCH_HOME")
        if chosen:
            return cls(Path(chosen).expanduser().absolute())
        state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        return cls(Path(state).expanduser() / "orch")

    @property
    def known_hosts(self) -> Path:
        return self.root / "known_hosts"

    @property
    def current_cluster(self) -> Path:
        return self.root / "current"

    @property
    def owner(self) -> Path:
        """Who this home is to the hosts: see `owner`."""
        return self.root / "owner.json"

    @property
    def metrics_token(self) -> Path:
        """The secret in the address of `orch ui`'s metrics."""
        return self.root / "metrics-token"

    @property
    def clusters(self) -> Path:
        return self.root / "clusters"

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    @property
    def last_number(self) -> Path:
        """Of the job that was started last."""
        return self.root / "last-number"

    @property
    def profiles(self) -> Path:
        return self.root / "profiles"

    def profile(self, key: str) -> Path:
        """How fast one kind of rank is; `profiles.Kind.key` names it."""
        return self.profiles / f"{key}.json"

    def cluster(self, name: str) -> Path:
        return self.clusters / f"{name}.json"

    def job_folder(self, job: str) -> Path:
        return self.jobs / job

    @property
    def waiting(self) -> Path:
        """A file for each run that waits for its GPUs."""
        return self.root / "waiting"

    def uncollected(self, job: str) -> Path:
        """There as long as the hosts may hold files of this job that nobody has collected since its end."""
        return self.job_folder(job) / "uncollected"

    def removed(self, job: str) -> Path:
        """There once `orch down` has removed files of this job from its hosts."""
        return self.job_folder(job) / "removed.json"

    def collected(self, job: str) -> Path:
        """Into which run folders this job was collected or pulled, newest first."""
        return self.job_folder(job) / "collected.json"

    def allowed(self, digest: str) -> Path:
        """There once a person has allowed these commands of an inventory to run on this machine."""
        return self.root / "allowed" / digest

    def carried(self, job: str) -> Path:
        """Files of an earlier job on their way from one host to another, while this job is started."""
        return self.job_folder(job) / "carried"

    def launching(self, job: str) -> Path:
        """There from the intent to start a job until every host has been asked to start, and locked all the while."""
        return self.job_folder(job) / "launching"


@dataclass(frozen=True)
class RunFolder:
    """A collected run: `<out>/<job id>/`."""

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
        """What `orch run FILE` repeats the run by."""
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
        """One step of a pipeline; nothing else has one."""
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
        """The logs that were not collected whole: file -> bytes that stayed on the host."""
        return self.node(node) / "left.json"

    def files(self, node: str) -> Path:
        """What the job wrote there beside its logs, under the names that it has in the job's folder."""
        return self.node(node) / "files"

    def incoming(self, node: str) -> Path:
        """Files of `files` that have come in part."""
        return self.node(node) / ".incoming"

    def gpu(self, node: str) -> Path:
        return self.node(node) / "gpu.jsonl"

    def rank(self, node: str, rank: int) -> Path:
        return self.node(node) / f"rank-{rank}"

    def metrics(self, node: str, rank: int) -> Path:
        return self.rank(node, rank) / "metrics.jsonl"
