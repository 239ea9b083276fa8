"""One open connection a host, for the length of one command.

with Connections(home) as connections:
    hosts = connections.open(cluster.nodes)             # name -> Host, or that host's error
    facts = connections.each(cluster.nodes, probe, deadline_s=90)   # the same, and what `probe(host)` gives

Opening a node again ends the connection that it had, and a node is known by its name, which only one cluster's nodes
have to themselves. What goes on meanwhile, or beside other clusters' nodes, has connections apart from these:

    with connections.apart(values(hosts)) as others:        # those of `hosts` go along
        ...
"""

from __future__ import annotations

import math
import resource
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from orchestrator.errors import ConnectError, HostError
from orchestrator.paths import Home
from orchestrator.transport import Transport
from orchestrator.transport.ask import ConnectedHost
from orchestrator.transport.fanout import errors_by_node, for_each
from orchestrator.transport.shell import LocalTransport

if TYPE_CHECKING:  # both are slow to load: a list of jobs does without nodes, a cluster of local ones without paramiko
    from orchestrator.hosts.inventory import Node
    from orchestrator.transport.route import Target

CONNECT_S = 10.0
DIAL_S, LOGIN_S = 2.0, 6.0
"""A look at who answers: a host that is off costs DIAL_S, one that is up and busy has LOGIN_S to let us in."""
FILES_PER_HOST = 12
"""A connection, and what its commands take."""

R = TypeVar("R")


class Connections:
    """accept_new_host_keys: record the keys of hosts of which none is known. ask_passphrase: see `transport.ssh`.
    say: called once with each line to read about the SSH configuration.
    """

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
        """Others, which end with the block, or with ours. hosts: by node; where these are still our connections, they
        go along, and whoever asks us for such a node connects anew.
        """
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
        """Those of these that nobody has opened again since."""
        return {name: host for name, host in hosts.items() if self._transports.get(name) is host.transport}

    def open(self, nodes: Sequence[Node]) -> dict[str, ConnectedHost | HostError]:
        """All at once; every node has its answer within the time for connecting."""
        return self.each(nodes, lambda host: host, deadline_s=5)

    def each(
        self, nodes: Sequence[Node], action: Callable[[ConnectedHost], R], *, deadline_s: float
    ) -> dict[str, R | HostError]:
        """Connects to all at once and does this there as soon as a host answers, however long others stay silent.

        deadline_s: for the action, besides the time for connecting.
        """
        self._nodes |= {node.name: node for node in nodes}
        _allow_files(FILES_PER_HOST * len(nodes))
        if self._ask:
            self._unlock_keys(nodes, self._ask)
        names = {node.name: node.name for node in nodes}
        return for_each(names, lambda name: action(self.reopen(name)), deadline_s=CONNECT_S + deadline_s)

    def silent(self, nodes: Sequence[Node]) -> dict[str, HostError]:
        """Those that cannot be logged in to at this moment, and why. All at once, within a few seconds."""
        self._nodes |= {node.name: node for node in nodes}
        _allow_files(FILES_PER_HOST * len(nodes))
        if any(node.transport == "ssh" for node in nodes):
            from orchestrator.transport import ssh as _  # noqa: F401 - slow to import, and no host's fault
        names = {node.name: node.name for node in nodes}
        looked = for_each(names, lambda name: self.reopen(name, LOGIN_S, DIAL_S), deadline_s=LOGIN_S + 2)
        return errors_by_node(looked)

    def reopen(self, name: str, timeout_s: float = CONNECT_S, dial_s: float = math.inf) -> ConnectedHost:
        """A fresh connection to a node of `open`. timeout_s, dial_s: see `transport.ssh.connect`. Raises HostError."""
        self._refuse_if_over(name)
        previous = self._transports.pop(name, None)
        if previous:
            previous.close()
        node = self._nodes[name]
        transport = self._transports[name] = self._connect(node, timeout_s, dial_s)
        if self._is_over:
            transport.close()
        self._refuse_if_over(name)  # a late host
        return ConnectedHost(transport, node.python, node.activate, node.workdir)

    def _refuse_if_over(self, name: str) -> None:
        """Threads that still listen must not dial again when nobody is left to hear them."""
        if self._is_over:
            raise ConnectError(name, "its connection was closed here: the command is over")

    def current(self, name: str) -> ConnectedHost:
        """The connection of this moment to a node of `open`, a fresh one where there is none. Raises HostError."""
        if name not in self._transports:
            return self.reopen(name)
        node = self._nodes[name]
        return ConnectedHost(self._transports[name], node.python, node.activate, node.workdir)

    def _connect(self, node: Node, timeout_s: float, dial_s: float) -> Transport:
        if node.transport == "local":
            return LocalTransport(node.name)
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
        if self._said.setdefault(line, ours) is ours:  # many threads, one of which was the first
            self._say(line)

    def _unlock_keys(self, nodes: Sequence[Node], ask: Callable[[str], str | None]) -> None:
        """Before the hosts are dialled all at once: a question must not come up in one of many threads."""
        for node in nodes:
            if node.transport == "ssh":
                from orchestrator.transport import ssh

                ssh.unlock(target_of(node), ask)


def _allow_files(wanted: int) -> None:
    """Many systems let a program open 1024 files unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        more = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, more), hard))


def target_of(node: Node) -> Target:
    """Where SSH goes for this node."""
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
