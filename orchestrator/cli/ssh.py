"""`ssh`, `ssh-config`: a shell on one host, and the same way to all of them for other programs."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import click

from orchestrator.cli.common import UMASK, cluster_option, nodes_option, open_controller
from orchestrator.cli.complete import node_names
from orchestrator.errors import OrchError


@click.command()
@click.argument("name", metavar="NODE", shell_complete=node_names)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD [ARGS]...]")
@cluster_option
def ssh(name: str, command: tuple[str, ...], cluster: str | None) -> None:
    """Open a shell on a host, or run one command there, by this machine's own `ssh`.

    It goes where orch goes: user, port, key and jump hosts are those of the inventory, and only a host key that is
    known is accepted. All else comes from ~/.ssh/config. For a host with `transport: local` it is a shell of this
    machine. As in `orch exec`, a single word is a line of shell. The exit code is that of `ssh`.

    \b
    orch ssh v100
    orch ssh v100 -- nvidia-smi -l 1
    orch ssh v100 -- 'tail -f ~/.orch/jobs/*/rank-0/stdout.log'
    """
    from orchestrator.hosts.connections import target_of
    from orchestrator.hosts.everywhere import line_of
    from orchestrator.transport.hostkeys import HostKeys
    from orchestrator.views import console

    with open_controller() as controller:
        node, home = controller.store.cluster(cluster).node(name), controller.store.home
    if node.transport == "local":
        console.say(f"{name} is this machine (transport: local)")
        become(["sh", "-c", line_of(command)] if command else [os.environ.get("SHELL") or "sh"], Path.home())
    from orchestrator.transport.openssh import command_line

    pins, terminal = home.root / "pinned_hosts", bool(command) and _at_terminal()
    become(command_line(target_of(node), HostKeys.default(home), pins=pins, command=command, terminal=terminal))


@click.command("ssh-config")
@nodes_option
@cluster_option
def ssh_config(nodes: str | None, cluster: str | None) -> None:
    """Print an OpenSSH configuration of the hosts, for scp, rsync, ansible and editors.

    It goes where orch goes: user, port, keys, jump hosts and known host keys, each host by its name in the inventory.
    Write it anew after `orch up` or `orch trust`. A host that cannot be reached so is named on standard error.

    \b
    orch ssh-config > ~/.ssh/orch
    scp -F ~/.ssh/orch train.toml v100:conf/
    rsync -e "ssh -F $HOME/.ssh/orch" -a v100:results/ results/
    ansible all -i a2000,v100, --ssh-common-args "-F $HOME/.ssh/orch" -m ping
    """
    from orchestrator.hosts.connections import target_of
    from orchestrator.transport.hostkeys import HostKeys
    from orchestrator.transport.openssh import host_entry
    from orchestrator.views import console

    with open_controller() as controller:
        known, home = controller.store.cluster(cluster), controller.store.home
    failed: list[OrchError] = []
    host_keys, pins = HostKeys.default(home), home.root / "pinned_hosts"
    click.echo(f"# The hosts of cluster {known.name}, written by `orch ssh-config`.")
    for node in known.chosen(known.names(nodes)):
        if node.transport == "local":
            console.say(f"{node.name} is this machine (transport: local)")
            continue
        try:
            click.echo(f"\n{host_entry(target_of(node), host_keys, pins=pins)}", nl=False)
        except OrchError as error:
            failed.append(error)
    console.fail_each(failed)
    if failed:
        sys.exit(failed[0].exit_code)


def _at_terminal() -> bool:
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def become(argv: list[str], folder: Path | None = None) -> None:
    """Goes on as another program, with what orch changed for itself as it was. Never returns."""
    os.umask(click.get_current_context().meta[UMASK])
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and a program keeps what is ignored
    if folder:
        os.chdir(folder)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os.execvp(argv[0], argv)  # noqa: S606 - no shell is wanted in between
