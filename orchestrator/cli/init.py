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
STDOUT = Path("-")
_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("file", type=_FILE, default=Path("rack.yaml"))
@click.option("--hostfile", type=_FILE, help="A hostfile of DeepSpeed or MPI: `host slots=4`, `host:4`.")
@click.option("--ssh-config", metavar="A,B", help="Hosts of ~/.ssh/config: names, ranges, patterns like 'gpu*'.")
@click.option("--ansible", type=_FILE, help="An inventory that Ansible reads, by its `ansible-inventory`.")
@click.option("--slurm", metavar="LOGIN", help="A Slurm cluster: its login host, [user@]host[:port], or localhost.")
@accept_option
@click.option("--user", metavar="NAME", help="The login name on hosts that name none.")
@click.option("--cluster", metavar="NAME", help="The cluster's name.  [default: the file's]")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
def init(
    file: Path,
    hostfile: Path | None,
    ssh_config: str | None,
    ansible: Path | None,
    slurm: str | None,
    accept_new_host_keys: bool,
    user: str | None,
    cluster: str | None,
    force: bool,
) -> None:
    """Write an inventory from hosts that another tool's file already lists, or a template to fill in. FILE is rack.yaml
    unless you name one; `-` prints it.

    Anything an inventory cannot express is listed on standard error. Passwords are left out.

    \b
    orch init
    orch init --hostfile /job/hostfile --user ubuntu
    orch init --ssh-config 'gpu*,v100' lab.yaml
    orch init --ansible hosts.ini - | less
    orch init --slurm me@login.hpc hpc.yaml
    """
    from orchestrator.hosts import grammar
    from orchestrator.hosts.forms.sources import Wanted, checked_template, inventory_text

    _free(file, force)
    _fits("--cluster", cluster, grammar.name)
    _fits("--user", user, grammar.user)
    name = cluster or (file.stem if re.fullmatch(r"[A-Za-z0-9][\w.-]{0,62}", file.stem, re.ASCII) else "rack")
    target = "rack.yaml" if file == STDOUT else str(file)
    _refuse_two(hostfile, ssh_config, ansible, slurm)
    if slurm:
        return _write(file, *_from_slurm(slurm, name, target, accept_new_host_keys), force)
    source, found = _read(hostfile, ssh_config, ansible)
    wanted = Wanted(name, source, user, target)
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


def _refuse_two(*values: Path | str | None) -> None:
    given = [name for name, value in zip(FORMS, values, strict=True) if value is not None]
    if len(given) > 1:
        raise UsageError(f"--{given[0]} and --{given[1]} at once", "take one of them; a file may be added to by hand")


def _from_slurm(login: str, cluster: str, target: str, accept: bool) -> tuple[str, list[str], str]:
    from orchestrator.hosts import grammar
    from orchestrator.hosts.forms.slurm import slurm_inventory
    from orchestrator.hosts.inventory import Node
    from orchestrator.slurm.login import SlurmLogin

    _fits("--slurm", login, grammar.login)
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


def _read(hostfile: Path | None, ssh_config: str | None, ansible: Path | None) -> tuple[str, Imported | None]:
    from orchestrator.hosts.forms import sources

    if hostfile:
        return f"the hostfile {hostfile}", sources.from_hostfile(hostfile)
    if ansible:
        return f"the Ansible inventory {ansible}", sources.from_ansible(ansible)
    if ssh_config is not None:
        found = sources.from_ssh_config(ssh_config)
        return f"the hosts {ssh_config} of {found.file}", found
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
