"""The options of `orch run` as one value."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import UsageError
from orchestrator.planning.host_choice import HostRange, parse_hosts
from orchestrator.planning.launch_plan import Attempt
from orchestrator.planning.request import Words
from orchestrator.planning.variables import read_variables
from orchestrator.starting.retries import first_attempt


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What click read, by the names of its parameters."""

    exp: str | None
    settings: tuple[str, ...]
    resume: str | None
    is_module: bool
    folder: Path | None
    batch: int | None
    pass_local_rank: bool
    no_metrics: bool
    env: tuple[str, ...]
    env_files: tuple[Path, ...]
    nodes: str | None
    hosts: str | None
    detach: bool
    wait: bool
    wait_limit: float | None
    dry_run: bool
    share: bool
    grace: float
    retries: int | None
    retry_on: str
    rejoin: bool
    retry_wait: float
    time_limit: float | None
    cluster: str | None
    name: str | None
    note: str | None
    keep: tuple[str, ...]
    notify: str | None
    save: Path | None
    as_json: bool
    command: tuple[str, ...]

    def words(self) -> Words:
        """What to run. Raises UsageError where --resume says another thing."""
        words = Words(
            exp=self.exp,
            settings=self.settings,
            is_module=self.is_module,
            command=self.command,
            folder=self.folder,
            batch=self.batch,
            pass_local_rank=self.pass_local_rank,
        )
        if self.resume and self.exp:
            raise UsageError("--resume runs what the job ran", "leave --exp out; --set changes its settings")
        return words

    def waits(self) -> bool:
        """Whether it queues for GPUs that are in use. Raises UsageError where it would not take its turn."""
        waits = self.wait or self.wait_limit is not None
        if waits and self.share:
            raise UsageError("--share uses GPUs beside other jobs, --wait waits for their end", "leave one of them out")
        if waits and self.hosts is not None:
            raise UsageError(
                "--hosts does without hosts that are in use, --wait waits for them", "leave one of them out"
            )
        return waits

    def check_notify(self) -> None:
        """Raises UsageError where nobody here would see the end."""
        if self.notify and self.detach:
            raise UsageError(
                "--notify works only while `orch run` follows the job",
                "leave --detach out; `nohup orch run ... &` outlives this terminal",
            )

    def first_attempt(self) -> Attempt | None:
        """None where there is to be no other. Raises UsageError where nobody would see to it."""
        if self.retries is not None and self.detach:
            raise UsageError(
                "--retries works only while `orch run` follows the job",
                "leave --detach out; `nohup orch run ... &` outlives this terminal",
            )
        return first_attempt(self.retries, self.retry_on, rejoin=self.rejoin)

    def measures_steps(self) -> bool:
        """Raises UsageError where there is no script."""
        if self.no_metrics and not self.command:
            raise UsageError("--no-metrics belongs to a script of your own", "leave it out: the trainer writes its own")
        return not self.no_metrics

    def kept(self) -> tuple[str, ...]:
        """Raises UsageError where there is no script."""
        if self.keep and not self.command:
            raise UsageError(
                "--keep belongs to a script of your own",
                "--set checkpoint_every=500, and later `orch run --resume JOB`",
            )
        return tuple(dict.fromkeys(self.keep))

    def wanted_hosts(self) -> HostRange | None:
        """Raises UsageError."""
        return parse_hosts(self.hosts) if self.hosts is not None else None

    def variables(self) -> dict[str, str]:
        """Those for this job alone, also from this process's environment. Raises UsageError with all mistakes."""
        return read_variables(self.env, self.env_files, os.environ)
