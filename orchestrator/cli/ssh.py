"""`ssh`, `ssh-config`, `exec`: a shell on one host, OpenSSH access for other programs, a command on every host."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import click

from orchestrator.cli.common import (
    UMASK,
    Quantity,
    busy,
    cluster_option,
    json_option,
    node_names,
    nodes_option,
    open_controller,
)
from orchestrator.errors import HostError, OrchError
from orchestrator.units import counted


@click.command()
@click.argument("name", metavar="NODE", shell_complete=node_names)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD [ARGS]...]")
@cluster_option
def ssh(name: str, command: tuple[str, ...], cluster: str | None) -> None:
    """Open a shell on a host, or run one command there, by this machine's own `ssh`.

    User, port, key and jump hosts come from the inventory, and only a known host key is accepted. All else comes from
    ~/.ssh/config. For a host with `transport: local` it is a shell of this machine. As in `orch exec`, a single word is
    a line of shell. The exit code is that of `ssh`.

    \b
    orch ssh v100
    orch ssh v100 -- nvidia-smi -l 1
    orch ssh v100 -- 'tail -f ~/.orch/jobs/*/rank-0/stdout.log'
    """
    from orchestrator.hosts.connections import target_of
    from orchestrator.hosts.exec import line_of
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

    It has each host by its name in the inventory, with user, port, keys, jump hosts and known host keys. Write it anew
    after `orch up` or `orch trust`. A host that cannot be reached in this way is named on standard error.

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
    """Replaces this process, after undoing orch's own changes to it. Never returns."""
    os.umask(click.get_current_context().meta[UMASK])
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the new program would inherit that
    if folder:
        os.chdir(folder)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os.execvp(argv[0], argv)  # noqa: S606 - no shell is wanted in between


# `exec`.


@click.command("exec", context_settings={"allow_interspersed_args": False})
@nodes_option
@click.option(
    "--timeout",
    type=Quantity("time"),
    default="60s",
    show_default=True,
    help="End the command on a host after this time.",
)
@cluster_option
@json_option
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD [ARGS]...")
def execute(nodes: str | None, timeout: float, cluster: str | None, as_json: bool, command: tuple[str, ...]) -> None:
    """Run a command on every host at once; equal answers are shown once.

    A single word is run by the host's shell (`sh`); several words are a command and its arguments, passed unchanged. It
    runs in the home folder, after the inventory's `activate`, without input. Ctrl-C ends it on every host.

    The exit code is 0 if it was 0 on every host, 1 if the command failed on one, 3 if a host did not answer.

    \b
    orch exec -- nvidia-smi -L
    orch exec --nodes 'gpu[01-16]' -- 'df -h ~ | tail -1'
    orch exec --timeout 10m --json -- make -C data | jq .nodes.v100.exit_code
    """
    from orchestrator.hosts.exec import line_of, run_everywhere
    from orchestrator.transport.fanout import errors_by_node, values
    from orchestrator.views import console, documents, job_table

    line = line_of(command)
    with open_controller() as controller:
        known = controller.store.cluster(cluster)
        wanted = known.chosen(known.names(nodes))
        try:
            with busy(f"running on {counted(len(wanted), 'host')}"):
                found = run_everywhere(controller.connections, wanted, line, timeout_s=timeout)
        except KeyboardInterrupt:
            console.say("interrupted: every host ends the command")
            raise
    ran, failed = values(found), errors_by_node(found)
    if as_json:
        console.print_json(documents.nodes_json(found, failed, {"command": line}))
    else:
        job_table.print_ran(ran, timeout)
    console.fail_each(failed.values())
    if failed:
        sys.exit(HostError.exit_code)
    if any(one.exit_code != 0 for one in ran.values()):
        sys.exit(1)
