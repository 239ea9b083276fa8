"""The way to a host: inventory and SSH configuration together, as a list of hops.

Takes a `Target` (what the inventory says) and the person's SSH configuration; gives the hops to connect through, jump
hosts first, the host itself last. What the inventory says wins; the configuration fills the rest (HostName, User, Port,
IdentityFile, IdentitiesOnly, ProxyJump, HostKeyAlias, UserKnownHostsFile, GlobalKnownHostsFile, Include). Knows no
network.

    find_route(Target("v100", "10.0.0.7", proxy_jump="me@gate:2222"), read_ssh_config())
"""

from __future__ import annotations

import errno
import getpass
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import paramiko

from orchestrator.errors import HostError, UsageError
from orchestrator.text import place
from orchestrator.transport.hostkeys import Peer, known_name

_MAX_JUMPS = 8
_MAX_INCLUDES = 16  # as deep as OpenSSH follows them
_JUMP = re.compile(
    r"(?:ssh://)?(?:(?P<user>[^@]+)@)?(?:\[(?P<ipv6>[^\]]+)\]|(?P<host>[^:@\[\]]+))(?::(?P<port>\d+))?/?"
)
_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa")
_KEYWORD = re.compile(r"\s*(host|match|include)(?:\s*=\s*|\s+)(.+)", re.IGNORECASE)


@dataclass(frozen=True)
class Target:
    """What the inventory says of one node."""

    node: str
    host: str
    port: int | None = None
    user: str | None = None
    key_file: str | None = None
    host_key: str | None = None
    """`ssh-ed25519 AAAA...` or `SHA256:...`."""
    proxy_jump: str | None = None
    """`[user@]host[:port][,...]`; `none` for no jump at all."""


@dataclass(frozen=True)
class Alias:
    """A host of the person's SSH configuration."""

    name: str
    file: str
    line: int
    """Where its `Host` line is."""
    options: Mapping[str, Any]
    """What holds for it, by the keyword in small letters."""
    problem: str = ""
    """Why it cannot be used."""


@dataclass(frozen=True)
class Hop:
    """One SSH server on the way to a node, with everything that is needed to log in."""

    peer: Peer
    host: str
    port: int
    user: str
    key_files: tuple[Path, ...]
    """In the order to try."""
    key_required: bool
    """Whether the inventory names the key, so that one which cannot be used is an error."""
    agent: bool
    """Whether keys of the agent may be tried, too."""
    through: str = ""
    """The jump hosts before it, as `ssh -J` has them."""

    @property
    def place(self) -> str:
        """`192.168.1.41:22`, `[fd00::1]:22`."""
        return place(self.host, self.port)

    @property
    def login(self) -> str:
        return f"{self.user}@{self.place}"


def read_ssh_config(path: Path | None = None) -> paramiko.SSHConfig:
    """The person's SSH configuration: `path`, else $ORCH_SSH_CONFIG, else ~/.ssh/config and the system's.

    Raises UsageError for a file that cannot be read or parsed.
    """
    config = paramiko.SSHConfig()
    for file in config_files(path):
        try:
            config.parse(line for line, _, _ in _lines(file, "Host *"))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # no fault of the file's: `cli.common` says what to try
            raise UsageError(f"{file}: {error.strerror}", "make the SSH configuration readable") from error
        except (paramiko.SSHException, ValueError, RuntimeError) as error:  # quotes without an end, `~nobody`
            raise UsageError(
                f"{file}: {error}", "mend that line; `ssh -G HOST` shows what OpenSSH makes of it"
            ) from error
    return config


def config_files(path: Path | None = None) -> list[Path]:
    chosen = path or os.environ.get("ORCH_SSH_CONFIG")
    if chosen:
        return [Path(chosen).expanduser()]
    return [file for file in (Path.home() / ".ssh/config", Path("/etc/ssh/ssh_config")) if file.exists()]


def aliases(path: Path | None = None) -> Iterator[Alias]:
    """Each name that a `Host` line gives without a pattern, once, with what the whole configuration says of it.

    Raises as `read_ssh_config`.
    """
    config = read_ssh_config(path)
    found: dict[str, tuple[Path, int]] = {}
    for file in config_files(path):
        for line, inside, number in _lines(file, "Host *"):
            keyword = _KEYWORD.match(line)
            if keyword and keyword[1].lower() == "host" and number:
                for name in shlex.split(keyword[2], comments=True):
                    found.setdefault(name, (inside, number))
    for name, (file, number) in found.items():
        if not set("*?!") & set(name):
            yield _alias(name, file, number, config)


def _alias(name: str, file: Path, line: int, config: paramiko.SSHConfig) -> Alias:
    try:
        return Alias(name, str(file), line, dict(_options(Target(name, name), config)))
    except HostError as error:
        return Alias(name, str(file), line, {}, f"{error.message.removeprefix(f'{name}: ')}; {error.remedy}")


def find_route(target: Target, config: paramiko.SSHConfig) -> tuple[Hop, ...]:
    """The hops to `target`, the target itself last.

    Raises HostError for a jump that cannot be, and for a login as root that nobody asked for.
    """
    hops = list(_hops(target, config, jump=False, depth=0))
    logins = [hop.login for hop in hops]
    return tuple(replace(hop, through=",".join(logins[:position])) for position, hop in enumerate(hops))


def _lines(file: Path, block: str, depth: int = 0) -> Iterator[tuple[str, Path, int]]:
    """The lines of a configuration with its Include lines replaced by what they name; paramiko reads no Include. With
    each its file and number, 0 for those that nobody wrote.
    """
    yield f"{block}\n", file, 0
    for number, line in enumerate(file.read_text(errors="replace").splitlines(keepends=True), 1):
        keyword = _KEYWORD.match(line)
        if not keyword or keyword[1].lower() != "include":
            block = line.strip() if keyword else block
            yield line, file, number
        elif depth < _MAX_INCLUDES:
            for included in _included(file, keyword[2]):
                yield from _lines(included, block, depth + 1)
            yield f"{block}\n", file, 0  # what follows belongs to the block around the Include again


def _included(file: Path, patterns: str) -> list[Path]:
    """Relative names count from the folder of the configuration: ~/.ssh or /etc/ssh, as in ssh_config(5)."""
    found: list[Path] = []
    for pattern in shlex.split(patterns):
        path = file.parent / Path(pattern).expanduser()
        found += sorted(match for match in path.parent.glob(path.name) if match.is_file())
    return found


def _hops(target: Target, config: paramiko.SSHConfig, *, jump: bool, depth: int) -> Iterator[Hop]:
    options = _options(target, config)
    chain = target.proxy_jump or options.get("proxyjump", "none")
    if chain.lower() != "none":
        if depth == _MAX_JUMPS:
            raise HostError(
                target.node, f"more than {_MAX_JUMPS} jump hosts", "look for a ProxyJump that leads in a circle"
            )
        yield from _jumps(target, chain, config, depth)
    elif options.get("proxycommand"):
        remedy = "write the way as `proxy_jump:` in the inventory or ProxyJump in the SSH configuration"
        raise HostError(target.node, f"the SSH configuration of {target.host} uses ProxyCommand", remedy)
    yield _hop(target, options, jump=jump)


def _jumps(target: Target, chain: str, config: paramiko.SSHConfig, depth: int) -> Iterator[Hop]:
    """As OpenSSH: the first jump host may have a ProxyJump of its own, each later one is reached through the former."""
    for position, text in enumerate(chain.split(",")):
        match = _JUMP.fullmatch(text.strip())
        if not match:
            raise HostError(
                target.node, f"proxy_jump {text.strip()!r}", "write it as [user@]host[:port], several with commas"
            )
        host, port = match["ipv6"] or match["host"], match["port"]
        further = None if position == 0 and host != target.host else "none"
        via = Target(target.node, host, int(port) if port else None, match["user"], target.key_file, None, further)
        yield from _hops(via, config, jump=True, depth=depth + 1)


def _options(target: Target, config: paramiko.SSHConfig) -> paramiko.SSHConfigDict:
    try:
        return config.lookup(target.host)
    except (paramiko.SSHException, ImportError, ValueError, KeyError) as error:
        remedy = "`ssh -G HOST` shows what OpenSSH makes of it"
        raise HostError(
            target.node, f"the SSH configuration of {target.host} cannot be used ({error})", remedy
        ) from error


def _hop(target: Target, options: paramiko.SSHConfigDict, *, jump: bool) -> Hop:
    host = options.get("hostname", target.host)
    port = target.port or int(options.get("port", 22))
    named = [Path(name).expanduser() for name in options.get("identityfile", []) if name.lower() != "none"]
    own = target.key_file if not (jump and named) else None  # a jump host's own IdentityFile is the better guess
    keys = [Path(own).expanduser()] if own else named or [Path.home() / ".ssh" / name for name in _DEFAULT_KEYS]
    alias = options.get("hostkeyalias")
    return Hop(
        peer=Peer(target.node, alias or known_name(host, port), target.host_key, _known_hosts(options), jump),
        host=host,
        port=port,
        user=target.user or options.get("user") or _own_name(target, jump),
        key_files=tuple(keys),
        key_required=own is not None and not jump,
        agent=options.get("identitiesonly", "no").lower() != "yes",
    )


def _own_name(target: Target, jump: bool) -> str:
    """Who we are here, as ssh has it; but a login as root is never a default."""
    name = getpass.getuser()
    if name == "root":
        remedy = f"write `user@{target.host}` in `proxy_jump:`" if jump else "set `user:` in the inventory"
        raise HostError(target.node, f"no user is named for {target.host}, and you are root here", remedy)
    return name


def _known_hosts(options: paramiko.SSHConfigDict) -> tuple[Path, ...] | None:
    """The known_hosts files that the configuration names, None where it names none."""
    if "userknownhostsfile" not in options and "globalknownhostsfile" not in options:
        return None
    user = options.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2")
    system = options.get("globalknownhostsfile", "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2")
    return tuple(Path(name).expanduser() for name in shlex.split(f"{user} {system}") if name.lower() != "none")
