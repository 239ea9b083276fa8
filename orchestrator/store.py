"""Everything remembered between two commands: clusters, jobs and speed profiles."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import OrchError, StateError
from orchestrator.files import make_folder
from orchestrator.hosts.cluster import ListedCluster
from orchestrator.jobs.job_store import ENDED, JobStore
from orchestrator.record import write_record

if TYPE_CHECKING:
    from orchestrator.planning.profiles import Kind, Profile, Rank


class Store(JobStore):
    def listed_clusters(self) -> list[ListedCluster]:
        """With damaged clusters and their errors."""
        running = [job for job in self.jobs() if job.state not in ENDED]
        return [
            self._listed(name, tuple(job.id for job in running if job.cluster == name)) for name in self.cluster_names()
        ]

    def _listed(self, name: str, running: tuple[str, ...]) -> ListedCluster:
        try:
            cluster = self.cluster(name)
        except StateError as error:
            return ListedCluster(name, running=running, error=str(error))
        return ListedCluster(name, tuple(node.name for node in cluster.nodes), cluster.master, cluster.file, running)

    def save_profile(self, profile: Profile) -> None:
        """An invalid profile never replaces a valid profile."""
        path = self.home.profile(profile.key)
        with self._locked():
            known = self._profile(path)
            if profile.valid or known is None or not known.valid:
                make_folder(self.home.profiles)
                write_record(path, profile)

    def profiles(self, kinds: Mapping[Rank, Kind], cluster: str, *, valid: bool = True) -> dict[Rank, Profile]:
        """By rank: its host's own profile, else its kind's. Damaged profiles are skipped, and invalid ones (with
        valid=False, valid ones).
        """
        found = {}
        for rank, kind in kinds.items():
            for key in (kind.key, kind.of(f"{cluster}/{rank[0]}").key):
                profile = self._profile(self.home.profile(key))
                if profile and profile.valid == valid:
                    found[rank] = profile
        return found

    def _profile(self, path: Path) -> Profile | None:
        from orchestrator.planning.profiles import Profile

        with suppress(OrchError):
            return self._read(path, Profile)
        return None
