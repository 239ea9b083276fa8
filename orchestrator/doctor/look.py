"""Collects the observations for `orch doctor`: every host at once, then every pair, then what outlived its login.

Each host has two logins. A process started in the first must still run in the second, which follows at once and also
tests the links.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from orchestrator.doctor.observations import Host, Observations
from orchestrator.doctor.pairs import LIMIT_S, Conductor, take_part
from orchestrator.errors import HostError, HostsError
from orchestrator.hosts.connections import CONNECT_S, Connections
from orchestrator.hosts.election import elect
from orchestrator.hosts.inventory import Node
from orchestrator.hosts.probe import examine, outlived, shared_folders
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
) -> Observations:
    """master: the remembered node. data: the hosts' folder of data sets. show: called at the start of each phase."""
    lost = dict[str, HostError]()

    def ask(host: ConnectedHost) -> Host:
        node = next(node for node in nodes if node.name == host.node)
        peers = [other.address or other.host for other in nodes if other is not node]
        found = examine(host, peers, data=data, timeout_s=EXAMINE_S)
        outlives = None
        try:
            again = connections.reopen(node.name)
            outlives = outlived(again, found.began, timeout_s=OUTLIVED_S) if found.began else None
        except HostError as error:  # the facts from before still count
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
    leader = _master(hosts, master)
    reachable = [host for host in hosts if host.name in addresses] if len(hosts) > 1 else []
    conductor = Conductor(reachable, show, leader)
    fell_out = _try_ways(connections, conductor, addresses) if len(hosts) > 1 else {}
    return Observations(
        hosts=hosts,
        unreached={**errors_by_node(examined), **lost, **fell_out},
        mesh=conductor.found() if len(hosts) > 1 else None,
        master=leader,
        shared_folders=shared_folders(connections, {host.name: host.facts for host in hosts}),
    )


def _try_ways(connections: Connections, conductor: Conductor, addresses: Mapping[str, str]) -> dict[str, HostError]:
    """addresses: of each host's listener. Returns the hosts that dropped out, and why."""
    token = secrets.token_bytes(32)

    def part(name: str) -> None:
        take_part(connections.current(name), conductor, token, addresses[name])

    return errors_by_node(for_each({name: name for name in addresses}, part, deadline_s=LIMIT_S + 5))


def _master(hosts: Sequence[Host], known: str | None) -> str | None:
    """The known master if it answered, else the result of an election."""
    if known in {host.name for host in hosts}:
        return known
    with suppress(HostsError):
        return elect([host.node for host in hosts], {host.name: host.facts for host in hosts}).master
    return None


# Finds the smallest set of hosts with which something fails, by retrying with fewer hosts. Pure.
#
#     guilty(["a", "b", "c", "d"], fails)      # ("c",): fails with that host, and not without it
#                                              # ("a", "c"): fails with both, and not without either
#
# With one guilty host among n, `fails` runs about 2 log n times.

Fails = Callable[[Sequence[str]], bool]


def guilty(names: Sequence[str], fails: Fails) -> tuple[str, ...]:
    """names: hosts with which it failed. The result is the smallest set if only one set is guilty."""
    half = _smaller(list(names), fails)
    if len(half) != 2:
        return tuple(half)
    first, second = half
    rest = [name for name in names if name not in half]
    if not rest:
        return tuple(half)
    blamed = [name for name, other in ((first, second), (second, first)) if not fails([*rest, other])]
    return (blamed[0],) if len(blamed) == 1 else tuple(half)


def _smaller(names: list[str], fails: Fails, others: Sequence[str] = ()) -> list[str]:
    """The names that, together with `others`, it needs to fail. It fails with all names."""
    if len(names) == 1:
        return names
    left, right = names[: len(names) // 2], names[len(names) // 2 :]
    for part in (left, right):
        if len(part) + len(others) > 0 and fails([*others, *part]):
            return _smaller(part, fails, others)
    kept = _smaller(left, fails, [*others, *right])  # a part of each is needed
    return [*kept, *_smaller(right, fails, [*others, *kept])]
