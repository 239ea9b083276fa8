"""Reads hosts from hostfiles, Ansible inventories and SSH configurations, and writes a new inventory file."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.errors import InventoryError, Mistake, UsageError
from orchestrator.hosts.forms.ansible import read_ansible
from orchestrator.hosts.forms.hostfile import SshHost, read_hostfile, read_ssh_hosts
from orchestrator.hosts.forms.imported import Given, Imported, ImportedHost
from orchestrator.hosts.grammar import names_in
from orchestrator.hosts.inventory import once
from orchestrator.hosts.inventory_file import parse_inventory
from orchestrator.hosts.yamlfile import Document, KeyPath, read_text, yaml_of
from orchestrator.units import one_line

_LISTING_S = 120.0
"""For an inventory plugin that asks a cloud."""


def from_hostfile(path: Path) -> Imported:
    return read_hostfile(str(path), read_text(path, "a hostfile"))


def from_ansible(path: Path) -> Imported:
    """By Ansible itself. A file that holds what it has listed on another machine needs no Ansible here."""
    if path.suffix == ".json":
        found = _json_of(path, read_text(path, "the output of `ansible-inventory --list`"))
        if isinstance(found, dict) and "_meta" in found:
            return read_ansible(str(path), found)
    return read_ansible(str(path), _json_of(path, _listed(path)))


def _json_of(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path}: not the JSON of `ansible-inventory --list` ({error})", "run `ansible-inventory --list` again"
        ) from error


def _listed(path: Path) -> str:
    """Raises UsageError with Ansible's own words."""
    program = shutil.which("ansible-inventory")
    if not path.exists():
        raise UsageError(f"{path}: no such file", "give the path of an Ansible inventory")
    if not program:
        line = f"`ansible-inventory -i {path} --list > hosts.json`"
        raise UsageError(
            "this machine has no `ansible-inventory`",
            f"run {line} on a machine that has it, then `orch init --from ansible hosts.json`",
        )
    environment = {
        **os.environ,
        "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "1",
        "ANSIBLE_NOCOLOR": "1",
        "COLUMNS": "1000",
    }
    argv = [program, "-i", str(path.absolute()), "--list"]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL, timeout=_LISTING_S
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"{path}: `ansible-inventory` took more than {_LISTING_S:g} s", "run it by hand") from error
    except OSError as error:
        raise UsageError(f"{program} cannot be run ({error.strerror})", "install Ansible anew") from error
    if done.returncode:
        lines = re.findall(r"^(?:\[(?:WARNING|ERROR)\]:|ERROR[:!]) (.+)", done.stderr, re.M)
        lines = lines or done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        causes = [line for line in lines if line.startswith("Failed")] or lines
        raise UsageError(f"{path}: {one_line(causes[-1], 500)}", f"for more: `ansible-inventory -i {path} --list`")
    return done.stdout


def from_ssh_config(listed: str) -> Imported:
    """listed: names, ranges and patterns of its hosts."""
    from orchestrator.transport.ssh_config import aliases, config_files, left_out  # paramiko is slow to import

    files = config_files()
    file = str(files[0]) if files else "~/.ssh/config"
    known = {host.name: host for host in aliases()}
    if not known:
        raise UsageError(
            f"{file} names no hosts",
            "write `Host NAME` with its HostName there, or run `orch init` without --ssh-config",
        )
    names = names_in(listed, list(known), file)
    if not names:
        raise UsageError("--ssh-config names no host", f"'*' takes all of {file}")
    if missing := [name for name in names if name not in known]:
        near = "a host that only matches a pattern like `Host gpu*` needs its own `Host` line"
        raise UsageError(f"{file} has no `Host {missing[0]}`", near)
    chosen = [known[name] for name in names]
    hosts = [SshHost(host.name, host.file, host.line, _with_tilde(host.options), host.problem) for host in chosen]
    found = read_ssh_hosts(file, hosts)
    return replace(found, left_out=(*found.left_out, *left_out()))


def _with_tilde(options: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes paramiko's expansion of the home folder, so that the file works on other machines."""
    home = f"{Path.home()}/"
    keys = [
        f"~/{name.removeprefix(home)}" if name.startswith(home) else name for name in options.get("identityfile", [])
    ]
    return {**options, "identityfile": keys}


# Writes an inventory file from imported hosts, after a check by the inventory's own reader. Pure.

_ORDER = ("host", "port", "user", "key_file", "proxy_jump", "connect_timeout", "python", "ranks", "transport")


@dataclass(frozen=True)
class Wanted:
    cluster: str
    source: str
    """Origin of the hosts, shown to people."""
    user: str | None = None
    """For hosts without a user of their own."""
    target: str = "rack.yaml"
    """Name of the new file."""


def inventory_text(found: Imported, wanted: Wanted) -> str:
    """Raises InventoryError with all mistakes, by the lines of the hosts' own files."""
    hosts = [_with_user(host, wanted.user) for host in found.hosts]
    _check(found, hosts, wanted.cluster)
    common = _common(hosts)
    count = f"{len(hosts)} host{'s' if len(hosts) > 1 else ''}"
    lines = [f"# Written by `orch init` from {one_line(wanted.source)}: {count}.", f"cluster: {wanted.cluster}"]
    if common:
        lines += [f"# Common to {'all of them' if len(hosts) > 2 else 'both'}.", f"defaults: {flow(_plain(common))}"]
    lines.append("nodes:")
    for host in hosts:
        own = {key: given for key, given in host.keys.items() if key not in common}
        lines.append(f"  - {flow({'name': host.name, **_plain(own)})}")
    text = "\n".join(lines) + "\n"
    parse_inventory(yaml_of(wanted.target, text, verbatim=["env"]))
    return text


def checked_template(wanted: Wanted) -> str:
    """A template to fill in."""
    text = template(wanted.cluster, scalar(wanted.user or "ubuntu"), wanted.target)
    parse_inventory(yaml_of(wanted.target, text, verbatim=["env"]))
    return text


def _with_user(host: ImportedHost, user: str | None) -> ImportedHost:
    keys = host.keys if user is None else {"user": Given(user, 0), **host.keys}
    return ImportedHost(host.name, host.line, keys, host.file)


def _plain(keys: Mapping[str, Given]) -> dict[str, Any]:
    return {key: keys[key].value for key in _ORDER if key in keys}


def _common(hosts: Sequence[ImportedHost]) -> dict[str, Given]:
    """Keys with equal values on all of several hosts."""
    first, *others = hosts
    return {
        key: given
        for key, given in first.keys.items()
        if key != "host" and others and all(host.keys.get(key, Given(None, 0)).value == given.value for host in others)
    }


# ---- the check -------------------------------------------------------------------------------------------------------


def _check(found: Imported, hosts: Sequence[ImportedHost], cluster: str) -> None:
    mistakes = list(found.mistakes)
    for file in dict.fromkeys(host.file or found.file for host in hosts):
        mistakes += _mistakes(file, [host for host in hosts if (host.file or found.file) == file], cluster)
    if hosts and not mistakes:
        mistakes += _mistakes(found.file, hosts, cluster)  # duplicates across files
    if mistakes:
        ordered = sorted(
            dict.fromkeys(mistakes), key=lambda mistake: (mistake.file != found.file, mistake.file, mistake.line)
        )
        raise InventoryError(once(ordered))


def _mistakes(file: str, hosts: Sequence[ImportedHost], cluster: str) -> Sequence[Mistake]:
    """Mistakes found by the inventory's reader, with the lines of the hosts' own file."""
    nodes = [{"name": host.name, **_plain(host.keys)} for host in hosts]
    lines: dict[KeyPath, int] = {}
    for position, host in enumerate(hosts):
        lines[("nodes", position)] = host.line
        lines |= {("nodes", position, key): given.line or host.line for key, given in host.keys.items()}
    try:
        parse_inventory(Document(file, {"cluster": cluster, "nodes": nodes}, lines, (), False))
    except InventoryError as error:
        return error.mistakes
    return ()


# Template for `orch init` without another source of hosts. Pure.

_TEXT = """\
# A cluster for `orch up {file}`. Fill in your hosts; `orch help hosts` has the keys.
cluster: {cluster}

# Defaults of all hosts; a host's own values replace them.
defaults:
  user: {user}                        # the login name; training needs no root
  # key_file: ~/.ssh/id_ed25519       # default: keys of the agent and of ~/.ssh/config
  # python: /opt/conda/bin/python     # a Python with torch; python3 if not given; `orch setup` makes it
  # proxy_jump: me@gate.lab           # jump host
  # workdir: ~/.orch                  # for code, jobs and logs

nodes:
  - name: gpu01
    host: 192.168.1.41                # name, address or alias of ~/.ssh/config
    # port: 22
    # gpus: 1                         # expected number of GPUs
    # gpu: RTX A2000                  # a label for people
    # bandwidth: 2.5Gbps              # of this host's link

  - name: gpu02
    host: 192.168.1.42
"""


def template(cluster: str, user: str, file: str) -> str:
    return _TEXT.format(cluster=cluster, user=user, file=one_line(file))


# YAML values with one meaning for all readers: ours, PyYAML (YAML 1.1) and YAML 1.2. Pure.

_PLAIN = re.compile(r"[A-Za-z~/][A-Za-z0-9_./~@+-]*|[0-9]+(\.[0-9]+){3}")
_OTHER = re.compile(r"(y|n|yes|no|on|off|true|false|null|~)", re.IGNORECASE)
"""Some readers take these for something other than text."""


def scalar(value: str | int) -> str:
    if isinstance(value, int):
        return str(value)
    if _PLAIN.fullmatch(value) and not _OTHER.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False)


def flow(values: Mapping[str, Any]) -> str:
    """`{user: me, port: 22}`"""
    return "{" + ", ".join(f"{key}: {scalar(value)}" for key, value in values.items()) + "}"
