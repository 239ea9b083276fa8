"""`exec`: one command on every host."""

from __future__ import annotations

import sys

import click

from orchestrator.cli.common import Quantity, busy, cluster_option, json_option, nodes_option, open_controller
from orchestrator.errors import HostError
from orchestrator.units import counted


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

    A single word is run by the host's shell (`sh`); several words are a command and its arguments, each passed as it
    is. It runs in the home folder, after the inventory's `activate`, and reads nothing. Ctrl-C ends it on every host.

    The exit code is 0 if it was 0 on every host, 1 if the command failed on one, 3 if a host did not answer.

    \b
    orch exec -- nvidia-smi -L
    orch exec --nodes 'gpu[01-16]' -- 'df -h ~ | tail -1'
    orch exec --timeout 10m --json -- make -C data | jq .nodes.v100.exit_code
    """
    from orchestrator.hosts.everywhere import line_of, run_everywhere
    from orchestrator.transport.fanout import errors_by_node, values
    from orchestrator.views import console, documents, everywhere

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
        everywhere.print_ran(ran, timeout)
    console.fail_each(failed.values())
    if failed:
        sys.exit(HostError.exit_code)
    if any(one.exit_code != 0 for one in ran.values()):
        sys.exit(1)
