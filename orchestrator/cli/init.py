"""`init`: writes an inventory from hosts listed in another form."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.hosts.forms.imported import Imported

FORMS = ("hostfile", "ssh-config", "ansible")
STDOUT = Path("-")
_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("file", type=_FILE, default=Path("rack.yaml"))
@click.option("--hostfile", type=_FILE, help="A hostfile of DeepSpeed or MPI: `host slots=4`, `host:4`.")
@click.option("--ssh-config", metavar="A,B", help="Hosts of ~/.ssh/config: names, ranges, patterns like 'gpu*'.")
@click.option("--ansible", type=_FILE, help="An inventory that Ansible reads, by its `ansible-inventory`.")
@click.option("--user", metavar="NAME", help="The login name on hosts that name none.")
@click.option("--cluster", metavar="NAME", help="The cluster's name.  [default: the file's]")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def init(
    file: Path,
    hostfile: Path | None,
    ssh_config: str | None,
    ansible: Path | None,
    user: str | None,
    cluster: str | None,
    force: bool,
) -> None:
    """Write an inventory from hosts that you have in another form, or one to fill in. FILE is rack.yaml unless you name
    one; `-` prints it.

    Settings without a place in an inventory are named on standard error. Passwords are left out.

    \b
    orch init
    orch init --hostfile /job/hostfile --user ubuntu
    orch init --ssh-config 'gpu*,v100' lab.yaml
    orch init --ansible hosts.ini - | less
    """
    from orchestrator.hosts import grammar
    from orchestrator.hosts.forms.sources import Wanted, checked_template, inventory_text

    _free(file, force)
    _fits("--cluster", cluster, grammar.name)
    _fits("--user", user, grammar.user)
    name = cluster or (file.stem if re.fullmatch(r"[A-Za-z0-9][\w.-]{0,62}", file.stem, re.ASCII) else "rack")
    target = "rack.yaml" if file == STDOUT else str(file)
    source, found = _read(hostfile, ssh_config, ansible)
    wanted = Wanted(name, source, user, target)
    text = inventory_text(found, wanted) if found else checked_template(wanted)
    _write(file, text, found, force)


def _fits(option: str, text: str | None, check: Callable[[str], str]) -> None:
    try:
        check("any" if text is None else text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def _free(file: Path, force: bool) -> None:
    if file != STDOUT and os.path.lexists(file) and not force:
        raise UsageError(f"{file} already exists", "choose another name, or --force replaces it")


def _read(hostfile: Path | None, ssh_config: str | None, ansible: Path | None) -> tuple[str, Imported | None]:
    from orchestrator.hosts.forms import sources

    given = [name for name, value in zip(FORMS, (hostfile, ssh_config, ansible), strict=True) if value is not None]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} at once", "take one of them; a file may be added to by hand")
    if hostfile:
        return f"the hostfile {hostfile}", sources.from_hostfile(hostfile)
    if ansible:
        return f"the Ansible inventory {ansible}", sources.from_ansible(ansible)
    if ssh_config is not None:
        found = sources.from_ssh_config(ssh_config)
        return f"the hosts {ssh_config} of {found.file}", found
    return "", None


def _write(file: Path, text: str, found: Imported | None, force: bool) -> None:
    from orchestrator.files import write_atomic
    from orchestrator.views import console

    for line in found.left_out if found else ():
        console.say(line)
    if file == STDOUT:
        click.echo(text, nl=False)
        return
    _free(file, force)
    write_atomic(file, text)
    count = f"{len(found.hosts)} host{'s' if len(found.hosts) > 1 else ''}" if found else "to fill in"
    console.put(f"{file}: {count}; then `orch up {file}`")
