"""Builds command lines and configuration for the system's own `ssh`, with what we know about a host.

    argv = command_line(target, host_keys, pins=home.root / "pinned_hosts")
    os.execvp(argv[0], argv)
    print(host_entry(target, host_keys, pins=home.root / "pinned_hosts"))       # for scp, rsync, ansible, editors

Uses the same route as `ssh.connect`: user, port and keys of each hop, jump hosts as nested ProxyCommands, and only
known host keys. The person's configuration applies in everything else. The line contains no secret: keys are file
names.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import paramiko

from orchestrator.errors import HostKeyError, OrchError
from orchestrator.files import write_atomic
from orchestrator.transport import shell
from orchestrator.transport.hostkeys import HostKeys, Peer, known_name
from orchestrator.transport.route import Hop, Target, find_route
from orchestrator.transport.ssh import fetch_host_key
from orchestrator.transport.ssh_config import ASKS

_STRICT = ("StrictHostKeyChecking=yes", "UpdateHostKeys=no", "CheckHostIP=no", "GlobalKnownHostsFile=/dev/null")


def command_line(
    target: Target,
    host_keys: HostKeys,
    *,
    pins: Path,
    command: Sequence[str] = (),
    terminal: bool = False,
    options: Sequence[str] = (),
) -> list[str]:
    """pins: a folder for files with pinned keys. command: to run instead of a shell; a single word is a line of shell.
    terminal: whether the command gets one. options: more words for `ssh`.

    Raises OrchError without an `ssh`, HostKeyError for an unknown key, and the errors of `ssh.fetch_host_key`.
    """
    program = _program()
    _, settings = _way(program, target, host_keys, pins)
    chosen = os.environ.get("ORCH_SSH_CONFIG")
    argv = [program, *(("-F", str(Path(chosen).expanduser())) if chosen else ()), *(("-t",) if terminal else ())]
    argv += [*_options(settings), *options, "--", target.host]
    line = command[0] if len(command) == 1 else shell.join(command)
    return [*argv, f" {line}"] if command else argv  # a leading space: `-` would begin an option


def host_entry(target: Target, host_keys: HostKeys, *, pins: Path, is_included: bool = False) -> str:
    """A block for OpenSSH programs, named like the node. Arguments and errors as for `command_line`. is_included: in
    the person's own configuration, where orch must not find it.
    """
    hop, settings = _way(_program(), target, host_keys, pins)
    lines = [f"HostName={hop.host}", *settings]
    if target.connect_timeout_s:
        lines.append(f"ConnectTimeout={round(target.connect_timeout_s)}")
    begin = f'Match originalhost {target.node} exec "test -z ${ASKS}"' if is_included else f"Host {target.node}"
    return "\n".join([begin, *(f"    {line}" for line in lines)]) + "\n"


def _program() -> str:
    if program := shutil.which("ssh"):
        return program
    raise OrchError("this machine has no `ssh` program", "install OpenSSH's client (openssh-client on Debian)")


def _way(program: str, target: Target, host_keys: HostKeys, pins: Path) -> tuple[Hop, list[str]]:
    route = find_route(target)
    known = [_known_hosts(hop, target, host_keys, pins) for hop in route]
    proxy = "none"
    for hop, files, onward in zip(route, known, route[1:], strict=False):
        way = [program, "-F", "none", *_options(_settings(hop, files, proxy)), "-W", f"[{onward.host}]:{onward.port}"]
        proxy = _percents(shell.join([*way, "--", hop.host]))
    return route[-1], _settings(route[-1], known[-1], proxy)


def _options(settings: Sequence[str]) -> list[str]:
    return [word for line in settings for word in ("-o", line)]


def _settings(hop: Hop, known: Sequence[Path], proxy: str) -> list[str]:
    settings = [
        f"User={hop.user}",
        f"Port={hop.port}",
        *_STRICT,
        f"UserKnownHostsFile={' '.join(map(_quoted, known))}",
        f"ProxyCommand={proxy}",
    ]
    if hop.peer.name != known_name(hop.host, hop.port):
        settings.append(f"HostKeyAlias={hop.peer.name}")
    if not hop.agent:
        settings.append("IdentitiesOnly=yes")
    # Instead of `-i`, which looks for the file by its literal name but interprets it later.
    settings.append(f"IdentityAgent={_quoted(Path(hop.agent_socket)) if hop.agent_socket else 'none'}")
    settings += [f"CertificateFile={_quoted(file)}" for file in hop.certificates]
    return [*settings, *(f"IdentityFile={_quoted(key)}" for key in hop.key_files if hop.key_required or key.exists())]


def _known_hosts(hop: Hop, target: Target, host_keys: HostKeys, pins: Path) -> tuple[Path, ...]:
    peer = hop.peer
    if peer.pin:
        return (_pinned(peer, peer.pin, target, host_keys, pins),)
    if not host_keys.algorithms(peer):
        raise HostKeyError(peer.node, f"{peer}: its host key is not known", f"`orch trust {peer.node}` first")
    return (host_keys.recorded, *(host_keys.users if peer.files is None else peer.files))


def _pinned(peer: Peer, pin: str, target: Target, host_keys: HostKeys, pins: Path) -> Path:
    if pin.startswith("SHA256:"):
        offered = fetch_host_key(target, host_keys=host_keys)
        key = offered.key
        host_keys.check(offered.peer, key)
    else:
        kind, encoded = pin.split()[:2]
        key = paramiko.PKey.from_type_string(kind, base64.b64decode(encoded))
        host_keys.check(peer, key)
    pins.mkdir(parents=True, mode=0o700, exist_ok=True)
    file = pins / hashlib.sha256(peer.name.encode()).hexdigest()[:16]
    write_atomic(file, f"{peer.name} {key.get_name()} {key.get_base64()}\n".encode())
    return file


def _quoted(path: Path) -> str:
    return '"' + _percents(str(path)).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _percents(text: str) -> str:
    # OpenSSH replaces `%h` and the like.
    return text.replace("%", "%%")
