"""One job over all its hosts: the two-phase start, watching, cancelling, and what state it is in.

Starting: `prepare` on every host at once (folder as lock, code, GPU claims, a waiting supervisor); only when all have
answered, `go`. If one refuses, the others are undone and nothing has run. From `go` on the hosts need no controller.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, TypeVar

from pydantic import ValidationError

from orchestrator.errors import ConnectError, HostError, HostsError
from orchestrator.jobs.faults import faults_of, in_own_words, own_loss
from orchestrator.jobs.frames import Beat, End, Frame, Held, read_frames
from orchestrator.jobs.record import ENDED, FirstFailure, JobRecord, JobState
from orchestrator.jobs.stall import joined, stall_of
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.text import one_line
from orchestrator.transport import ask
from orchestrator.transport.ask import Host
from orchestrator.transport.fanout import errors, for_each, values

PREPARE_S = 120.0
START_S = 2 * PREPARE_S + 30
"""A job that no host knows of may still be on its way for this long."""
ASK_S = 30.0
_NO_WORD = "no supervisor and no final record on any host"
MAX_RECALLS = 20
"""Answers, of at most a megabyte each, that one host may give to one rescan."""
RETRY_S = 1.0
WAITING_FRAMES = 64
"""So much may have come and not been looked at, a piece of 256 KiB each at most; then the links wait, never the job."""
SMALL_BYTES = 1 << 16
"""Code up to this size is sooner sent than asked for."""

R = TypeVar("R")


def launch(plan: LaunchPlan, hosts: Mapping[str, Host], blob: bytes, undone: Callable[[], None] = lambda: None) -> None:
    """Starts the job on all hosts or on none. Raises HostsError with every host's refusal.

    undone: called before it raises, if every host has confirmed that nothing of the job is left there.
    """
    token = secrets.token_hex(32)
    kept = plan.masked().model_dump(mode="json", by_alias=True)
    requests = {
        node.name: {
            "action": "prepare",
            "workdir": node.workdir,
            "node": node_request(plan, node, token),
            "plan": kept,  # lies on every host, so that a controller that lost its own can ask for it
        }
        for node in plan.nodes
    }
    answered = set[str]()  # nothing of ours is still on its way there

    def prepare(name: str, code: bytes) -> dict[str, Any]:
        request = {**requests[name], "blob_bytes": len(code)}
        answered.discard(name)
        try:
            answer = ask.ask(hosts[name], "prepare", request, blob=code, timeout_s=PREPARE_S)
        except HostError as error:
            if type(error) is HostError:  # the host's own refusal; any other says that no answer came
                answered.add(name)
            raise
        answered.add(name)
        return answer

    def undo(name: str) -> dict[str, Any]:
        return _ask(hosts[name], plan, "undo", token=token, fence=name not in answered, **_whose(plan))

    def prepare_with_code(name: str) -> dict[str, Any]:
        answer = prepare(name, blob if len(blob) <= SMALL_BYTES else b"")
        return prepare(name, blob) if answer.get("need_code") else answer

    try:
        prepared = _on_all(plan, prepare_with_code, PREPARE_S)
        if errors(prepared):
            raise HostsError(errors(prepared))
        answers = values(prepared)
        hub_port = ask.understood(plan.master, lambda: int(answers[plan.master]["hub_port"]))
        several = plan.nodes if len(plan.nodes) > 1 else ()
        peers = {node.name: _place(node, answers[node.name]) for node in several}
        told = _on_all(plan, lambda name: _ask(hosts[name], plan, "go", hub_port=hub_port, peers=peers), ASK_S)
        if errors(told):
            raise HostsError(errors(told))
    except BaseException:  # a Ctrl-C, too: whatever was begun is undone, and cancelled where it already runs
        if not errors(_on_all(plan, undo, ASK_S)):
            undone()
        raise


def _place(node: NodePlan, answer: Mapping[str, Any]) -> list[Any]:
    """Where the others find this host's supervisor: the fields of `remote/peers.Place`."""
    port = ask.understood(node.name, lambda: int(answer["peer_port"]))
    return [node.address, port, node.interface or "INTERFACE", one_line(answer.get("firewall"), 20)]


def node_request(plan: LaunchPlan, node: NodePlan, token: str) -> dict[str, Any]:
    """What goes into this host's node.json. token: hex, shared by this job's supervisors and nobody else."""
    return {
        "schema": 1,
        "job": plan.job,
        "exp": plan.exp,
        **_whose(plan),
        "created": plan.created,
        "settings": plan.settings,
        "name": node.name,
        "members": [member.name for member in plan.nodes],
        "is_master": node.name == plan.master,
        "master": plan.master,
        "master_address": plan.master_address,
        "rendezvous_port": plan.rendezvous_port,
        "address": node.address,
        "token": token,
        "code": plan.code.sha256,
        "torchrun": node.torchrun,
        "command": node.command,
        "env": node.env,
        "shares": node.shares,
        "rank_numbers": list(node.rank_numbers),
        "gpu_uuids": node.gpu_uuids,
        "share_gpus": plan.share_gpus,
        "grace_s": plan.grace_s,
        "time_limit_s": plan.time_limit_s,
        "prepare": node.prepare,
        "elastic": _elastic(plan),
    }


def _elastic(plan: LaunchPlan) -> dict[str, Any] | None:
    if plan.elastic is None:
        return None
    return {"min_nodes": plan.elastic.min_nodes, "max_restarts": plan.elastic.max_restarts}


def cancel(
    plan: LaunchPlan, hosts: Mapping[str, Host], *, fence: bool = False
) -> dict[str, dict[str, Any] | HostError]:
    """Asks every host to end the job; each answers whether a supervisor was there to hear it.

    fence: of a start that was left half done; where nothing of it has arrived yet, nothing will begin any more.
    """
    action = "fence" if fence else "cancel"
    return _on_all(plan, lambda name: _ask(hosts[name], plan, action, **_whose(plan)), ASK_S, only=hosts)


def is_half_started(found: Mapping[str, Mapping[str, Any] | HostError]) -> bool:
    """Whether some host that answered waits for a word that its dead controller never gave, or was never asked."""
    records = [record for record in found.values() if isinstance(record, Mapping)]
    return any("go" not in record and record.get("state") != "undone" for record in records)


def recall(host: Host, known: Sequence[str]) -> dict[str, Any]:
    """What this host remembers of jobs beside those: by id {"plan", "agent"}, not to be taken on trust."""
    found = dict[str, Any]()
    for _ in range(MAX_RECALLS):
        request = {"action": "recall", "workdir": host.workdir, "known": [*known, *found]}
        answer = ask.ask(host, "control", request, timeout_s=ASK_S)
        jobs = answer.get("jobs")
        if not isinstance(jobs, dict) or not jobs.keys() - found.keys():
            break
        found |= {str(name): told for name, told in jobs.items() if isinstance(told, dict)}
        if answer.get("more") is not True:
            break
    return found


def agents(plan: LaunchPlan, hosts: Mapping[str, Host]) -> dict[str, dict[str, Any] | HostError]:
    """Every host's supervisor record of this job; {} where the host knows nothing of it."""

    def look(name: str) -> dict[str, Any]:
        answer = _ask(hosts[name], plan, "status")
        return ask.understood(name, lambda: dict(answer.get("jobs", {}).get(plan.job, {})))

    return _on_all(plan, look, ASK_S, only=hosts)


def watch(
    plan: LaunchPlan,
    hosts: Mapping[str, Host],
    *,
    offsets: Mapping[str, Mapping[str, Held]],
    follow: bool,
    files: bool = True,
    limit_bytes: int | None = None,
    reconnect: Callable[[str], Host] | None = None,
) -> Iterator[tuple[str, Frame | HostError]]:
    """What the job's hosts have to say, as it comes: (node, frame), and (node, error) where a link broke.

    offsets: per node and file, what is here already. files: False for the supervisors' records alone. limit_bytes: of a
    file no more than its first so many; None for all. A broken link
    is dialled again by `reconnect`, for as long as it takes, and goes on where it stopped: every byte comes once and in
    order, and the job does not depend on it. Without `reconnect` the host's part ends there. Ends when every host has
    ended; a ("", Beat) comes when nobody has said a thing for a second.
    """
    heard: queue.Queue[tuple[str, Frame | HostError | BaseException | None]] = queue.Queue(WAITING_FRAMES)
    leaving = threading.Event()

    def listen(name: str) -> None:
        try:
            node = plan.node(name)
            ranks = list(node.rank_numbers)
            request = {"workdir": node.workdir, "job": plan.job, "ranks": ranks, "follow": follow, "files": files}
            request["limit_bytes"] = limit_bytes
            _listen(hosts[name], request, dict(offsets.get(name, {})), reconnect, put, leaving)
        except BaseException as error:  # a bug of ours: the main thread has to raise it
            put((name, error))
        put((name, None))

    def put(item: tuple[str, Frame | HostError | BaseException | None]) -> None:
        while not leaving.is_set():
            try:
                heard.put(item, timeout=1.0)
                return
            except queue.Full:
                continue

    names = [node.name for node in plan.nodes if node.name in hosts]
    for name in names:
        threading.Thread(target=listen, args=(name,), daemon=True, name=f"watch-{name}").start()
    open_hosts = len(names)
    try:
        while open_hosts:
            try:
                name, item = heard.get(timeout=1.0)
            except queue.Empty:
                yield "", Beat()  # so that the reader can look at its own deadlines
                continue
            if item is None:
                open_hosts -= 1
            elif isinstance(item, HostError) or not isinstance(item, BaseException):
                yield name, item
            else:
                raise item
    finally:
        leaving.set()


def _listen(
    host: Host,
    request: Mapping[str, Any],
    held: dict[str, Held],
    reconnect: Callable[[str], Host] | None,
    put: Callable[[tuple[str, Any]], None],
    leaving: threading.Event,
) -> None:
    """One host's stream to its end, over as many connections as it takes. `held` follows what has come.

    What is there now is worth another connection as long as more of it comes: a host hangs up on who does not read for
    minutes, as a pager at rest (`remote/watchdog.py`).
    """
    name = host.node
    while not leaving.is_set():
        before = _size(held)
        try:
            offsets = {file: have.request() for file, have in held.items()}
            marker, ranks, limit = ask.new_marker(), frozenset(request["ranks"]), request["limit_bytes"]
            with ask.open_stream(host, "reader", {**request, "offsets": offsets}, marker) as chunks:
                for frame in read_frames(name, chunks, ranks, held, marker=marker.encode(), limit_bytes=limit):
                    if leaving.is_set():
                        return
                    put((name, frame))
                    if isinstance(frame, End):
                        return
            raise ConnectError(name, "its answer ended too early")
        except HostError as error:
            may_pass = reconnect is not None and isinstance(error, ConnectError)
            if request["follow"] or not (may_pass and _size(held) > before):
                put((name, error))
                if not (may_pass and request["follow"]):
                    return
        assert reconnect  # noqa: S101 - for the type checker
        try:
            host = _dial(name, host, reconnect, leaving) if request["follow"] else reconnect(name)
        except HostError as error:
            put((name, error))
            return


def _size(held: Mapping[str, Held]) -> int:
    return sum(have.offset for have in held.values())


def _dial(name: str, host: Host, reconnect: Callable[[str], Host], leaving: threading.Event) -> Host:
    """Raises HostError where it is not the link: a host key that changed is not tried again, nor a refused login."""
    while not leaving.wait(RETRY_S):
        try:
            return reconnect(name)
        except ConnectError:
            continue
    return host


def combine(
    plan: LaunchPlan,
    found: Mapping[str, Mapping[str, Any] | HostError],
    known: JobRecord,
    now: datetime,
    *,
    launched: bool = False,
) -> JobRecord:
    """The job's state from its hosts' records; `known` is what we knew before. Pure.

    The master's last word counts for all. Without it: a host that ended on its own account, else a record whose
    supervisor is gone means lost; a host that we cannot reach says nothing. What is known to have ended stays so,
    whatever an older answer says, or a host whose files are gone (`orch down`). A host that an elastic job went on
    without speaks of its own end alone; while its master and enough others cannot be asked, such a job counts as lost,
    which a later answer may mend. Of a host that the others only miss, its own word tells why, also when it comes late.
    launched: every host had been told to go when they were asked, so that none of it can be on its way.
    """
    records = {name: dict(record) for name, record in found.items() if isinstance(record, Mapping)}
    if (met := joined(plan, records)) is not None:
        known = known.model_copy(update={"joined": met})
    if known.state in ENDED:
        return _in_its_own_words(known, records)
    if len(records) == len(plan.nodes):  # else what was seen last
        known = known.model_copy(update={"stall": stall_of(plan, records)})
    if plan.elastic:
        known = known.model_copy(update={"faults": faults_of(plan, records, known.faults)})
    final = [
        record
        for name, record in records.items()
        if record.get("state") in ("succeeded", "failed", "cancelled")
        and not (plan.elastic and name != plan.master and own_loss(name, record))
    ]
    alive = [record for record in records.values() if record.get("alive")]
    if records.get(plan.master) in final:
        return _in_its_own_words(_ended(known, records[plan.master]), records)
    if final and not alive:
        word = min(final, key=lambda record: record["state"] == "succeeded")
        ended = _in_its_own_words(_ended(known, word), records)
        return ended.model_copy(update={"state": "lost"}) if _may_go_on(plan, records, word) else ended
    if alive:
        running = any(record.get("state") != "starting" for record in alive)
        return known.model_copy(update={"state": "running" if running else "starting"})
    undone = [record.get("state") == "undone" for record in records.values()]
    if any(undone) and len(records) == len(plan.nodes) and not any("go" in record for record in records.values()):
        return known.model_copy(update={"state": "cancelled"})  # one host undone, nobody told to go: nothing ran
    unheard_of = all(record.get("state") in (None, "lost") for record in records.values())
    if len(records) == len(plan.nodes) and not (unheard_of and not launched and _is_young(known, now)):
        reason = "its files are gone from every host" if not any(records.values()) else _NO_WORD
        gone = FirstFailure(node=plan.master, reason=reason)
        return known.model_copy(update={"state": "lost", "first_failure": gone, "exit_code": 1})
    return known


def _may_go_on(plan: LaunchPlan, records: Mapping[str, Mapping[str, Any]], word: Mapping[str, Any]) -> bool:
    """Whether hosts that we cannot ask may be an elastic job that went on without those that we can. word: the last
    of one of these; all that it tells of may be that it heard nothing of the master any more.
    """
    failure = word.get("first_failure")
    if plan.elastic is None or not isinstance(failure, Mapping) or failure.get("kind") != "lost":
        return False
    silent = [node.name for node in plan.nodes if node.name not in records]
    return failure.get("node") == plan.master in silent and len(silent) >= plan.elastic.min_nodes


def _is_young(known: JobRecord, now: datetime) -> bool:
    """Whether the job may still be on its way to its hosts."""
    with contextlib.suppress(TypeError, ValueError):
        age_s = (now - datetime.fromisoformat(known.started or "")).total_seconds()
        return known.state == "starting" and age_s < START_S
    return False


def _ended(known: JobRecord, record: Mapping[str, Any]) -> JobRecord:
    """record: as `remote/supervisor.py` wrote it on a host, so nothing in it is taken on trust."""
    failure = _first_failure(record)
    state: JobState = record["state"]
    ended = known.ended
    with contextlib.suppress(KeyError, TypeError, ValueError, OverflowError, OSError):
        ended = datetime.fromtimestamp(record["ended"], timezone.utc).isoformat(timespec="seconds")
    return known.model_copy(
        update={"state": state, "first_failure": failure, "exit_code": _exit_code(state, failure), "ended": ended}
    )


def _in_its_own_words(known: JobRecord, records: Mapping[str, Mapping[str, Any]]) -> JobRecord:
    """The same, with the end of a host that was lost to the others as that host itself, or its keeper, tells it."""
    faults = tuple(in_own_words(fault, records.get(fault.node, {})) for fault in known.faults)
    known = known.model_copy(update={"faults": faults})
    lost = known.first_failure
    if lost is None or lost.kind != "lost":
        return known
    record = records.get(lost.node, {})
    own = _first_failure(record) if record.get("state") == "failed" else None
    if own is None or own.node != lost.node:
        return known
    return known.model_copy(update={"first_failure": own, "exit_code": _exit_code(known.state, own)})


def _first_failure(record: Mapping[str, Any]) -> FirstFailure | None:
    with contextlib.suppress(ValidationError):
        return FirstFailure.model_validate(record.get("first_failure"))
    return None


def _exit_code(state: str, failure: FirstFailure | None) -> int | None:
    """The first failing rank's own code, 128 + n for signal n as a shell has it."""
    if state == "succeeded":
        return 0
    if state == "cancelled":
        return None
    if failure and failure.signal and (number := _signal_number(failure.signal)):
        return 128 + number
    return (failure.exit_code if failure else None) or 1


def _signal_number(name: str) -> int:
    """Of `SIGKILL`, or of `SIG40`, as `remote/processes.signal_name` writes one without a name; else 0."""
    if name in signal.Signals.__members__:
        return signal.Signals[name].value
    number = name.removeprefix("SIG")
    return int(number) if number.isdecimal() and len(number) < 3 else 0


def _whose(plan: LaunchPlan) -> dict[str, Any]:
    return {"owner": plan.owner.model_dump() if plan.owner else None, "cluster": plan.cluster}


def _ask(host: Host, plan: LaunchPlan, action: str, **more: Any) -> dict[str, Any]:
    request = {"action": action, "workdir": plan.node(host.node).workdir, "job": plan.job, **more}
    return ask.ask(host, "control", request, timeout_s=ASK_S)


def _on_all(
    plan: LaunchPlan, action: Callable[[str], R], deadline_s: float, only: Mapping[str, Any] | None = None
) -> dict[str, R | HostError]:
    names = {node.name: node.name for node in plan.nodes if only is None or node.name in only}
    return for_each(names, action, deadline_s=deadline_s + 5)
