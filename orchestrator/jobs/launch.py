"""Starts a job on all its hosts or on none; also cancels it and asks its hosts for their records.

All hosts `prepare` at once (folder as lock, code, GPU claims, a waiting supervisor); only after all answers is `go`
sent. If a host refuses, the others are undone. After `go` the hosts need no controller.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from orchestrator.errors import HostError, HostsError, RefusedError
from orchestrator.jobs.state import PREPARE_S
from orchestrator.planning.launch_plan import LaunchPlan, NodePlan
from orchestrator.transport import ask
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import errors, for_each, values
from orchestrator.units import one_line

SMALL_BYTES = 1 << 16
"""Larger code is sent only if missing."""
SILENT_S, SLOW_BYTES_PER_S, UNDO_S = 20.0, 250_000, 10.0
"""If another host can replace it, a host is lost after SILENT_S plus the transfer time of the code; UNDO_S limits its
`undo`.
"""


class Prepared(NamedTuple):
    """Local times."""

    answer: dict[str, Any]
    sent_at: float
    received_at: float


def launch(
    plan: LaunchPlan,
    hosts: Mapping[str, ConnectedHost],
    blob: bytes,
    undone: Callable[[], None] = lambda: None,
    prepared: Callable[[Mapping[str, Prepared]], None] = lambda answers: None,
    deliver: Callable[[], Mapping[str, list[list[Any]]]] = dict,
    needed_bytes: Mapping[str, int] | None = None,
    *,
    has_room: bool = True,
) -> bool:
    """Returns whether it begins at once, without a place in the queue. Raises RefusedError with every host's refusal,
    HostsError if a host was lost during `go`. undone: called before an error if every host confirmed that nothing is
    left. prepared: receives the answers to `prepare`. deliver: copies files of an earlier job to the hosts, and returns
    their places (`remote/handover.py`). needed_bytes: by node, on each of its GPUs, for a job that waits there.
    has_room: other programs leave enough memory on its GPUs; else it waits if it may.
    """
    start = _Start(plan, hosts, blob, needed_bytes or {}, has_room=has_room)
    try:
        start.deliver(deliver)
        answers = start.prepare()
        prepared(answers)
        return start.go(answers)
    except BaseException:  # a Ctrl-C, too: hosts undo their preparation and cancel what already runs
        if start.undo():
            undone()
        raise


class _Start:
    def __init__(
        self,
        plan: LaunchPlan,
        hosts: Mapping[str, ConnectedHost],
        blob: bytes,
        needed_bytes: Mapping[str, int],
        *,
        has_room: bool,
    ) -> None:
        self._plan, self._hosts, self._blob, self._needed_bytes = plan, hosts, blob, needed_bytes
        self._has_room = has_room
        self._token = secrets.token_hex(32)
        self._kept = plan.masked().model_dump(mode="json", by_alias=True)
        self._carried: Mapping[str, list[list[Any]]] = {}
        self._answered = set[str]()
        """Without a pending request of ours."""

    def deliver(self, deliver: Callable[[], Mapping[str, list[list[Any]]]]) -> None:
        self._answered = {node.name for node in self._plan.nodes}
        self._carried = deliver()
        self._answered.clear()

    def prepare(self) -> dict[str, Prepared]:
        """Raises RefusedError."""
        prepared = on_all(self._plan, self._prepare_with_code, PREPARE_S)
        if errors(prepared):
            raise RefusedError(errors(prepared))
        return values(prepared)

    def _prepare_with_code(self, name: str) -> Prepared:
        prepared = self._prepare(name, self._blob if len(self._blob) <= SMALL_BYTES else b"")
        return self._prepare(name, self._blob) if prepared.answer.get("need_code") else prepared

    def _prepare(self, name: str, code: bytes) -> Prepared:
        node = self._plan.node(name)
        request = {
            "action": "prepare",
            "workdir": node.workdir,
            "node": node_request(self._plan, node, self._token, self._needed_bytes.get(name, 0)),
            "plan": self._kept,  # also on every host, for a controller that lost its own copy
            "blob_bytes": len(code),
        }
        if name in self._carried:
            request["carried"] = self._carried[name]
        self._answered.discard(name)
        sent_at = time.time()
        try:
            answer = ask.ask(self._hosts[name], "prepare", request, blob=code, timeout_s=self._patience_s(code))
        except HostError as error:
            if type(error) is HostError:  # the host's own refusal; subclasses mean that no answer came
                self._answered.add(name)
            raise
        self._answered.add(name)
        return Prepared(answer, sent_at, time.time())

    def _patience_s(self, code: bytes) -> float:
        return min(PREPARE_S, SILENT_S + len(code) / SLOW_BYTES_PER_S) if self._plan.hosts else PREPARE_S

    def go(self, answers: Mapping[str, Prepared]) -> bool:
        """answers: to `prepare`. Returns whether it begins at once. Raises HostsError."""
        plan = self._plan
        hub_port = ask.understood(plan.master, lambda: int(answers[plan.master].answer["hub_port"]))
        several = plan.nodes if len(plan.nodes) > 1 else ()
        peers = {node.name: peer_place(node, answers[node.name].answer) for node in several}
        at_once = self._has_room and all(each.answer.get("has_gpus") is True for each in answers.values())

        def tell(name: str) -> dict[str, Any]:
            return ask_host(self._hosts[name], plan, "go", hub_port=hub_port, peers=peers, at_once=at_once)

        started = on_all(plan, tell, ASK_S)
        if errors(started):
            raise HostsError(errors(started))
        return at_once

    def undo(self) -> bool:
        """Whether every host confirmed that nothing is left."""

        def tell(name: str) -> dict[str, Any]:
            fence = name not in self._answered
            words = {"token": self._token, "fence": fence, **whose(self._plan)}
            timeout_s = UNDO_S if fence and self._plan.hosts else ASK_S
            return ask_host(self._hosts[name], self._plan, "undo", timeout_s=timeout_s, **words)

        return not errors(on_all(self._plan, tell, ASK_S))


def peer_place(node: NodePlan, answer: Mapping[str, Any]) -> list[Any]:
    """The fields of `remote/way.Place`."""
    port = ask.understood(node.name, lambda: int(answer["peer_port"]))
    return [node.address, port, node.interface or "INTERFACE", one_line(answer.get("firewall"), 20)]


def node_request(plan: LaunchPlan, node: NodePlan, token: str, needed_bytes: int = 0) -> dict[str, Any]:
    """The content of node.json. token: hex, a secret of this job's supervisors. needed_bytes: on each GPU."""
    asked, attempt = plan.asked, plan.attempt
    retries = attempt if plan.detached else None
    return {
        "schema": 1,
        "job": plan.job,
        "exp": plan.exp,
        **whose(plan),
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
        "is_program": plan.kind == "program",
        "starts_ranks": node.starts_ranks,
        "preload": not plan.asked.no_preload,
        "env": node.env,
        "shares": node.shares,
        "rank_numbers": list(node.rank_numbers),
        "gpu_uuids": node.gpu_uuids,
        "share_gpus": plan.share_gpus,
        "grace_s": plan.grace_s,
        "silence_s": plan.asked.silence_s,
        "time_limit_s": plan.time_limit_s,
        "prepare": node.prepare,
        "after": [one.job for one in attempt.earlier] if attempt else [],
        "queue": {"priority": asked.priority, "limit_s": asked.wait_limit_s, "needed_bytes": needed_bytes}
        if asked.waits
        else None,
        "retries": {"most": retries.most, "any_cause": retries.any_cause, "wait_s": retries.wait_s}
        if retries
        else None,
        "notify": plan.notify,
    }


# Requests about one job to one or all of its hosts.
#
#     agents(plan, hosts)                 {"a": {"state": "running", ...}, "b": HostError(...)}
#     cancel(plan, hosts)                 asks every host to end the job; each answers at once
#     recall(host, known_ids)             other jobs on this host

ASK_S = 30.0
"""For `remote/control.py`."""
MAX_RECALLS = 20
RECALL_S = MAX_RECALLS * ASK_S

R = TypeVar("R")


def ask_host(
    host: ConnectedHost, plan: LaunchPlan, action: str, *, timeout_s: float = ASK_S, **more: Any
) -> dict[str, Any]:
    """Raises HostError."""
    request = {"action": action, "workdir": plan.node(host.node).workdir, "job": plan.job, **more}
    return ask.ask(host, "control", request, timeout_s=timeout_s)


def on_all(
    plan: LaunchPlan, action: Callable[[str], R], deadline_s: float, only: Mapping[str, Any] | None = None
) -> dict[str, R | HostError]:
    """only: nodes; None means all."""
    names = {node.name: node.name for node in plan.nodes if only is None or node.name in only}
    return for_each(names, action, deadline_s=deadline_s + 5)


def whose(plan: LaunchPlan) -> dict[str, Any]:
    return {"owner": plan.owner.model_dump() if plan.owner else None, "cluster": plan.cluster}


def cancel(
    plan: LaunchPlan, hosts: Mapping[str, ConnectedHost], *, fence: bool = False
) -> dict[str, dict[str, Any] | HostError]:
    """Returns whether a supervisor received it. fence: for a half-done start; a host without it will not start it later
    either.
    """
    action = "fence" if fence else "cancel"
    return on_all(plan, lambda name: ask_host(hosts[name], plan, action, **whose(plan)), ASK_S, only=hosts)


def agents(plan: LaunchPlan, hosts: Mapping[str, ConnectedHost]) -> dict[str, dict[str, Any] | HostError]:
    """By node: its supervisor's record, or {}."""

    def look(name: str) -> dict[str, Any]:
        answer = ask_host(hosts[name], plan, "status")
        return ask.understood(name, lambda: dict(answer.get("jobs", {}).get(plan.job, {})))

    return on_all(plan, look, ASK_S, only=hosts)


def recall(host: ConnectedHost, known: Sequence[str]) -> dict[str, Any]:
    """Other jobs on this host: by id {"plan", "agent"}, untrusted."""
    found = dict[str, Any]()
    for _ in range(MAX_RECALLS):
        request = {"action": "recall", "workdir": host.workdir, "known": [*known, *found]}
        answer = ask.ask(host, "control", request, timeout_s=ASK_S)
        jobs = answer.get("jobs")
        if not isinstance(jobs, dict) or not jobs.keys() - found.keys():
            break
        found |= {str(name): job for name, job in jobs.items() if isinstance(job, dict)}
        if answer.get("more") is not True:
            break
    return found
