"""Files that a job takes over from an earlier job, by `--resume JOB` of a script or `--keep FOLDER`.

    handover = handovers.find(plan, blob)           the files, their job and hosts; changes nothing
    rows = handovers.deliver(plan, handover)        copies them to every host of the new job (`remote/handover.py`)

A host copies its own files. It gets files that only other hosts wrote through this machine: the master's copy, else
the first host's in node order. A file gets its name only when complete and equal to its SHA-256.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from orchestrator.errors import HostError, OrchError, RefusedError, UsageError
from orchestrator.hosts.connections import Connections
from orchestrator.jobs.collect import SPARE_BYTES
from orchestrator.jobs.launch import ASK_S, whose
from orchestrator.jobs.pull import Output, pull
from orchestrator.jobs.running import RunningJob
from orchestrator.owner import read_owner
from orchestrator.paths import RunFolder
from orchestrator.planning.bundle import digests_in
from orchestrator.planning.launch_plan import LaunchPlan
from orchestrator.provision.push import Manifest, ManifestFile, push, read_pieces
from orchestrator.store import Store
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import FOREVER_S, errors, for_each, values
from orchestrator.units import counted, format_bytes, one_line, some

PLACES = ("src", "checkpoints")
"""A script's working folder and its ORCH_CHECKPOINTS, in a job's folder."""
MOST_EARLIER = 10
"""Earlier jobs that --keep searches."""

Rows = list[list[Any]]
"""[name, size, mtime_ns, whether another host wrote it] each."""


@dataclass(frozen=True)
class Handover:
    """own: by host of the new job, its own files. others: files that it lacks, by source."""

    old: LaunchPlan | None = None
    own: Mapping[str, Sequence[Output]] = field(default_factory=dict)
    others: Mapping[str, Mapping[str, Sequence[Output]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Handovers:
    def __init__(self, store: Store, connections: Connections) -> None:
        self._store, self._connections = store, connections

    # ---- which files ----------------------------------------------------------------------------------------------

    def noted(self, plan: LaunchPlan, blob: bytes) -> LaunchPlan:
        """The plan with notes on the files that it would take over."""
        return plan.model_copy(update={"notes": (*plan.notes, *self.find(plan, blob).notes)})

    def find(self, plan: LaunchPlan, blob: bytes) -> Handover:
        """blob: the shipped code. Raises UsageError if the job of --resume has no files or still runs, or if hosts that
        may have them give no answer.
        """
        if not plan.resumes and not plan.keep:
            return Handover()
        earlier = plan.attempt.earlier[-1].job if plan.attempt and plan.attempt.earlier else None
        must = plan.resumes is not None and not (earlier and plan.keep)
        folders = () if plan.resumes else plan.keep
        named = earlier if earlier and plan.keep else plan.resumes
        notes = list[str]()
        for old in [self._store.plan(named)] if named else self._earlier(plan):
            found = self._taken_from(old, plan, blob, folders, must=must, is_attempt=earlier is not None)
            if isinstance(found, Handover):
                return replace(found, notes=(*notes, *found.notes))
            notes += [found] if found else []
        where = f" in {' '.join(f'{folder}/' for folder in folders)}" if folders else ""
        notes.append(f"nothing is carried over: no earlier job of {plan.exp} has files{where} here")
        return Handover(notes=tuple(notes))

    def _earlier(self, plan: LaunchPlan) -> Iterator[LaunchPlan]:
        """Newest first, on the same cluster."""
        me, count = read_owner(self._store.home), 0
        for record in self._store.jobs():
            if record.cluster != plan.cluster or record.exp != plan.exp or record.id == plan.job:
                continue
            try:
                old = self._store.plan(record.id)
            except OrchError:  # a damaged plan
                continue
            if _program(old) == _program(plan) and old.owner == me and count < MOST_EARLIER:
                count += 1
                yield old

    def _taken_from(
        self, old: LaunchPlan, plan: LaunchPlan, blob: bytes, folders: Sequence[str], *, must: bool, is_attempt: bool
    ) -> Handover | str:
        """Returns a note instead if the job has no usable files; "" if no note is needed."""
        with self._connections.apart({}) as connections:
            job = RunningJob(old, self._store, connections)
            try:
                listed = job.outputs()
            except OrchError:
                if must:
                    raise
                return ""
            there = {node: _wanted(listing.files, folders) for node, listing in listed.found.items()}
            away = sorted(listed.errors)
            if not any(there.values()):
                if away and not is_attempt:
                    raise UsageError(
                        f"{some(away, 6)} gave no answer, and may hold files of {old.job}",
                        "bring it back, or leave --resume and --keep out",
                    )
                if must:
                    raise UsageError(
                        f"{old.job} wrote no file on {', '.join(there)}",
                        f"its script saves to its working folder or to ORCH_CHECKPOINTS? `orch logs --job {old.job}`",
                    )
                return ""
            shipped = digests_in(blob) if plan.code.sha256 != old.code.sha256 else {}
            looked = values(for_each(job.hosts, _Look(old, there, shipped), deadline_s=ASK_S + 5))
        if alive := [node for node, (is_alive, _) in looked.items() if is_alive]:
            if must:
                raise UsageError(
                    f"{old.job} still runs on {', '.join(alive)}", f"`orch cancel --job {old.job}`, or wait"
                )
            return f"{old.job} still runs: nothing of it is carried over"
        replaced = {name for _, names in looked.values() for name in names}
        there = {node: [o for o in files if o.name not in replaced] for node, files in there.items() if node in looked}
        away = sorted({*away, *(node.name for node in old.nodes if node.name not in looked)})
        notes = [
            f"{name.partition('/')[2]}: shipped anew, not carried over from {old.job}" for name in sorted(replaced)
        ]
        if away:
            notes.append(f"{some(away, 6)} gave no answer: files that only it has of {old.job} are not carried over")
        for node, listing in listed.found.items():
            notes += [f"{node}: {words}" for words in listing.notices]
        return _shared_out(old, plan, there, notes)

    # ---- delivery -------------------------------------------------------------------------------------------------

    def deliver(self, plan: LaunchPlan, handover: Handover) -> dict[str, Rows]:
        """The files on each host. Raises RefusedError, OrchError."""
        if handover.old is None:
            return {}
        with self._connections.apart({}) as connections:
            delivery = _Delivery(self._store, connections, plan, handover.old, handover.own, handover.others)
            try:
                delivery.run()
            finally:
                shutil.rmtree(delivery.run_folder.root, ignore_errors=True)
        own, others = handover.own, handover.others
        rows = {name: [_row(o, is_foreign=o.foreign) for o in outputs] for name, outputs in own.items()}
        for name, sources in others.items():
            rows[name] += [_row(o, is_foreign=True) for o in _flat(sources)]
        return {name: found for name, found in rows.items() if found}


class _Look:
    """Asks a host whether the old job still runs, and which shipped files differed in it."""

    def __init__(self, old: LaunchPlan, there: Mapping[str, Sequence[Output]], shipped: Mapping[str, str]) -> None:
        self._old = old
        names = {o.name.removeprefix("src/") for files in there.values() for o in files if o.name.startswith("src/")}
        self._twice = {name: shipped[name] for name in names & shipped.keys()}
        folders = {str(above) for name in shipped for above in PurePosixPath(name).parents}
        # A file in place of a folder of the shipped code, or the other way round.
        self._in_the_way = {
            name
            for name in names
            if name in folders or any(str(above) in shipped for above in PurePosixPath(name).parents)
        }

    def __call__(self, host: ConnectedHost) -> tuple[bool, frozenset[str]]:
        old = {"workdir": host.workdir, "job": self._old.job, "code": self._old.code.sha256}
        request = {"action": "look", **old, "shipped": self._twice}
        answer = ask.ask(host, "handover", request, timeout_s=ASK_S)

        def read() -> tuple[bool, frozenset[str]]:
            replaced = self._twice.keys() & {str(name) for name in answer["replaced"]}
            return bool(answer["alive"]), frozenset(f"src/{name}" for name in {*replaced, *self._in_the_way})

        return ask.understood(host.node, read)


class _Delivery:
    def __init__(
        self,
        store: Store,
        connections: Connections,
        plan: LaunchPlan,
        old: LaunchPlan,
        own: Mapping[str, Sequence[Output]],
        others: Mapping[str, Mapping[str, Sequence[Output]]],
    ) -> None:
        self._connections, self._plan, self._old, self._own, self._others = connections, plan, old, own, others
        self.run_folder = RunFolder(store.home.carried(plan.job))
        cluster = store.cluster(plan.cluster)
        self._through = self._passing_through()
        names = {*(node for node in own if own[node] or others[node]), *self._through}
        self._hosts = _all(connections.open([cluster.node(name) for name in sorted(names)]))

    def _passing_through(self) -> dict[str, list[Output]]:
        """By source: files that other hosts lack."""
        found: dict[str, dict[str, Output]] = {}
        for sources in self._others.values():
            for source, outputs in sources.items():
                found.setdefault(source, {}).update((output.name, output) for output in outputs)
        return {source: list(outputs.values()) for source, outputs in found.items()}

    def run(self) -> None:
        takers = {name: name for name in self._own if name in self._hosts}
        folders = _all(for_each(takers, self._copied, deadline_s=FOREVER_S))
        if not self._through:
            return
        self._fetch()
        files = {(source, o.name): self._hashed(source, o) for source, some in self._through.items() for o in some}

        def send(name: str) -> None:
            for source, outputs in self._others[name].items():
                manifest = Manifest(self.run_folder.files(source), tuple(files[source, o.name] for o in outputs))
                host = {name: self._connections.current(name)}
                _all(push(host, manifest, folders[name], lambda _: None, self._connections.reopen))

        _all(for_each({name: name for name in takers if self._others[name]}, send, deadline_s=FOREVER_S))

    def _copied(self, name: str) -> str:
        """Returns the folder for its files. Raises HostError."""
        own, others = self._own[name], _flat(self._others[name])
        needed = sum(o.size for o in (*own, *others))
        workdir = self._plan.node(name).workdir
        request = {
            "action": "copy",
            "workdir": workdir,
            "job": self._plan.job,
            **whose(self._plan),
            "from": {"workdir": self._old.node(name).workdir if own else workdir, "job": self._old.job},
            "files": [[o.name, o.size, o.mtime_ns, o.inode] for o in own],
            "needed_bytes": needed,
        }
        with ask.exchange(self._hosts[name], "handover", request) as words:
            for word in words:
                if "end" in word:
                    return ask.understood(name, partial(_folder, word))
        raise HostError(name, "its answer was cut short", "run again")

    def _fetch(self) -> None:
        needed = sum(o.size for outputs in self._through.values() for o in outputs)
        root = self.run_folder.root
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if needed + SPARE_BYTES > (free := shutil.disk_usage(root).free):
            through = f"{format_bytes(needed)} of {self._old.job} pass through {root.parent}"
            raise OrchError(
                f"{through}, and {format_bytes(free)} are free there",
                "free space there, or set ORCH_HOME to a folder on a larger disk",
            )
        hosts = {source: self._in_old_folder(self._hosts[source]) for source in self._through}
        pulled = _all(pull(self._old, hosts, self.run_folder, self._through, lambda _: None, self._reopened))
        for source, result in pulled.items():
            for name, why in result.left.items():
                raise RefusedError([HostError(source, f"{name} of {self._old.job} {why}", "run again")])

    def _in_old_folder(self, host: ConnectedHost) -> ConnectedHost:
        return replace(host, workdir=self._old.node(host.node).workdir)

    def _reopened(self, name: str) -> ConnectedHost:
        return self._in_old_folder(self._connections.reopen(name))

    def _hashed(self, source: str, output: Output) -> ManifestFile:
        sha256 = hashlib.sha256()
        for piece in read_pieces(self.run_folder.files(source) / output.name):
            sha256.update(piece)
        return ManifestFile(output.name, output.size, sha256.hexdigest())


def _folder(word: Mapping[str, Any]) -> str:
    return one_line(word["end"]["folder"], 4096)


def _all(outcomes: Mapping[str, Any]) -> dict[str, Any]:
    """Raises RefusedError unless every host succeeded."""
    if errors(outcomes):
        raise RefusedError(errors(outcomes))
    return values(outcomes)


def _program(plan: LaunchPlan) -> tuple[str, ...]:
    """Identifies the program, without its arguments."""
    name = next((word for word in plan.nodes[0].command if Path(word).name == plan.exp), "")
    return plan.kind, plan.exp, plan.code.source, name


def _wanted(files: Sequence[Output], folders: Sequence[str]) -> list[Output]:
    """folders: of the script's working folder; () means all."""

    def is_wanted(name: str) -> bool:
        top, *parts = name.split("/")
        if top not in PLACES or any(part.startswith(".orch-") for part in parts):
            return False
        return not folders or any(name.startswith(f"src/{folder}/") for folder in folders)

    return [output for output in files if is_wanted(output.name)]


def _shared_out(
    old: LaunchPlan, plan: LaunchPlan, there: Mapping[str, Sequence[Output]], notes: Sequence[str]
) -> Handover:
    """A host keeps its own files. Its copy of another host's file counts only if it equals that host's current file:
    the other ranks went on from the newer one.
    """
    order = [old.master, *(node.name for node in old.nodes if node.name != old.master)]
    sources: dict[str, tuple[str, Output]] = {}
    for is_copy in (False, True):
        for node in order:
            for output in there.get(node, ()):
                if output.foreign == is_copy:
                    sources.setdefault(output.name, (node, output))
    own: dict[str, list[Output]] = {}
    others: dict[str, dict[str, list[Output]]] = {}
    for name in (node.name for node in plan.nodes):
        own[name] = [o for o in there.get(name, ()) if not o.foreign or _is_same(o, sources[o.name][1])]
        others[name] = {}
        for wanted in sorted(sources.keys() - {output.name for output in own[name]}):
            source, output = sources[wanted]
            if not (output.foreign and name in there):  # else this host deleted it
                others[name].setdefault(source, []).append(output)
    return Handover(old, own, others, (*_words(old, own, others), *notes))


def _is_same(copy: Output, output: Output) -> bool:
    """A copy keeps the original's time."""
    return (copy.size, copy.mtime_ns) == (output.size, output.mtime_ns)


def _words(
    old: LaunchPlan, own: Mapping[str, Sequence[Output]], others: Mapping[str, Mapping[str, Sequence[Output]]]
) -> Iterator[str]:
    parts = []
    for node in old.nodes:
        given = {o.name: o for o in own.get(node.name, ())}
        given |= {o.name: o for sources in others.values() for o in sources.get(node.name, ())}
        if given:
            size = format_bytes(sum(o.size for o in given.values()))
            parts.append(f"{counted(len(given), 'file')} ({size}) from {node.name}")
    sent = {name: sum(o.size for o in _flat(sources)) for name, sources in others.items() if sources}
    travels = f"; {format_bytes(sum(sent.values()))} to be sent to {some(list(sent), 6)}" if sent else ""
    yield f"carried over from {old.job}: {', '.join(parts)}{travels}"


def _row(output: Output, *, is_foreign: bool) -> list[Any]:
    return [output.name, output.size, output.mtime_ns, is_foreign]


def _flat(sources: Mapping[str, Sequence[Output]]) -> list[Output]:
    return [output for outputs in sources.values() for output in outputs]
