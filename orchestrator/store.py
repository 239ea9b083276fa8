"""What the controller remembers between two commands, under $ORCH_HOME: clusters and jobs. The hosts are the truth.

Every write is a temporary file, fsync and rename under a lock; every file carries a schema number. A cluster is the
inventory as it was read, plus an overlay (what `orch node` and `orch master` changed), plus the facts of the last `up`:
the user's own file is never touched.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, Field

from orchestrator.errors import OrchError, UsageError
from orchestrator.facts import NodeFacts
from orchestrator.files import locked, own_folder, write_atomic
from orchestrator.inventory import Node
from orchestrator.paths import Home
from orchestrator.records import SCHEMA, JobRecord, LaunchPlan, Record, masked_env, write_record


class Problem(Record):
    """What keeps a node from taking part: a HostError's words."""

    message: str
    remedy: str = ""


class Cluster(Record):
    """A remembered cluster."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    name: str
    file: str
    """The inventory file it came from."""
    nodes: tuple[Node, ...]
    added: dict[str, str] = Field(default_factory=dict)
    """When each node was first seen, ISO 8601."""
    removed: tuple[str, ...] = ()
    """Of the file's nodes, those that `orch node remove` took out."""
    extra: tuple[Node, ...] = ()
    """Nodes that the file does not have: `orch node add`."""
    released: tuple[str, ...] = ()
    """Kept, but given no job until restored."""
    master_pin: str | None = None
    """A person's word (`orch master`): it beats the election."""
    master: str | None = None
    master_reason: str = ""
    facts: dict[str, NodeFacts] = Field(default_factory=dict)
    problems: dict[str, Problem] = Field(default_factory=dict)
    """Nodes that could not be used at the last `up`, and why."""

    def node(self, name: str) -> Node:
        """Raises UsageError naming the nodes there are."""
        for node in self.nodes:
            if node.name == name:
                return node
        known = ", ".join(node.name for node in self.nodes)
        raise UsageError(f"{name}: no such node in cluster {self.name}", f"its nodes: {known}")

    def masked(self) -> Cluster:
        """The form that is kept: without the values of `env` that may be secrets; see `Controller.plan`."""
        update = {part: tuple(_masked(node) for node in getattr(self, part)) for part in ("nodes", "extra")}
        return self.model_copy(update=update)

    def active(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.name not in self.released)


def _masked(node: Node) -> Node:
    return node.model_copy(update={"env": masked_env(node.env)})


RecordT = TypeVar("RecordT", bound=Record)


class Store:
    def __init__(self, home: Home) -> None:
        self.home = home

    # ---- clusters ---------------------------------------------------------------------------------------------

    def save_cluster(self, cluster: Cluster, *, current: bool = False) -> None:
        with self._locked():
            write_record(self.home.cluster(cluster.name), cluster.masked())
            if current:
                write_atomic(self.home.current_cluster, cluster.name + "\n")

    def cluster(self, name: str | None = None) -> Cluster:
        """The named cluster, else the current one. Raises UsageError where there is none."""
        if name is None:
            try:
                name = self.home.current_cluster.read_text().strip()
            except FileNotFoundError:
                raise UsageError("no cluster yet", "start with `orch up INVENTORY`") from None
        if not self.home.cluster(name).is_file():
            known = ", ".join(sorted(path.stem for path in self.home.clusters.glob("*.json"))) or "none"
            raise UsageError(f"no cluster named {name!r} is remembered", f"`orch up INVENTORY` first; known: {known}")
        return self._read(self.home.cluster(name), Cluster)

    def known_cluster(self, name: str) -> Cluster | None:
        return self._read(self.home.cluster(name), Cluster) if self.home.cluster(name).is_file() else None

    # ---- jobs -------------------------------------------------------------------------------------------------

    def save_job(self, record: JobRecord, plan: LaunchPlan | None = None) -> None:
        folder = self.home.job(record.id)
        with self._locked():
            folder.mkdir(parents=True, exist_ok=True)
            if plan:
                write_record(folder / "plan.json", plan.masked())
            write_record(folder / "job.json", record)

    def change_job(self, job: str, change: Callable[[JobRecord], JobRecord]) -> JobRecord:
        """Reads, changes and writes a job's record under the lock: two commands at once do not undo each other."""
        with self._locked():
            known = self.job(job)
            record = change(known)
            if record != known:
                write_record(self.home.job(job) / "job.json", record)
        return record

    def job(self, job: str) -> JobRecord:
        return self._read(self.home.job(job) / "job.json", JobRecord)

    def plan(self, job: str) -> LaunchPlan:
        return self._read(self.home.job(job) / "plan.json", LaunchPlan)

    def jobs(self) -> list[JobRecord]:
        """Newest first."""
        found = [self.job(path.parent.name) for path in self.home.jobs.glob("*/job.json")]
        return sorted(found, key=lambda job: (job.started or "", job.id), reverse=True)

    def find_job(self, wanted: str) -> str:
        """The id meant by an id, a unique prefix of one, or `latest`. Raises UsageError where none or several fit."""
        ids = [job.id for job in self.jobs()]
        if wanted == "latest" and ids:
            return ids[0]
        fitting = [job for job in ids if job == wanted] or [job for job in ids if job.startswith(wanted)]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise UsageError(f"{wanted!r} fits several jobs: {', '.join(fitting[:5])}", "give more of the id")
        if not ids:
            raise UsageError("no job yet", "start one with `orch run`")
        raise UsageError(f"no job {wanted!r}", f"the latest: {', '.join(ids[:5])} (`orch jobs` lists all)")

    # ---- files ------------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        own_folder(self.home.root)
        os.chmod(self.home.root, 0o700)
        with locked(self.home.root / ".lock"):
            yield

    def _read(self, path: Path, form: type[RecordT]) -> RecordT:
        try:
            value: dict[str, Any] = json.loads(path.read_text())
            if value.get("schema", 0) > SCHEMA:
                raise OrchError(f"{path} was written by a newer orch (schema {value['schema']})", "update this one")
            return form.model_validate(value)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise OrchError(
                f"{path} is damaged ({str(error).splitlines()[0]})", "remove it; the hosts keep the truth"
            ) from error
