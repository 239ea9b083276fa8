"""Probes a host for its facts and health in one round trip, validates the reply, and finds shared work folders.

`checks` judges the result.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import Field, ValidationError

from orchestrator.errors import ProbeError
from orchestrator.hosts.connections import Connections
from orchestrator.hosts.facts import MAX_PEERS, Count, Fact, Health, Interfaces, NodeFacts
from orchestrator.transport.ask import ConnectedHost, ask, understood
from orchestrator.transport.fanout import for_each, values
from orchestrator.units import one_line

# Kept back for transit, so that a slow fact costs only itself and not the whole answer.
SPARE_S = 5.0
TORCH_S = 60.0
SLOW_TORCH_S = 240.0
"""For a retry: a network disk with a cold cache takes minutes."""
SAME_FOLDER_S = 15.0


def probe(host: ConnectedHost, peers: Sequence[str], *, torch: bool, timeout_s: float) -> NodeFacts:
    """peers: addresses or names to look up routes to. torch: import it, which takes seconds."""
    return _asked(host, peers, torch, timeout_s)[0]


def look(
    host: ConnectedHost, peers: Sequence[str], *, torch: bool, timeout_s: float, memory: str = ""
) -> tuple[NodeFacts, Health]:
    """Retries with SLOW_TORCH_S if torch does not load in time. memory: a folder there that keeps facts about torch."""
    facts, answer = _asked(host, peers, torch, timeout_s, memory=memory)
    if facts.torch_is_slow:
        facts, answer = _asked(host, peers, torch, SLOW_TORCH_S + SPARE_S, SLOW_TORCH_S, memory=memory)
    return facts, read_health(host.node, answer)


def shared_folders(connections: Connections, facts: Mapping[str, NodeFacts]) -> tuple[tuple[str, ...], ...]:
    """Groups of hosts that share a work folder: each leaves a file there and looks for the others' files.

    Only asks hosts with equal path, inode and user id, one node per machine. Without an answer a host shares nothing.
    """
    alike = dict[tuple[object, ...], dict[str, str]]()
    for name, known in facts.items():
        if not known.workdir_error and known.workdir_inode is not None:
            place = known.workdir, known.workdir_inode, known.uid
            alike.setdefault(place, {}).setdefault(known.boot_id, name)
    groups = [[*machines.values()] for machines in alike.values() if len(machines) > 1]
    return _shared(connections, groups) if groups else ()


def _shared(connections: Connections, groups: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    tokens = {name: secrets.token_hex(8) for names in groups for name in names}

    def asked(action: str, more: Callable[[str], Mapping[str, Any]] = lambda name: {}) -> dict[str, dict[str, Any]]:
        def act(name: str) -> dict[str, Any]:
            host = connections.current(name)
            request = {"action": action, "workdir": host.workdir, "token": tokens[name], **more(name)}
            return ask(host, "same_folder", request, timeout_s=SAME_FOLDER_S)

        return values(for_each({name: name for name in tokens}, act, deadline_s=SAME_FOLDER_S + 1))

    left, together = asked("leave"), list[tuple[str, ...]]()
    try:
        looked = asked("look", lambda name: {"tokens": list(tokens.values())})
        for names in groups:
            rest = list(names)
            while rest:
                first = rest[0]
                sees = {name for name in rest if tokens[first] in _texts(looked, name, "seen")}
                together.append(tuple(name for name in rest if name == first or name in sees))
                rest = [name for name in rest if name not in together[-1]]
    finally:
        # The last host to remove its file can also remove a folder that another host created for all.
        group_of = {name: names for names in together for name in names}
        asked(
            "remove",
            lambda name: {"made": [path for one in group_of.get(name, (name,)) for path in _texts(left, one, "made")]},
        )
    return tuple(names for names in together if len(names) > 1)


def _texts(answers: Mapping[str, Mapping[str, Any]], name: str, key: str) -> list[str]:
    found = answers.get(name, {}).get(key)
    return [text for text in found if isinstance(text, str)] if isinstance(found, list) else []


def limit_of(timeout_s: float, longest_s: float | None = None) -> float:
    """Limit for each fact on the host, so that its answer arrives in time."""
    return min(longest_s or TORCH_S, max(timeout_s - SPARE_S, timeout_s / 2))


def _asked(
    host: ConnectedHost,
    peers: Sequence[str],
    torch: bool,
    timeout_s: float,
    longest_s: float | None = None,
    memory: str = "",
) -> tuple[NodeFacts, Mapping[str, Any]]:
    limit_s = limit_of(timeout_s, longest_s)
    request = {"workdir": host.workdir, "peers": list(peers[:MAX_PEERS]), "torch": torch, "limit_s": limit_s}
    request |= {"torch_memory": memory} if memory else {}
    sent_at = time.time()
    answer = ask(host, "probe", request, timeout_s=timeout_s)
    return read_facts(host.node, answer, sent_at, time.time()), answer


# The probe of `orch doctor`: facts, health and a trial process. `orchestrator/doctor/` judges it.


@dataclass(frozen=True)
class Examined:
    facts: NodeFacts
    health: Health
    began: tuple[int, int, str] | None
    """Process that should outlive the connection: pid, start time, boot id."""


def examine(host: ConnectedHost, peers: Sequence[str], *, data: str, timeout_s: float) -> Examined:
    """data: the host's folder of data sets."""
    wanted = {"workdir": host.workdir, "peers": list(peers[:MAX_PEERS]), "torch": True, "data": data}
    sent_at = time.time()
    answer = ask(host, "examine", {**wanted, "limit_s": limit_of(timeout_s)}, timeout_s=timeout_s)
    facts = read_facts(host.node, answer, sent_at, time.time())
    return Examined(facts, read_health(host.node, answer), understood(host.node, lambda: _began(answer.get("began"))))


def outlived(host: ConnectedHost, began: tuple[int, int, str], *, timeout_s: float) -> bool | None:
    """Ends the process. None if it was due to end."""
    alive = ask(host, "outlives", {"began": list(began)}, timeout_s=timeout_s).get("alive")
    return alive if alive is None else alive is True


def _began(value: Any) -> tuple[int, int, str] | None:
    if value is None:
        return None
    pid, start_time, boot = value
    if not isinstance(pid, int) or not isinstance(start_time, int) or not isinstance(boot, str) or len(boot) > 100:
        raise ValueError("no process")
    return pid, start_time, boot


# Validates the JSON that a host's probe returns and makes `NodeFacts` and `Health` of it. Pure.
#
# Hosts are not trusted: a value of a wrong type or out of bounds, or too long a list, is a ProbeError; text is cut and
# made printable.

Time = Annotated[float, Field(ge=0, lt=1e11)]
Checked = TypeVar("Checked", bound=Fact)


class Clock(Fact):
    """The host's clock before and after the probe, in seconds since 1970."""

    began: Time
    ended: Time

    def against_ours(self, sent_at: float, received_at: float) -> dict[str, float]:
        """Clock offset from four readings (NTP, RFC 5905 section 8); its error is half the time in transit."""
        on_the_way_s = (received_at - sent_at) - (self.ended - self.began)
        return {
            "clock_offset_s": round((self.began + self.ended) / 2 - (sent_at + received_at) / 2, 3),
            "clock_error_s": round(max(0.0, on_the_way_s / 2), 3),
        }


class _Now(Fact):
    clock: Clock
    disk_free_bytes: Count
    disk_free_inodes: Count | None
    shm_bytes: Count
    interfaces: Interfaces
    health: Health


def read_facts(node: str, answer: Mapping[str, Any], sent_at: float, received_at: float) -> NodeFacts:
    """sent_at, received_at: our clock around the probe. Raises ProbeError naming the node and the bad fact."""
    offset = _checked(node, Clock, answer.get("clock"), "clock").against_ours(sent_at, received_at)
    facts = answer.get("facts")
    return _checked(node, NodeFacts, {**facts, **offset, "node": node} if isinstance(facts, dict) else facts, "facts")


def read_health(node: str, answer: Mapping[str, Any]) -> Health:
    return _checked(node, Health, answer.get("health"), "health")


def as_of_now(
    node: str, remembered: NodeFacts, answer: Any, sent_at: float, received_at: float
) -> tuple[NodeFacts, Health]:
    """Updates remembered facts from an answer of `remote/health.py`. Raises ProbeError."""
    now = _checked(node, _Now, answer, "state")
    found = {link.name: link for link in now.interfaces}
    update = {
        "disk_free_bytes": now.disk_free_bytes,
        "disk_free_inodes": now.disk_free_inodes,
        "shm_bytes": now.shm_bytes,
        "interfaces": tuple(
            found.get(link.name, link.model_copy(update={"up": False})) for link in remembered.interfaces
        ),
        **now.clock.against_ours(sent_at, received_at),
    }
    return remembered.model_copy(update=update), now.health


def _checked(node: str, kind: type[Checked], value: Any, name: str) -> Checked:
    try:
        # As JSON, since a strict check takes no list for a tuple elsewhere. A lone surrogate becomes a question mark.
        text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
        return kind.model_validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or name
        raise ProbeError(node, one_line(f"its answer makes no sense ({where}: {first['msg']})")) from error
    except (ValueError, RecursionError) as error:
        raise ProbeError(node, f"its answer makes no sense ({name}: {type(error).__name__})") from error
