"""Speed profiles of a Slurm cluster's types of hosts: a job of one host of each, which brings its profiles home.

    profiling = SlurmProfiling(controller, cluster, ProfileRequest.of(JobSpec(exp="resnet152_cifar", nodes=["v100"])))
    for found in profiling.run(shown):
        found.rank, found.profile.samples_per_s(512), found.fresh

Profiles are of a kind of host, so they hold for all hosts of a type.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from pydantic import Field, ValidationError

from orchestrator.controller import Controller
from orchestrator.errors import OrchError
from orchestrator.hosts.cluster import Cluster
from orchestrator.jobs.job_store import JobRecord
from orchestrator.jobs.slurm_queue import LOOK_S
from orchestrator.measuring.profiling import ProfileRequest
from orchestrator.planning.profiles import Profile, RankProfile
from orchestrator.record import SCHEMA, Record, Words
from orchestrator.starting.retries import Asked

FILE = "profiled.json"


class RankMeasured(Record):
    node: Words
    local_rank: int = Field(ge=0, lt=1 << 16)
    fresh: bool
    profile: Profile


class Measured(Record):
    """The batch step leaves it for this home."""

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    ranks: tuple[RankMeasured, ...] = Field(max_length=1 << 12)

    @classmethod
    def of(cls, found: Sequence[RankProfile]) -> Measured:
        ranks = [
            RankMeasured(node=each.rank[0], local_rank=each.rank[1], fresh=each.fresh, profile=each.profile)
            for each in found
        ]
        return cls(schema=1, ranks=tuple(ranks))


class SlurmProfiling:
    def __init__(self, controller: Controller, cluster: Cluster, wanted: ProfileRequest) -> None:
        self._controller, self._cluster, self._wanted = controller, cluster, wanted
        self._queue, self._login = controller.jobs.slurm, controller.jobs.slurm.login(cluster)

    def run(self, shown: Callable[[str], None], *, again: bool = False) -> list[RankProfile]:
        """shown: called with Slurm's reason and expected start. Raises OrchError."""
        asked = Asked(self._cluster, self._wanted.job)
        record = self._controller.submissions.submit(asked, measures="all" if again else "missing")
        try:
            self._await_end(record, shown)
            found = self._read(record)
        except BaseException:  # a Ctrl-C, too: a partial profile is useless
            with suppress(OrchError):
                self._queue.cancel(record)
            raise
        self._queue.learn(self._cluster, record.id)
        self._queue.forget(record)
        for each in found:
            self._controller.store.save_profile(each.profile)
        return found

    def _await_end(self, record: JobRecord, shown: Callable[[str], None]) -> None:
        said = ""
        while not (found := self._queue.state(record)).is_over:
            words = found.words if found.phase in ("queued", "held") else "measuring"
            if words != said:
                said = words
                shown(f"{record.id}: {words}")
            time.sleep(LOOK_S)

    def _read(self, record: JobRecord) -> list[RankProfile]:
        text = self._queue.left(record, FILE)
        try:
            ranks = Measured.model_validate_json(text).ranks
        except ValidationError as error:
            why = self._queue.last_error(record) or "its batch step left no profile"
            raise OrchError(f"not measured: {why}", f"its log: submitted/{record.id}/slurm.log") from error
        return [RankProfile((each.node, each.local_rank), each.profile, each.fresh) for each in ranks]
