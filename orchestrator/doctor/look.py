"""Looks at a cluster for `orch doctor`: every host at once, then every pair of them, then what outlived its login.

    seen = look(connections, nodes, data="~/data")
    judge(seen).findings

Two logins a host: what was started in the first is to be there in the second.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from orchestrator.doctor.mesh import LIMIT_S, Conductor, take_part
from orchestrator.doctor.seen import Host, Seen
from orchestrator.errors import HostError, HostsError
from orchestrator.hosts.connections import Connections
from orchestrator.hosts.election import elect
from orchestrator.hosts.examine import examine, outlived
from orchestrator.hosts.inventory import Node
from orchestrator.planning.placement import training_address
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import errors_by_node, values
from orchestrator.units import counted

EXAMINE_S = 90.0
OUTLIVED_S = 15.0
Began = tuple[int, int, str]


def look(
    connections: Connections,
    nodes: Sequence[Node],
    *,
    data: str,
    master: str | None = None,
    show: Callable[[str], None] = lambda words: None,
) -> Seen:
    """master: the one that is remembered. data: the folder of data sets on hosts. show: told what begins."""
    began = dict[str, Began]()

    def ask(host: ConnectedHost) -> Host:
        node = next(node for node in nodes if node.name == host.node)
        peers = [other.address or other.host for other in nodes if other is not node]
        found = examine(host, peers, data=data, timeout_s=EXAMINE_S)
        if found.began:
            began[host.node] = found.began
        return Host(
            node,
            found.facts,
            found.health,
            training_address(node, found.facts, nodes),
            host.transport.login_s,
            host.transport.logins_tried,
        )

    show(f"examining {counted(len(nodes), 'host')}")
    examined = connections.each(nodes, ask, deadline_s=EXAMINE_S + 5)
    hosts = tuple(values(examined).values())
    conductor = Conductor([host for host in hosts if host.address] if len(hosts) > 1 else [], show)
    alive = _in_a_second_login(connections, hosts, began, conductor)
    return Seen(
        hosts=tuple(replace(host, outlives=values(alive).get(host.name)) for host in hosts),
        unreached={**errors_by_node(examined), **errors_by_node(alive)},
        mesh=conductor.found() if len(hosts) > 1 else None,
        master=_master(hosts, master),
    )


def _in_a_second_login(
    connections: Connections, hosts: Sequence[Host], began: Mapping[str, Began], conductor: Conductor
) -> Mapping[str, bool | HostError | None]:
    """By host, whether what began in the first one is still there."""
    token, addresses = secrets.token_bytes(32), {host.name: host.address for host in hosts}

    def again(host: ConnectedHost) -> bool | None:
        address = addresses[host.node]
        if address and len(hosts) > 1:
            take_part(host, conductor, token, address)
        return outlived(host, began[host.node], timeout_s=OUTLIVED_S) if host.node in began else None

    return connections.each([host.node for host in hosts], again, deadline_s=LIMIT_S + OUTLIVED_S + 5)


def _master(hosts: Sequence[Host], known: str | None) -> str | None:
    """The one that is known, else who would be elected among those that answered."""
    if known in {host.name for host in hosts}:
        return known
    with suppress(HostsError):
        return elect([host.node for host in hosts], {host.name: host.facts for host in hosts}).master
    return None
