"""Holds one open connection per host for the duration of one command.

    with Connections(home) as connections:
        facts = connections.each(cluster.nodes, probe, deadline_s=90)   # name -> result, or that host's error

Opening a node again closes its previous connection. Names are unique within one cluster only: use `apart` for others.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from orchestrator.errors import ConnectError, HostError, LateError
from orchestrator.paths import Home
from orchestrator.transport import Transport
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import errors_by_node, for_each
from orchestrator.transport.shell import LocalTransport

if TYPE_CHECKING:  # slow to load: a list of jobs needs no nodes, and local nodes need no paramiko
    from orchestrator.hosts.inventory import Node
    from orchestrator.transport.route import Target

CONNECT_S = 10.0
DIAL_S, LOGIN_S = 2.0, 6.0
"""For `silent`: seconds to reach a host, and for a busy host to finish the login."""
FILES_PER_HOST = 12
CROWD = 32
"""Number of hosts from which late ones are tried once more: among a few, a host that is off would only delay."""
AT_ONCE, ROUNDS = 8, 4
"""Late hosts tried at a time, at least; the rounds they take, at most."""

R = TypeVar("R")


class Connections:
    """accept_new_host_keys: record keys of unknown hosts. say: called once per note about the SSH configuration."""

    def __init__(
        self,
        home: Home,
        *,
        accept_new_host_keys: bool = False,
        ask_passphrase: Callable[[str], str | None] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._home, self._accept_new, self._ask, self._say = home, accept_new_host_keys, ask_passphrase, say
        self._said: dict[str, object] = {}
        self._nodes: dict[str, Node] = {}
        self._transports: dict[str, Transport] = {}
        self._apart: list[Connections] = []
        self._is_over = False

    def __enter__(self) -> Connections:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        for others in [*self._apart]:
            others.__exit__(None, None, None)
        for transport in [*self._transports.values()]:
            transport.close()

    @contextmanager
    def apart(self, hosts: Mapping[str, ConnectedHost]) -> Iterator[Connections]:
        """Separate connections, closed with the block. Open connections in `hosts` move to them."""
        with Connections(
            self._home, accept_new_host_keys=self._accept_new, ask_passphrase=self._ask, say=self._say_once
        ) as others:
            for name in self.still_open(hosts):
                others._nodes[name], others._transports[name] = self._nodes[name], self._transports.pop(name)
            self._apart.append(others)
            try:
                yield others
            finally:
                self._apart.remove(others)

    def still_open(self, hosts: Mapping[str, ConnectedHost]) -> dict[str, ConnectedHost]:
        return {name: host for name, host in hosts.items() if self._transports.get(name) is host.transport}

    def open(self, nodes: Sequence[Node]) -> dict[str, ConnectedHost | HostError]:
        return self.each(nodes, lambda host: host, deadline_s=5)

    def each(
        self, nodes: Sequence[Node], action: Callable[[ConnectedHost], R], *, deadline_s: float
    ) -> dict[str, R | HostError]:
        """Connects to all at once; each host runs the action as soon as it answers.

        deadline_s: for the action, in addition to connecting.
        """
        self._nodes |= {node.name: node for node in nodes}
        _allow_files(FILES_PER_HOST * len(nodes))
        if self._ask:
            self._unlock_keys(nodes, self._ask)
        names = {node.name: node.name for node in nodes}
        deadline_s += CONNECT_S
        found = for_each(names, lambda name: action(self.reopen(name)), deadline_s=deadline_s)
        late = {name: name for name, outcome in found.items() if isinstance(outcome, LateError)}
        if len(names) < CROWD or len(late) == len(names):
            return found
        # Hosts that all share a busy network, or this machine, log in once fewer of them do so at a time.
        at_once = max(AT_ONCE, math.ceil(len(late) / ROUNDS))
        return found | for_each(late, lambda name: action(self.reopen(name)), deadline_s=deadline_s, at_once=at_once)

    def silent(self, nodes: Sequence[Node]) -> dict[str, HostError]:
        """Hosts that cannot be logged in to now, and why; takes a few seconds."""
        self._nodes |= {node.name: node for node in nodes}
        _allow_files(FILES_PER_HOST * len(nodes))
        if any(node.transport != "local" for node in nodes):
            from orchestrator.transport import ssh as _  # noqa: F401 - slow to import, and no host's fault
        names = {node.name: node.name for node in nodes}
        looked = for_each(names, lambda name: self.reopen(name, LOGIN_S, DIAL_S), deadline_s=LOGIN_S + 2)
        return errors_by_node(looked)

    def reopen(self, name: str, timeout_s: float = CONNECT_S, dial_s: float = math.inf) -> ConnectedHost:
        """timeout_s, dial_s: see `transport.ssh.connect`. Raises HostError."""
        self._refuse_if_over(name)
        previous = self._transports.pop(name, None)
        if previous:
            previous.close()
        node = self._nodes[name]
        transport = self._transports[name] = self._connect(node, timeout_s, dial_s)
        if self._is_over:
            transport.close()
        self._refuse_if_over(name)  # the host may have answered late
        return ConnectedHost(transport, node.python, node.activate, node.workdir)

    def _refuse_if_over(self, name: str) -> None:
        if self._is_over:
            raise ConnectError(name, "its connection was closed here: the command is over")

    def kept(self, node: Node) -> ConnectedHost:
        """The open connection, else a new one. Raises HostError."""
        self._nodes[node.name] = node
        return self.current(node.name)

    def current(self, name: str) -> ConnectedHost:
        if name not in self._transports:
            return self.reopen(name)
        node = self._nodes[name]
        return ConnectedHost(self._transports[name], node.python, node.activate, node.workdir)

    def _connect(self, node: Node, timeout_s: float, dial_s: float) -> Transport:
        if node.transport == "slurm":
            from orchestrator.transport.slurm import SlurmTransport

            login = LocalTransport(node.name) if _is_here(node) else self._dial(node, timeout_s, dial_s)
            try:
                return SlurmTransport(login, node.name, node.allocation, is_inside=_is_inside(node))
            except BaseException:
                login.close()
                raise
        return LocalTransport(node.name) if node.transport == "local" else self._dial(node, timeout_s, dial_s)

    def _dial(self, node: Node, timeout_s: float, dial_s: float) -> Transport:
        from orchestrator.transport import ssh
        from orchestrator.transport.hostkeys import HostKeys

        return ssh.connect(
            target_of(node),
            host_keys=HostKeys.default(self._home),
            accept_new=self._accept_new,
            ask_passphrase=self._ask,
            timeout_s=timeout_s,
            dial_s=dial_s,
            note=self._say_once,
        )

    def _say_once(self, line: str) -> None:
        ours = object()
        if self._said.setdefault(line, ours) is ours:  # atomic: only the first of many threads prints it
            self._say(line)

    def _unlock_keys(self, nodes: Sequence[Node], ask: Callable[[str], str | None]) -> None:
        """Passphrases are asked for before connecting, not from one of many threads."""
        for node in nodes:
            if node.transport == "ssh" or (node.transport == "slurm" and not _is_here(node)):
                from orchestrator.transport import ssh

                ssh.unlock(target_of(node), ask)


def _is_here(node: Node) -> bool:
    """Whether Slurm's commands for this host run on this machine: a login host, or a step of the job that holds it."""
    return node.host == "localhost" or _is_inside(node)


def _is_inside(node: Node) -> bool:
    job = os.environ.get("SLURM_JOB_ID")
    return job is not None and (node.allocation or "").partition("+")[0] == job


def _allow_files(wanted: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        more = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, more), hard))


def target_of(node: Node) -> Target:
    from orchestrator.transport import route

    return route.Target(
        node=node.name,
        host=node.host,
        port=node.port,
        user=node.user,
        key_file=node.key_file,
        host_key=node.host_key,
        proxy_jump=node.proxy_jump,
        connect_timeout_s=node.connect_timeout_s,
    )
