"""Reads hosts from this machine's hostfiles, Ansible inventories and SSH configuration."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.hosts.forms.ansible import read_ansible
from orchestrator.hosts.forms.hostfile import SshHost, read_hostfile, read_ssh_hosts
from orchestrator.hosts.forms.imported import Imported
from orchestrator.hosts.node_names import names_in
from orchestrator.hosts.yamlfile import read_text
from orchestrator.text import one_line

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
        raise UsageError(f"{path}: no JSON of `ansible-inventory --list` ({error})", "list it anew") from error


def _listed(path: Path) -> str:
    """Raises UsageError with Ansible's own words."""
    program = shutil.which("ansible-inventory")
    if not path.exists():
        raise UsageError(f"{path}: no such file", "give the path of an Ansible inventory")
    if not program:
        line = f"`ansible-inventory -i {path} --list > hosts.json`"
        raise UsageError("this machine has no `ansible-inventory`", f"{line} where it is, then --ansible hosts.json")
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
    known = {one.name: one for one in aliases()}
    if not known:
        raise UsageError(f"{file} names no hosts", "write `Host NAME` with its HostName there, or `orch init` alone")
    names = names_in(listed, list(known), file)
    if not names:
        raise UsageError("--ssh-config names no host", f"'*' takes all of {file}")
    if missing := [name for name in names if name not in known]:
        near = "a host that only matches a pattern like `Host gpu*` needs its own `Host` line"
        raise UsageError(f"{file} has no `Host {missing[0]}`", near)
    chosen = [known[name] for name in names]
    hosts = [SshHost(one.name, one.file, one.line, _with_tilde(one.options), one.problem) for one in chosen]
    found = read_ssh_hosts(file, hosts)
    return replace(found, left_out=(*found.left_out, *left_out()))


def _with_tilde(options: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes paramiko's expansion of the home folder, so that the file works on other machines."""
    home = f"{Path.home()}/"
    keys = [
        f"~/{name.removeprefix(home)}" if name.startswith(home) else name for name in options.get("identityfile", [])
    ]
    return {**options, "identityfile": keys}
