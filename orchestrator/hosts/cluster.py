"""Remembered clusters under $ORCH_HOME: nodes, facts, environments, master, and changes to them.

A cluster is the inventory plus an overlay (`orch node`, `orch master`, `orch setup`) plus the last facts; the user's
file is never changed. Files are replaced atomically under a lock. A damaged file is a StateError.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field

from orchestrator.errors import HostError, StateError, UsageError
from orchestrator.files import locked, own_folder, write_atomic
from orchestrator.hosts.facts import NodeFacts
from orchestrator.hosts.grammar import NAME, names_in
from orchestrator.hosts.inventory import Node, SlurmEngine
from orchestrator.paths import Home
from orchestrator.record import SCHEMA, AnyRecord, Record, RecordError, read_record, write_record


class Problem(Record):
    message: str
    remedy: str = ""
    at: str = ""

    def as_error(self, node: str) -> HostError:
        error = HostError(node, self.message, self.remedy)
        error.at = self.at
        return error


class Venv(Record):
    """An environment of `orch setup` in place of the inventory's `base_python`."""

    python: str
    base_python: str
    torch: str
    torchvision: str


WITHIN_A_JOB = "`orch run`, then `orch top`, `why`, `logs`, `ssh`"


class Cluster(Record):
    model_config = ConfigDict(frozen=True, defer_build=True, extra="ignore", populate_by_name=True)

    schema_: int = Field(SCHEMA, alias="schema", serialization_alias="schema")
    name: str
    file: str
    nodes: tuple[Node, ...]
    added: dict[str, str] = Field(default_factory=dict)
    probed: dict[str, str] = Field(default_factory=dict)
    """Time of each node's last probe, successful or not, ISO 8601."""
    removed: tuple[str, ...] = ()
    """Nodes of the file that `orch node remove` took out."""
    extra: tuple[Node, ...] = ()
    extra_keys: dict[str, dict[str, Any]] = Field(default_factory=dict)
    defaults: dict[str, Any] = Field(default_factory=dict)
    released: tuple[str, ...] = ()
    """Nodes without jobs until restored."""
    venvs: dict[str, Venv] = Field(default_factory=dict)
    """By node; `nodes` already has these Pythons."""
    master_pin: str | None = None
    """Set by `orch master`; overrides the election."""
    master: str | None = None
    master_reason: str = ""
    engine: SlurmEngine | None = None
    """Then `nodes` are all hosts that Slurm declares of the file's types."""
    facts: dict[str, NodeFacts] = Field(default_factory=dict)
    problems: dict[str, Problem] = Field(default_factory=dict)

    def node(self, name: str) -> Node:
        for node in self.nodes:
            if node.name == name:
                return node
        from trainer.shared.setting_fields import close_names  # only for this message

        known = [node.name for node in self.nodes]
        near = close_names(name, known, cutoff=0.76)
        meant = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"{name}: no such node in cluster {self.name}", f"{meant}its nodes: {', '.join(known)}")

    @property
    def login(self) -> Node:
        """Slurm's login host, with the work folder that all hosts share. Only with an engine."""
        assert self.engine  # noqa: S101 - the caller's
        return login_host(self.nodes[0], self.engine)

    @property
    def types(self) -> Mapping[str, list[Node]]:
        """The hosts of each type. Only with an engine."""
        found: dict[str, list[Node]] = {}
        for node in self.nodes:
            found.setdefault(node.kind or node.name, []).append(node)
        return found

    def of_types(self, counts: Mapping[str, int]) -> Cluster | None:
        """Hosts that a job may get, as a cluster without an engine, for a plan. counts: hosts by type. None if no job
        has examined a host of some type.
        """
        nodes, facts = list[Node](), dict[str, NodeFacts]()
        for kind, count in counts.items():
            seen = [node.name for node in self.types.get(kind, ()) if node.name in self.facts]
            if not seen:
                return None
            for node in sorted(self.types[kind], key=lambda node: node.name not in seen)[:count]:
                nodes.append(node.model_copy(update={"env": {}, "prepare": None}))
                facts[node.name] = self.facts.get(node.name) or self.facts[seen[0]].model_copy(
                    update={"node": node.name}
                )
        return self.model_copy(update={"engine": None, "nodes": tuple(nodes), "facts": facts})

    def refuse_engine(self, instead: str = WITHIN_A_JOB) -> None:
        """Raises UsageError if its hosts are only there within a job."""
        if self.engine:
            raise UsageError(f"cluster {self.name} belongs to Slurm: its hosts are there only within a job", instead)

    def names(self, listed: str | Sequence[str] | None) -> list[str]:
        """Expands --nodes; plain names are not checked. Raises UsageError."""
        listed = listed if isinstance(listed, str) or listed is None else ",".join(listed)
        return names_in(listed or None, [node.name for node in self.nodes], f"cluster {self.name}")

    def with_files(self, listed: str | None) -> list[Node]:
        """The nodes of --nodes to which files are copied; on Slurm the login host, whose disk all share."""
        if self.engine and listed:
            raise UsageError("--nodes does not work on Slurm", "leave it out: all hosts see the login host's folder")
        return [self.login] if self.engine else self.chosen(self.names(listed))

    def chosen(self, only: Sequence[str]) -> list[Node]:
        return [self.node(name) for name in dict.fromkeys(only)] or list(self.active())

    def with_venvs(self, venvs: Mapping[str, Venv]) -> Cluster:
        base = {name: venv.base_python for name, venv in self.venvs.items()}
        python = {**base, **{name: venv.python for name, venv in venvs.items()}}
        nodes = tuple(node.model_copy(update={"python": python.get(node.name, node.python)}) for node in self.nodes)
        return self.model_copy(update={"nodes": nodes, "venvs": dict(venvs)})

    def masked(self) -> Cluster:
        """Without `prepare` and possible secrets in `env`. `activate` stays, since each command needs it."""
        update = {part: tuple(_masked(node) for node in getattr(self, part)) for part in ("nodes", "extra")}
        env, prepare = masked_env(self.defaults.get("env", {})), mask(self.defaults.get("prepare"))
        secret = {key: value for key, value in (("env", env), ("prepare", prepare)) if value}
        return self.model_copy(update={**update, "defaults": {**self.defaults, **secret}})

    def active(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.name not in self.released)


def login_host(node: Node, engine: SlurmEngine) -> Node:
    """node: any host or type of that engine; the login host needs no GPU and no network of theirs."""
    bare = {"device": "cpu", "gpus": None, "interface": None, "bandwidth_bps": None, "note": None}
    return node.model_copy(update={"name": node.host, "workdir": engine.workdir, **bare})


def _masked(node: Node) -> Node:
    return node.model_copy(update={"env": masked_env(node.env), "prepare": mask(node.prepare)})


# Changes to a remembered cluster, applied under the store's lock: `store.change_cluster(name, change)`. Pure.


def with_known(of_file: Cluster, known: Cluster) -> Cluster:
    """Applies the recorded overlay to a fresh read of the file."""
    nodes = tuple(node for node in of_file.nodes if node.name not in known.removed)
    nodes += tuple(node for node in known.extra if node.name not in {n.name for n in nodes})
    own = {node.name: node.python for node in nodes}  # of the file as it is now
    kept = ("added", "probed", "released", "removed", "extra", "extra_keys", "master_pin")
    seen = {part: only(getattr(known, part), own) for part in ("facts", "problems")}
    cluster = of_file.model_copy(update={"nodes": nodes, **{name: getattr(known, name) for name in kept}, **seen})
    venvs = only(known.venvs, own)
    return cluster.with_venvs(
        {name: venv.model_copy(update={"base_python": own[name]}) for name, venv in venvs.items()}
    )


def with_node(cluster: Cluster, keys: Mapping[str, Any], node: Node) -> Cluster:
    """keys: as given, without defaults; {}: the node is of the file. Raises UsageError if the name is taken."""
    if node.name in {other.name for other in cluster.nodes}:
        raise UsageError(f"{node.name} is already in cluster {cluster.name}", "choose another name")
    changed = {
        "nodes": (*cluster.nodes, node),
        "extra": (*cluster.extra, *([node] if keys else [])),
        "extra_keys": {**cluster.extra_keys, **({node.name: dict(keys)} if keys else {})},
        "removed": tuple(name for name in cluster.removed if name != node.name),
    }
    return cluster.model_copy(update=changed)


def without_node(cluster: Cluster, name: str) -> Cluster:
    """Raises UsageError if the node is unknown or the last one."""
    node = cluster.node(name)
    if len(cluster.nodes) == 1:
        raise UsageError(
            f"{name} is the last node of cluster {cluster.name}", "`orch down --forget` forgets the cluster"
        )
    update = {
        "nodes": tuple(other for other in cluster.nodes if other is not node),
        "extra": tuple(other for other in cluster.extra if other.name != name),
        "extra_keys": all_but(cluster.extra_keys, {name}),
        "removed": (*cluster.removed, name),
        "facts": all_but(cluster.facts, {name}),
        "problems": all_but(cluster.problems, {name}),
        "venvs": all_but(cluster.venvs, {name}),
        "master_pin": None if cluster.master_pin == name else cluster.master_pin,
    }
    return cluster.model_copy(update=update)


def released(cluster: Cluster, name: str, *, restore: bool) -> Cluster:
    """Raises UsageError if a release would leave no usable host."""
    cluster.node(name)
    others = tuple(other for other in cluster.released if other != name)
    if not restore and not {node.name for node in cluster.active()} - {name} - cluster.problems.keys():
        raise UsageError(f"{name} is the only usable host of cluster {cluster.name}", "restore another one first")
    return cluster.model_copy(update={"released": others if restore else (*others, name)})


def with_made(cluster: Cluster, venvs: Mapping[str, Venv | None]) -> Cluster:
    """None removes an environment; unknown nodes are ignored."""
    there = {node.name: venvs[node.name] for node in cluster.nodes if node.name in venvs}
    kept = {**all_but(cluster.venvs, set(there)), **{name: venv for name, venv in there.items() if venv}}
    return cluster.with_venvs(kept)


def all_but(values: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def only(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


# The store.

CLUSTER_VARIABLE = "ORCH_CLUSTER"


@dataclass(frozen=True)
class Current:
    name: str
    by: str


@dataclass(frozen=True)
class ListedCluster:
    name: str
    nodes: tuple[str, ...] = ()
    master: str | None = None
    file: str | None = None
    running: tuple[str, ...] = ()
    error: str | None = None


class RememberedClusters:
    """unwritten: the error of a reading command that could not store its result, and continued."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.unwritten: OSError | None = None

    def save_cluster(self, cluster: Cluster | Callable[[], Cluster], *, current: bool = False) -> Cluster:
        """cluster: or a function that makes it, called under the lock."""
        with self._locked():
            saved = cluster() if callable(cluster) else cluster
            write_record(self.home.cluster(saved.name), saved.masked())
            if current:
                write_atomic(self.home.current_cluster, saved.name + "\n")
        return saved

    def change_cluster(self, name: str, change: Callable[[Cluster], Cluster], *, current: bool = False) -> Cluster:
        """Reads, changes and writes under one lock. Raises StateError if the cluster was removed."""

        def changed() -> Cluster:
            if known := self.known_cluster(name):
                return change(known)
            raise StateError(
                f"cluster {name} was removed while this command ran", "`orch up INVENTORY` remembers it again"
            )

        return self.save_cluster(changed, current=current)

    def cluster(self, name: str | None = None) -> Cluster:
        """The named cluster, else the current one. Raises UsageError."""
        return self._cluster(self.cluster_name(name))

    def own_cluster(self, name: str | None = None, instead: str = WITHIN_A_JOB) -> Cluster:
        """A cluster whose hosts can be asked at any time. instead: the remedy on Slurm. Raises UsageError."""
        cluster = self.cluster(name)
        cluster.refuse_engine(instead)
        return cluster

    def cluster_name(self, name: str | None = None) -> str:
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
        if terminals := self.terminals():
            return terminals
        try:
            name = self.home.current_cluster.read_text().strip()
        except (FileNotFoundError, ValueError):
            return None
        return Current(name, str(self.home.current_cluster)) if re.fullmatch(NAME, name) else None

    @staticmethod
    def terminals() -> Current | None:
        name = os.environ.get(CLUSTER_VARIABLE)
        return Current(name, CLUSTER_VARIABLE) if name else None

    def use(self, name: str) -> Cluster:
        """Makes a cluster the current one. Raises UsageError if it is unknown."""
        cluster = self.cluster(name)
        with self._locked():
            write_atomic(self.home.current_cluster, cluster.name + "\n")
        return cluster

    def forget_cluster(self, name: str) -> None:
        with self._locked():
            self.home.cluster(name).unlink(missing_ok=True)
            if self.home.current_cluster.is_file() and self.home.current_cluster.read_text().strip() == name:
                self.home.current_cluster.unlink()

    def cluster_names(self) -> list[str]:
        return sorted(path.stem for path in self.home.clusters.glob("*.json") if not path.name.startswith("."))

    def known_cluster(self, name: str) -> Cluster | None:
        """None if it is unknown. Raises StateError if it is damaged."""
        return self._cluster(name) if self.home.cluster(name).is_file() else None

    def _cluster(self, name: str) -> Cluster:
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
    is_cluster = path.parent.name == "clusters"
    remedy = "`orch up INVENTORY` writes it again" if is_cluster else "`orch jobs --rescan` rebuilds it from the hosts"
    return StateError(f"{path} is damaged ({why})", remedy)


# Environment variables and shell without possible secrets, fit to be shown. Pure.

MASK = "***"

# Settings of known libraries. The value of any other variable of `env` may be a secret, whatever its name.
_HARMLESS = re.compile(
    r"(OMP|MKL|KMP|OPENBLAS|NCCL|GLOO|TP|UCX|CUDA|CUDNN|CUBLAS|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|XLA|ORCH)_[A-Z0-9_]+"
    r"|PYTHON[A-Z]+|(LD_LIBRARY_)?PATH|TMPDIR|LANG|TZ|LC_[A-Z]+"
)

_SECRET = re.compile(r"token|secret|passw|credential|api_?key|private_?key|access_?key", re.IGNORECASE)


def masked_env(env: dict[str, str]) -> dict[str, str]:
    harmless = {name for name in env if _HARMLESS.fullmatch(name) and not _SECRET.search(name)}
    return {name: value if name in harmless else MASK for name, value in env.items()}


def mask(shell: str | None) -> str | None:
    """Any word of a script may be a secret."""
    return shell and MASK
