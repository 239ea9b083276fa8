"""Finds the route to a host: a list of hops from the inventory and the SSH configuration.

    find_route(Target("v100", "10.0.0.7", proxy_jump="me@gate:2222"))      # jump hosts first, the host last

The inventory wins; the configuration adds HostName, User, Port, IdentityFile, CertificateFile, IdentityAgent,
IdentitiesOnly, ProxyJump, HostKeyAlias, UserKnownHostsFile, GlobalKnownHostsFile and ConnectTimeout. Uses no network.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from orchestrator.errors import HostError
from orchestrator.transport.hostkeys import Peer, known_name
from orchestrator.transport.ssh_config import Setting, Settings, Tokens, settings
from orchestrator.units import place

_MAX_JUMPS = 8
_JUMP = re.compile(
    r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?:\[(?P<bracketed>[^\]]+)\]|(?P<host>[^:@\[\]]+))(?::(?P<port>\d+))?/?"
)
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_SECURITY_KEYS = ("id_ed25519_sk", "id_ecdsa_sk")


@dataclass(frozen=True)
class Target:
    node: str
    host: str
    port: int | None = None
    user: str | None = None
    key_file: str | None = None
    host_key: str | None = None  # `ssh-ed25519 AAAA...` or `SHA256:...`
    proxy_jump: str | None = None  # `[user@]host[:port][,...]`; `none` for no jump at all
    connect_timeout_s: float | None = None


@dataclass(frozen=True)
class Hop:
    """One SSH server on the way to a node, with everything needed to log in."""

    peer: Peer
    host: str
    port: int
    user: str
    key_files: tuple[Path, ...]  # in the order to try: private keys, or public keys whose private half is in an agent
    key_required: bool  # the inventory names the key: if unusable, it is an error
    agent: bool  # other keys of the agent may be tried too
    through: str = ""  # the jump hosts before it, as for `ssh -J`
    certificates: tuple[Path, ...] = ()  # besides FILE-cert.pub of each key
    agent_socket: str = ""  # "" for no agent
    not_tried: str = ""  # keys in the configuration that we cannot use
    connect_timeout_s: float = 0.0  # ConnectTimeout of the configuration; 0 if not set
    origins: tuple[tuple[str, str], ...] = ()  # origins of values: ("host", "HostName in /home/me/.ssh/config:3")

    @property
    def place(self) -> str:
        return place(self.host, self.port)

    @property
    def login(self) -> str:
        return f"{self.user}@{self.place}"

    def origin_of(self, *names: str) -> str:
        """` (HostName in FILE:3)`: where the SSH configuration sets these values; "" for the inventory's."""
        found = [origin for name, origin in self.origins if name in names]
        return f" ({', '.join(dict.fromkeys(found))})" if found else ""


def find_route(
    target: Target, ssh_config: Path | None = None, note: Callable[[str], None] = lambda line: None
) -> tuple[Hop, ...]:
    """The hops to `target`, the target itself last.

    ssh_config: replaces $ORCH_SSH_CONFIG, ~/.ssh/config and the system's. note: called with ignored parts of it. Raises
    HostError for an impossible route or an implicit login as root, UsageError for a broken configuration.
    """
    try:
        hops = list(_hops(target, ssh_config, note, jump=False, depth=0, named_by=""))
    except ValueError as error:
        words = f"the SSH configuration for {target.host} cannot be used ({error})"
        raise HostError(target.node, words, "`ssh -G HOST` shows what OpenSSH makes of it") from error
    logins = [hop.login for hop in hops]
    return tuple(replace(hop, through=",".join(logins[:position])) for position, hop in enumerate(hops))


def _hops(
    target: Target, path: Path | None, note: Callable[[str], None], *, jump: bool, depth: int, named_by: str
) -> Iterator[Hop]:
    direct = target.proxy_jump is not None
    found = settings(target.host, user=target.user, port=target.port, direct=direct, path=path, note=note)
    hop = _hop(target, found, jump=jump, named_by=named_by)
    chain, way = target.proxy_jump or "none", named_by if jump else ""
    if not direct and "proxyjump" in found:
        jumps = found["proxyjump"][0]
        way = f"ProxyJump in {jumps.origin}"
        chain = _tokens(target, hop, found).expand("ProxyJump", jumps, file=False)
    if chain.lower() != "none":
        if depth == _MAX_JUMPS:
            raise HostError(
                target.node, f"more than {_MAX_JUMPS} jump hosts", "look for a ProxyJump that leads in a circle"
            )
        yield from _jumps(target, hop, chain, path, note, depth, way)
    elif not direct and found.get("proxycommand", [Setting(("none",))])[0].value.lower() != "none":
        origin = found["proxycommand"][0].origin
        remedy = "write the route as `proxy_jump:` in the inventory or ProxyJump in the SSH configuration"
        raise HostError(
            target.node, f"{target.host} is reached by a ProxyCommand ({origin}), which orch does not support", remedy
        )
    yield hop


def _jumps(
    target: Target, hop: Hop, chain: str, path: Path | None, note: Callable[[str], None], depth: int, named_by: str
) -> Iterator[Hop]:
    # As in OpenSSH: the first jump host may have a ProxyJump of its own, each later one is reached through the previous
    # one. hop: where the chain leads.
    way = f" ({named_by})" if named_by else ""
    specs = chain.split(",")
    for position, text in enumerate(specs):
        match = _JUMP.fullmatch(text.strip())
        if not match:
            what = named_by or "proxy_jump"
            raise HostError(
                target.node, f"{what}: {text.strip()!r}", "write it as [user@]host[:port], several with commas"
            )
        host, port = match["bracketed"] or match["host"], match["port"]
        is_itself = (host, int(port or 22), match["user"] or hop.user) == (hop.host, hop.port, hop.user)
        if is_itself and position == len(specs) - 1:
            raise HostError(target.node, f"{target.host} is its own jump host{way}", "write `ProxyJump none` for it")
        further = None if position == 0 else "none"
        via = Target(target.node, host, int(port) if port else None, match["user"], target.key_file, None, further)
        yield from _hops(via, path, note, jump=True, depth=depth + 1, named_by=named_by)


def _tokens(target: Target, hop: Hop, found: Settings) -> Tokens:
    alias = found["hostkeyalias"][0].value if "hostkeyalias" in found else ""
    return Tokens(target.host, hop.host, str(hop.port), hop.user, alias)


def _hop(target: Target, found: Settings, *, jump: bool, named_by: str) -> Hop:
    def value(keyword: str, default: str = "") -> str:
        return found[keyword][0].value if keyword in found else default

    def origin(keyword: str, shown: str) -> str:
        return f"{shown} in {found[keyword][0].origin}"

    origins = [("host", named_by)] if named_by else []
    host = value("hostname", target.host)
    if host != target.host:
        origins.append(("host", origin("hostname", "HostName")))
    port = target.port or int(value("port", "22"))
    if not target.port and port != 22:
        origins.append(("port", origin("port", "Port")))
    if not target.user and "user" in found:
        origins.append(("user", origin("user", "User")))
    alias = value("hostkeyalias")
    user = target.user or value("user") or _local_user(target, jump)
    files = _known_hosts(found, Tokens(target.host, host, str(port), user, alias))
    name = alias or known_name(host, port)
    hop = Hop(
        peer=Peer(target.node, name, target.host_key, files, jump, (alias or host).lower()),
        host=host,
        port=port,
        user=user,
        key_files=(),
        key_required=False,
        agent=value("identitiesonly", "no").lower() != "yes",
        not_tried=_not_tried(found),
        connect_timeout_s=_seconds(value("connecttimeout", "none")),
        origins=tuple(origins),
    )
    return _with_keys(hop, target, found, jump)


def _with_keys(hop: Hop, target: Target, found: Settings, jump: bool) -> Hop:
    tokens = _tokens(target, hop, found)
    named = [one for one in found.get("identityfile", ()) if one.value.lower() != "none"]
    paths = [Path(tokens.expand("IdentityFile", one)) for one in named]
    lines = [(str(path), f"IdentityFile in {one.origin}") for path, one in zip(paths, named, strict=True)]
    own = target.key_file if not (jump and named) else None  # for a jump host its own IdentityFile is the better guess
    keys = [Path(own).expanduser()] if own else paths or [Path.home() / ".ssh" / name for name in _DEFAULT_KEYS]
    certificates = [one for one in found.get("certificatefile", ()) if one.value.lower() != "none"]
    return replace(
        hop,
        key_files=tuple(keys),
        key_required=own is not None and not jump,
        certificates=tuple(Path(tokens.expand("CertificateFile", one)) for one in certificates),
        agent_socket=_agent_socket(found, tokens),
        origins=(*hop.origins, *(() if own else lines)),
    )


def _agent_socket(found: Settings, tokens: Tokens) -> str:
    usual = os.environ.get("SSH_AUTH_SOCK", "")
    if "identityagent" not in found:
        return usual
    setting = found["identityagent"][0]
    if setting.value.lower() == "none":
        return ""
    socket = tokens.expand("IdentityAgent", setting)
    if socket == "SSH_AUTH_SOCK":
        return usual
    return os.environ.get(socket[1:], "") if socket.startswith("$") else socket


def _seconds(text: str) -> float:
    units = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
    return float(sum(int(number) * units[unit.lower()] for number, unit in re.findall(r"(\d+)([smhdwSMHDW]?)", text)))


def _not_tried(found: Settings) -> str:
    ways = [f"keys of PKCS11Provider {one.value} ({one.origin})" for one in found.get("pkcs11provider", ())[:1]]
    ways += [f"the security key {name}" for name in _SECURITY_KEYS if (Path.home() / ".ssh" / name).exists()]
    return ", ".join(way for way in ways if "Provider none" not in way)


def _local_user(target: Target, jump: bool) -> str:
    # The local user, as in ssh; but never an implicit login as root.
    name = getpass.getuser()
    if name == "root":
        remedy = f"write `user@{target.host}` in `proxy_jump:`" if jump else "set `user:` in the inventory"
        raise HostError(target.node, f"no user is named for {target.host}, and you are root here", remedy)
    return name


def _known_hosts(found: Settings, tokens: Tokens) -> tuple[Path, ...] | None:
    usual = {
        "userknownhostsfile": ("UserKnownHostsFile", ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")),
        "globalknownhostsfile": ("GlobalKnownHostsFile", ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")),
    }
    if not usual.keys() & found.keys():
        return None
    files: list[str] = []
    for keyword, (shown, names) in usual.items():
        setting = found[keyword][0] if keyword in found else Setting(names)
        files += [tokens.expand(shown, replace(setting, words=(name,))) for name in setting.words]
    return tuple(Path(name) for name in files if name.lower() != "none")
