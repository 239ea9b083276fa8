"""Looks at a cluster for `orch doctor`: every host at once, then every pair of them, then what outlived its login.

    seen = look(connections, nodes, data="~/data")
    judge(seen).findings

Two logins a host: what was started in the first is to be there in the second, which follows at once, so that the host
is soon asked to end it. The ways between hosts are tried in that one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from orchestrator.doctor.mesh import LIMIT_S, Conductor, take_part
from orchestrator.doctor.seen import Host, Seen
from orchestrator.errors import HostError, HostsError
from orchestrator.hosts.connections import CONNECT_S, Connections
from orchestrator.hosts.election import elect
from orchestrator.hosts.examine import examine, outlived
from orchestrator.hosts.inventory import Node
from orchestrator.hosts.probe import shared_folders
from orchestrator.planning.placement import training_address
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import errors_by_node, for_each, values
from orchestrator.units import counted

EXAMINE_S = 90.0
OUTLIVED_S = 10.0


def look(
    connections: Connections,
    nodes: Sequence[Node],
    *,
    data: str,
    master: str | None = None,
    show: Callable[[str], None] = lambda words: None,
) -> Seen:
    """master: the one that is remembered. data: the folder of data sets on hosts. show: told what begins."""
    lost = dict[str, HostError]()

    def ask(host: ConnectedHost) -> Host:
        node = next(node for node in nodes if node.name == host.node)
        peers = [other.address or other.host for other in nodes if other is not node]
        found = examine(host, peers, data=data, timeout_s=EXAMINE_S)
        outlives = None
        try:
            again = connections.reopen(node.name)
            outlives = outlived(again, found.began, timeout_s=OUTLIVED_S) if found.began else None
        except HostError as error:  # what it said before counts
            lost[node.name] = error
        return Host(
            node,
            found.facts,
            found.health,
            training_address(node, found.facts, nodes),
            host.transport.login_s,
            host.transport.logins_tried,
            outlives,
        )

    show(f"examining {counted(len(nodes), 'host')}")
    examined = connections.each(nodes, ask, deadline_s=EXAMINE_S + CONNECT_S + OUTLIVED_S + 5)
    hosts = tuple(values(examined).values())
    addresses = {host.name: host.address for host in hosts if host.address and host.name not in lost}
    conductor = Conductor([host for host in hosts if host.name in addresses] if len(hosts) > 1 else [], show)
    fell_out = _try_ways(connections, conductor, addresses) if len(hosts) > 1 else {}
    return Seen(
        hosts=hosts,
        unreached={**errors_by_node(examined), **lost, **fell_out},
        mesh=conductor.found() if len(hosts) > 1 else None,
        master=_master(hosts, master),
        shared_folders=shared_folders(connections, {host.name: host.facts for host in hosts}),
    )


def _try_ways(connections: Connections, conductor: Conductor, addresses: Mapping[str, str]) -> dict[str, HostError]:
    """addresses: by host, where it listens. Gives who fell out, and why."""
    token = secrets.token_bytes(32)

    def part(name: str) -> None:
        take_part(connections.current(name), conductor, token, addresses[name])

    return errors_by_node(for_each({name: name for name in addresses}, part, deadline_s=LIMIT_S + 5))


def _master(hosts: Sequence[Host], known: str | None) -> str | None:
    """The one that is known, else who would be elected among those that answered."""
    if known in {host.name for host in hosts}:
        return known
    with suppress(HostsError):
        return elect([host.node for host in hosts], {host.name: host.facts for host in hosts}).master
    return None
