"""Where hosts in other forms are read from: this machine's files and SSH configuration.

found = from_hostfile(Path("hosts"))
found = from_ssh_config("gpu[01-04],v100*")
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.errors import InventoryError, Mistake, UsageError
from orchestrator.hosts.forms.ansible_ini import read_ini
from orchestrator.hosts.forms.ansible_yaml import is_vault, read_ansible_yaml
from orchestrator.hosts.forms.hostfile import read_hostfile
from orchestrator.hosts.forms.imported import Imported
from orchestrator.hosts.forms.ssh_config import SshHost, read_ssh_hosts
from orchestrator.hosts.node_names import names_in
from orchestrator.hosts.yamlfile import read_text, yaml_of

_YAML = (".yaml", ".yml", ".json")
"""As Ansible tells its two forms apart."""


def from_hostfile(path: Path) -> Imported:
    return read_hostfile(str(path), read_text(path, "a hostfile"))


def from_ansible(path: Path) -> Imported:
    text = read_text(path, "an Ansible inventory in YAML or INI")
    if is_vault(text):
        words = "is encrypted by ansible-vault; `ansible-vault view` shows its text, which orch can read from a file"
        raise InventoryError([Mistake(str(path), 1, words)])
    is_yaml = path.suffix in _YAML
    found = read_ansible_yaml(yaml_of(str(path), text)) if is_yaml else read_ini(str(path), text)
    beside = [name for name in ("group_vars", "host_vars") if (path.parent / name).is_dir()]
    words = (
        f"{' and '.join(beside)} beside {path.name} not read: `ansible-inventory -i {path.name} --list --yaml` has all"
    )
    return replace(found, left_out=(*found.left_out, words)) if beside else found


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
        near = "one that only fits a pattern like `Host gpu*` needs a `Host` line of its own"
        raise UsageError(f"{file} has no `Host {missing[0]}`", near)
    chosen = [known[name] for name in names]
    hosts = [SshHost(one.name, one.file, one.line, _with_tilde(one.options), one.problem) for one in chosen]
    found = read_ssh_hosts(file, hosts)
    return replace(found, left_out=(*found.left_out, *left_out()))


def _with_tilde(options: Mapping[str, Any]) -> dict[str, Any]:
    """paramiko has put the home folder in its place: the file is to fit on another machine, too."""
    home = f"{Path.home()}/"
    keys = [
        f"~/{name.removeprefix(home)}" if name.startswith(home) else name for name in options.get("identityfile", [])
    ]
    return {**options, "identityfile": keys}
