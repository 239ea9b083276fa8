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

from orchestrator.doctor.pairs import LIMIT_S, Conductor, take_part
from orchestrator.doctor.seen import Host, Seen
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


# Finds the smallest set of hosts with which something fails, by trying it on fewer and fewer of them. Pure.
#
#     guilty(["a", "b", "c", "d"], fails)      # ("c",): it fails with that host, and not without it
#                                              # ("a", "c"): it fails with both of them, and not without either
#
# `fails` tries it on some hosts, which costs its time: with n hosts it is asked some 2 log n times where one is guilty.

Fails = Callable[[Sequence[str]], bool]


def guilty(names: Sequence[str], fails: Fails) -> tuple[str, ...]:
    """names: those with which it failed. Of one set of them at a time at the most it is the smallest."""
    half = _smaller(list(names), fails)
    if len(half) != 2:
        return tuple(half)
    first, second = half
    rest = [name for name in names if name not in half]
    if not rest:
        return tuple(half)
    blamed = [name for name, other in ((first, second), (second, first)) if not fails([*rest, other])]
    return (blamed[0],) if len(blamed) == 1 else tuple(half)


def _smaller(names: list[str], fails: Fails, beside: Sequence[str] = ()) -> list[str]:
    """Those of the names without which, beside the others, it does not fail. It fails with all of them."""
    if len(names) == 1:
        return names
    left, right = names[: len(names) // 2], names[len(names) // 2 :]
    for part in (left, right):
        if len(part) + len(beside) > 0 and fails([*beside, *part]):
            return _smaller(part, fails, beside)
    kept = _smaller(left, fails, [*beside, *right])  # a part of each is needed
    return [*kept, *_smaller(right, fails, [*beside, *kept])]
