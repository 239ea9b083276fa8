"""`ssh`, `forward`, `ssh-config`, `exec`: a shell on one host, its ports, OpenSSH access for other programs, a command
on every host.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

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
from orchestrator.errors import HostError, OrchError, UsageError
from orchestrator.units import counted

if TYPE_CHECKING:
    from orchestrator.controller import Controller
    from orchestrator.hosts.cluster import Cluster
    from orchestrator.hosts.inventory import Node
    from orchestrator.paths import Home


@click.command()
@click.argument("name", metavar="NODE", shell_complete=node_names)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD [ARGS]...]")
@click.option("-L", "forwards", multiple=True, metavar="PORT:HOST:PORT", help="Forward a port, as `ssh -L` does.")
@cluster_option
def ssh(name: str, command: tuple[str, ...], forwards: tuple[str, ...], cluster: str | None) -> None:
    """Open a shell on a host, or run one command there, by this machine's own `ssh`.

    User, port, key and jump hosts come from the inventory, and only a known host key is accepted. All else comes from
    ~/.ssh/config. For a host with `transport: local` it is a shell of this machine. As in `orch exec`, a single word is
    a line of shell. The exit code is that of `ssh`.

    \b
    orch ssh v100
    orch ssh v100 -- nvidia-smi -l 1
    orch ssh v100 -- 'tail -f ~/.orch/jobs/*/rank-0/stdout.log'
    orch ssh v100 -L 8888:127.0.0.1:8888
    """
    from orchestrator.hosts.exec import line_of
    from orchestrator.views import console

    with open_controller() as controller:
        node, home = controller.store.cluster(cluster).node(name), controller.store.home
        if node.transport == "slurm":
            if forwards:
                raise UsageError(f"{name} is lent by Slurm", "leave out -L: ports of such a host cannot be forwarded")
            command, node = _in_its_job(controller, name, command), node.model_copy(update={"name": node.host})
    if node.transport == "slurm" and node.host == "localhost":
        become([*command])
    if node.transport == "local":
        if forwards:
            raise UsageError(f"{name} is this machine (transport: local)", "its ports are here; leave out -L")
        console.say(f"{name} is this machine (transport: local)")
        become(["sh", "-c", line_of(command)] if command else [os.environ.get("SHELL") or "sh"], Path.home())
    options = [word for each in forwards for word in ("-L", each)]
    _become_ssh(node, home, options, command)


@click.command()
@click.argument("name", metavar="NODE", shell_complete=node_names)
@click.argument("ports", nargs=-1, required=True, metavar="PORT[:LOCAL]...")
@cluster_option
def forward(name: str, ports: tuple[str, ...], cluster: str | None) -> None:
    """Bring ports of a host to this machine, for TensorBoard, Jupyter and the like, until Ctrl-C.

    Only programs of this machine can connect, and on the host the program may listen at 127.0.0.1. Without LOCAL the
    port has the same number here, or another one if that is in use.

    \b
    orch forward v100 6006
    orch forward v100 8888:9999 6006
    """
    from orchestrator.views import console

    with open_controller() as controller:
        node = controller.store.own_cluster(cluster, "`ssh -L` by way of the login host").node(name)
        home = controller.store.home
    if node.transport == "local":
        raise UsageError(f"{name} is this machine (transport: local)", "its ports are here already")
    options = ["-N", "-o", "ExitOnForwardFailure=yes"]
    for port, local in [_pair(each) for each in ports]:
        options += ["-L", f"127.0.0.1:{local}:127.0.0.1:{port}"]
        console.say(f"http://127.0.0.1:{local} is port {port} of {name}")
    console.say("Ctrl-C ends it")
    _become_ssh(node, home, options)


def _pair(text: str) -> tuple[int, int]:
    port, colon, local = text.partition(":")
    numbers = [int(each) if each.isascii() and each.isdecimal() else 0 for each in (port, local or port)]
    if not all(0 < number < 1 << 16 for number in numbers) or (colon and not local):
        raise UsageError(f"{text!r} is no port", "write PORT or PORT:LOCAL, like 6006 or 8888:9999")
    return numbers[0], _free(numbers[1], is_asked=bool(local))


def _free(port: int, *, is_asked: bool) -> int:
    import socket

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ssh does
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            if is_asked:
                problem = f"port {port} of this machine cannot be used: {error.strerror}"
                raise UsageError(problem, "choose another LOCAL") from None
            listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _become_ssh(node: Node, home: Home, options: Sequence[str], command: tuple[str, ...] = ()) -> None:
    from orchestrator.hosts.connections import target_of
    from orchestrator.transport.hostkeys import HostKeys
    from orchestrator.transport.openssh import command_line
    from orchestrator.transport.ssh_config import ASKS

    os.environ[ASKS] = "1"
    pins, terminal = home.root / "pinned_hosts", bool(command) and _at_terminal()
    keys = HostKeys.default(home)
    become(command_line(target_of(node), keys, pins=pins, command=command, terminal=terminal, options=options))


def _in_its_job(controller: Controller, name: str, command: tuple[str, ...]) -> tuple[str, ...]:
    """The command as a step of the newest job that holds this host. Raises UsageError without such a job."""
    from orchestrator.hosts.exec import line_of
    from orchestrator.jobs.job_store import FINAL_STATES
    from orchestrator.transport.slurm import step

    for job in controller.store.jobs():
        if job.slurm and not job.slurm.is_over:
            controller.jobs.slurm.refreshed(job)
    held = [
        job.slurm.hosts[name]
        for job in controller.store.jobs()
        if job.slurm and name in job.slurm.hosts and not job.slurm.is_over and job.state not in FINAL_STATES
    ]
    if not held:
        raise UsageError(f"no job of yours runs on {name}", "`orch jobs` lists them; Slurm lends a host only for a job")
    shell = ["sh", "-c", f"cd; {line_of(command)}"] if command else ["sh", "-c", 'cd; exec "$SHELL" -l']
    return (*step(held[0], name, *([] if command and not _at_terminal() else ["--pty"])), *shell)


@click.command("ssh-config")
@nodes_option
@click.option("--keep", is_flag=True, help="Write a file that `orch up` and `orch trust` keep current.")
@cluster_option
def ssh_config(nodes: str | None, keep: bool, cluster: str | None) -> None:
    """Print an OpenSSH configuration of the hosts, for scp, rsync, ansible and editors.

    It has each host by its name in the inventory, with user, port, keys, jump hosts and known host keys. With --keep it
    is written to a file, and the `Include` line for ~/.ssh/config is printed. A host that cannot be reached in this way
    is named on standard error.

    \b
    orch ssh-config --keep
    orch ssh-config > ~/.ssh/orch
    scp -F ~/.ssh/orch train.toml v100:conf/
    rsync -e "ssh -F $HOME/.ssh/orch" -a v100:results/ results/
    ansible all -i a2000,v100, --ssh-common-args "-F $HOME/.ssh/orch" -m ping
    """
    from orchestrator.views import console

    if keep and nodes:
        raise UsageError("--keep writes all hosts of the cluster", "leave out --nodes")
    with open_controller() as controller:
        known = controller.store.own_cluster(cluster, "`orch ssh NODE` while a job of yours runs there")
        home = controller.store.home
    chosen = known.chosen(known.names(nodes))
    for node in chosen:
        if node.transport == "local":
            console.say(f"{node.name} is this machine (transport: local)")
    text, failed = _configuration(known, chosen, home, is_kept=keep)
    if keep:
        _write_kept(home, known, text)
        click.echo(f'Include "{home.ssh_configs}/*"')
        console.say("add this line at the top of ~/.ssh/config, if it is not there")
    else:
        click.echo(text, nl=False)
    console.fail_each(failed)
    if failed:
        sys.exit(failed[0].exit_code)


def refresh_kept(home: Home, cluster: Cluster) -> None:
    """After a change of hosts or keys. A host that cannot be reached in this way is left out."""
    if _kept(home, cluster).exists():
        _write_kept(home, cluster, _configuration(cluster, cluster.nodes, home, is_kept=True)[0])


def _kept(home: Home, cluster: Cluster) -> Path:
    return home.ssh_configs / cluster.name


def _write_kept(home: Home, cluster: Cluster, text: str) -> None:
    from orchestrator.files import write_atomic

    home.ssh_configs.mkdir(parents=True, mode=0o700, exist_ok=True)
    write_atomic(_kept(home, cluster), text.encode())


def _configuration(
    cluster: Cluster, nodes: Iterable[Node], home: Home, *, is_kept: bool
) -> tuple[str, list[OrchError]]:
    """Also returns what is wrong with hosts that are left out."""
    from orchestrator.hosts.connections import target_of
    from orchestrator.transport.hostkeys import HostKeys
    from orchestrator.transport.openssh import host_entry

    entries, failed = [f"# The hosts of cluster {cluster.name}, written by `orch ssh-config`.\n"], list[OrchError]()
    host_keys, pins = HostKeys.default(home), home.root / "pinned_hosts"
    for node in nodes:
        if node.transport == "local":
            continue
        try:
            entries.append(host_entry(target_of(node), host_keys, pins=pins, is_included=is_kept))
        except OrchError as error:
            failed.append(error)
    return "\n".join(entries), failed


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
        known = controller.store.own_cluster(cluster, "`orch ssh NODE -- CMD` while a job of yours runs there")
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
