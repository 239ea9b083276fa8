"""`init`: writes an inventory from hosts listed in another form."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from orchestrator.cli.common import accept_option, busy, open_controller
from orchestrator.errors import HostError, UsageError
from orchestrator.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.hosts.forms.imported import Imported

FORMS = ("hostfile", "ssh-config", "ansible", "slurm")
_SOURCE = (click.Choice(FORMS), str)
STDOUT = Path("-")


@click.command()
@click.argument("file", type=click.Path(path_type=Path), default=Path("rack.yaml"))
@click.option("--from", "source", type=_SOURCE, metavar="FORM SOURCE", help="The list of hosts, see above.")
@accept_option
@click.option("--user", metavar="NAME", help="The login name on hosts that name none.")
@click.option("--cluster", metavar="NAME", help="The cluster's name.  [default: the file's]")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def init(
    file: Path,
    source: tuple[str, str] | None,
    accept_new_host_keys: bool,
    user: str | None,
    cluster: str | None,
    force: bool,
) -> None:
    """Write an inventory from hosts that another tool's file already lists, or a template to fill in. FILE is rack.yaml
    unless you name one; `-` prints it.

    Anything an inventory cannot express is listed on standard error. Passwords are left out.

    \b
    FORM SOURCE:
      hostfile FILE     a hostfile of DeepSpeed or MPI: `host slots=4`, `host:4`
      ssh-config A,B    hosts of ~/.ssh/config: names, ranges, patterns: 'gpu*'
      ansible FILE      an inventory of Ansible, read by `ansible-inventory`
      slurm LOGIN       a login host of Slurm: [user@]host[:port], localhost

    \b
    orch init
    orch init --from hostfile /job/hostfile --user ubuntu
    orch init --from ssh-config 'gpu*,v100' lab.yaml
    orch init --from ansible hosts.ini - | less
    orch init --from slurm me@login.hpc hpc.yaml
    """
    from orchestrator.hosts import grammar
    from orchestrator.hosts.forms.sources import Wanted, checked_template, inventory_text

    _free(file, force)
    _fits("--cluster", cluster, grammar.name)
    _fits("--user", user, grammar.user)
    name = cluster or (file.stem if re.fullmatch(r"[A-Za-z0-9][\w.-]{0,62}", file.stem, re.ASCII) else "rack")
    target = "rack.yaml" if file == STDOUT else str(file)
    form, place = source or ("", "")
    if form == "slurm":
        return _write(file, *_from_slurm(place, name, target, accept_new_host_keys), force)
    title, found = _read(form, place)
    wanted = Wanted(name, title, user, target)
    text = inventory_text(found, wanted) if found else checked_template(wanted)
    count = counted(len(found.hosts), "host") if found else "to fill in"
    return _write(file, text, found.left_out if found else (), count, force)


def _fits(option: str, text: str | None, check: Callable[[str], str]) -> None:
    try:
        check("any" if text is None else text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from error


def _free(file: Path, force: bool) -> None:
    if file != STDOUT and os.path.lexists(file) and not force:
        raise UsageError(f"{file} already exists", "choose another name, or --force replaces it")


def _from_slurm(login: str, cluster: str, target: str, accept: bool) -> tuple[str, list[str], str]:
    from orchestrator.hosts import grammar
    from orchestrator.hosts.forms.slurm import slurm_inventory
    from orchestrator.hosts.inventory import Node
    from orchestrator.slurm.login import SlurmLogin

    _fits("--from slurm", login, grammar.login)
    place = grammar.login_parts(login)
    node = Node.model_validate({"name": place["host"], "transport": "slurm", **place})
    with open_controller(accept) as controller, busy(f"asking Slurm on {place['host']}"):
        (host,) = controller.connections.open([node]).values()
        if isinstance(host, HostError):
            raise host
        hosts, broken = SlurmLogin(host.transport, host.workdir).hosts()
    text, left_out = slurm_inventory(login, cluster, target, hosts)
    said = [*left_out, *(f"skipped a line of `scontrol show nodes`: {line}" for line in broken)]
    return text, said, f"{counted(text.count(chr(10) + '  - '), 'type')} of host"


def _read(form: str, place: str) -> tuple[str, Imported | None]:
    """Also returns what the comment in the inventory names."""
    from orchestrator.hosts.forms import sources

    if form == "hostfile":
        return f"the file {place}", sources.from_hostfile(Path(place))
    if form == "ansible":
        return f"the Ansible inventory {place}", sources.from_ansible(Path(place))
    if form == "ssh-config":
        found = sources.from_ssh_config(place)
        return f"the hosts {place} of {found.file}", found
    return "", None


def _write(file: Path, text: str, left_out: Sequence[str], count: str, force: bool) -> None:
    from orchestrator.files import write_atomic
    from orchestrator.views import console

    for line in left_out:
        console.say(line)
    if file == STDOUT:
        click.echo(text, nl=False)
        return
    _free(file, force)
    write_atomic(file, text)
    console.put(f"{file}: {count}; then `orch up {file}`")
