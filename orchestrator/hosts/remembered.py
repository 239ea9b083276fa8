"""What is remembered of clusters under $ORCH_HOME, and how anything is written there. The hosts are the truth.

Every write is a temporary file, fsync and rename under a lock; every file carries a schema number. A cluster is the
inventory as it was read, plus an overlay (what `orch node` and `orch master` changed), plus the facts of the last `up`:
the user's own file is never touched. A damaged file is a StateError of its own job or cluster and of nothing else.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import StateError, UsageError
from orchestrator.files import locked, own_folder, write_atomic
from orchestrator.hosts.grammar import NAME
from orchestrator.paths import Home
from orchestrator.record import AnyRecord, RecordError, read_record, write_record

if TYPE_CHECKING:
    from orchestrator.hosts.cluster import Cluster

CLUSTER_VARIABLE = "ORCH_CLUSTER"
"""Chooses the current cluster of one terminal."""


@dataclass(frozen=True)
class Current:
    """The cluster that a command is about if its line names none."""

    name: str
    by: str
    """The variable or the file that names it."""


@dataclass(frozen=True)
class ListedCluster:
    """One remembered cluster in a list of them."""

    name: str
    nodes: tuple[str, ...] = ()
    master: str | None = None
    file: str | None = None
    running: tuple[str, ...] = ()
    """The ids of its jobs that had not ended when they were last refreshed."""
    error: str | None = None
    """Why nothing else is known of it, where its record is damaged."""


class RememberedClusters:
    """unwritten: why something that a reading command learned could not be remembered; such a command goes on."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.unwritten: OSError | None = None

    def save_cluster(self, cluster: Cluster | Callable[[], Cluster], *, current: bool = False) -> Cluster:
        """cluster: or what makes it, under the lock: nobody changes then what it reads. current: it becomes that."""
        with self._locked():
            saved = cluster() if callable(cluster) else cluster
            write_record(self.home.cluster(saved.name), saved.masked())
            if current:
                write_atomic(self.home.current_cluster, saved.name + "\n")
        return saved

    def change_cluster(self, name: str, change: Callable[[Cluster], Cluster], *, current: bool = False) -> Cluster:
        """Reads, changes and writes a cluster under the lock: two commands at once do not undo each other.

        Raises StateError where it is no longer there.
        """

        def changed() -> Cluster:
            if known := self.known_cluster(name):
                return change(known)
            raise StateError(
                f"cluster {name} was removed while this command ran", "`orch up INVENTORY` remembers it again"
            )

        return self.save_cluster(changed, current=current)

    def cluster(self, name: str | None = None) -> Cluster:
        """The named cluster, else the current one. Raises UsageError where there is none."""
        return self._cluster(self.cluster_name(name))

    def cluster_name(self, name: str | None = None) -> str:
        """The same, without a look into it."""
        chosen, known = Current(name, "") if name else self.current(), self.cluster_names()
        if chosen and chosen.name in known:
            return chosen.name
        if not known and not chosen:
            raise UsageError("no cluster yet", "start with `orch up INVENTORY`")
        near = difflib.get_close_matches(chosen.name, known, n=1) if chosen else []
        meant = f"did you mean {near[0]}? " if near else ""
        remembered = f"known: {', '.join(known) or 'none'}"
        if chosen and chosen.by != str(self.home.current_cluster):
            by = f"{chosen.by}: " if chosen.by else ""
            remedy = f"{meant}`orch up INVENTORY` remembers one; {remembered}"
            raise UsageError(f"{by}no cluster named {chosen.name!r} is remembered", remedy)
        raise UsageError(
            f"{self.home.current_cluster} names no cluster that is remembered",
            f"{meant}`orch use NAME` writes it again, or `--cluster NAME`; {remembered}",
        )

    def current(self) -> Current | None:
        """This terminal's, else the one that the last `orch up` or `orch use` chose."""
        if terminals := self.terminals():
            return terminals
        try:
            name = self.home.current_cluster.read_text().strip()
        except (FileNotFoundError, ValueError):
            return None
        return Current(name, str(self.home.current_cluster)) if re.fullmatch(NAME, name) else None

    @staticmethod
    def terminals() -> Current | None:
        """What ORCH_CLUSTER says; None where it is not set, or empty."""
        name = os.environ.get(CLUSTER_VARIABLE)
        return Current(name, CLUSTER_VARIABLE) if name else None

    def use(self, name: str) -> Cluster:
        """Makes a remembered cluster the current one. Raises UsageError where it is unknown."""
        cluster = self.cluster(name)
        with self._locked():
            write_atomic(self.home.current_cluster, cluster.name + "\n")
        return cluster

    def cluster_names(self) -> list[str]:
        return sorted(path.stem for path in self.home.clusters.glob("*.json") if not path.name.startswith("."))

    def known_cluster(self, name: str) -> Cluster | None:
        """None where it is unknown. Raises StateError where it is damaged."""
        return self._cluster(name) if self.home.cluster(name).is_file() else None

    def _cluster(self, name: str) -> Cluster:
        from orchestrator.hosts.cluster import Cluster  # a list of jobs does without, and it is slow to load

        return self._read(self.home.cluster(name), Cluster)

    # ---- files ------------------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        own_folder(self.home.root)
        os.chmod(self.home.root, 0o700)
        with locked(self.home.root / ".lock"):
            yield

    @contextmanager
    def _if_writable(self) -> Iterator[None]:
        """For what is worth remembering, and not worth failing for."""
        try:
            yield
        except OSError as error:
            self.unwritten = error

    def _read(self, path: Path, form: type[AnyRecord]) -> AnyRecord:
        try:
            return read_record(path, form)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise damaged(path, "it is missing") from error
            raise damaged(path, error.strerror or str(error)) from error
        except RecordError as error:
            raise damaged(path, str(error)) from error


def damaged(path: Path, why: str) -> StateError:
    """The error for a file of ours that cannot be used."""
    is_cluster = path.parent.name == "clusters"
    remedy = "`orch up INVENTORY` writes it again" if is_cluster else "`orch jobs --rescan` rebuilds it from the hosts"
    return StateError(f"{path} is damaged ({why})", remedy)
