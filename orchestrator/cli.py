"""The commands. Each is a thin skin: it reads the command line, calls the controller, hands values to the console.

Heavy modules are imported inside the commands, so that `orch --help` imports click and nothing more.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from orchestrator import __version__
from orchestrator.errors import HostError, HostsError, OrchError, UsageError

if TYPE_CHECKING:
    from orchestrator.controller import Controller, Up
    from orchestrator.records import LaunchPlan

SECOND_CTRL_C_S = 3.0
INTERRUPTED = 130

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
cluster_option: Decorator = click.option("--cluster", metavar="NAME", help="Another remembered cluster.")
json_option: Decorator = click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
accept_option: Decorator = click.option(
    "--accept-new-host-keys", is_flag=True, help="Record the keys of hosts never seen before (never a changed one)."
)
job_option: Decorator = click.option(
    "--job", "wanted", required=True, metavar="ID", help="A job's id, a unique prefix of it, or `latest`."
)
out_option: Decorator = click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Folder of collected runs."
)


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic since click 8.4 alone
    """A time as people write it; gives seconds."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from orchestrator.units import parse_duration

        try:
            return value if isinstance(value, float) else parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Orch(click.Group):
    """Turns every expected error into words and its exit code; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        mask = os.umask(0o077)  # all that we write is for its owner alone: state, logs, reports
        try:
            return super().invoke(ctx)
        except OrchError as error:
            from orchestrator import console

            for each in error.errors if isinstance(error, HostsError) else [error]:
                console.fail(each.message, each.remedy)
            ctx.exit(error.exit_code)
        except OSError as error:
            if isinstance(error, BrokenPipeError):
                _leave_quietly(ctx)
            from orchestrator import console

            where = error.filename or "this machine"
            console.fail(f"{where}: {error.strerror or error}", "free space there, or choose another folder")
            ctx.exit(OrchError.exit_code)
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)
        finally:
            os.umask(mask)


def _leave_quietly(ctx: click.Context) -> NoReturn:
    """The reader of our output has left (`orch logs | head`): that is no error, and nobody is there to tell."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    ctx.exit(0)


@click.group(cls=Orch, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__)
def main() -> None:
    """One training cluster out of GPU hosts that are reached only by SSH.

    \b
    orch up inventory/a2000_v100.yaml        connect, probe, elect a master
    orch run --exp resnet152_cifar           launch on every host, follow live
    orch collect --job latest                pull logs and metrics, compare the hosts

    Shell completion: eval "$(_ORCH_COMPLETE=bash_source orch)" (or zsh_source, fish_source).
    """
    gc.set_threshold(50_000, 20, 50)  # imports make many objects and no garbage: looking for it took a tenth of them


# ---- the cluster ----------------------------------------------------------------------------------------------


@main.command()
@click.argument("inventory", type=click.Path(path_type=Path))
@accept_option
@json_option
def up(inventory: Path, accept_new_host_keys: bool, as_json: bool) -> None:
    """Connect to every host, probe it, elect the master and say why.

    The cluster is remembered as the current one. Exit code 3 if a host cannot be used; the others still can.

    \b
    orch up inventory/a2000_v100.yaml
    orch up inventory/lab_pair.yaml --accept-new-host-keys
    """
    from orchestrator.inventory import load_inventory

    loaded = load_inventory(inventory)
    with _controller(accept_new_host_keys) as controller, _busy(f"probing {len(loaded.nodes)} hosts"):
        found = controller.up(loaded)
    _show_up(found, as_json)


@main.command()
@cluster_option
@json_option
def status(cluster: str | None, as_json: bool) -> None:
    """The cluster as last probed, and its latest jobs.

    \b
    orch status
    orch status --json | jq .cluster.master
    """
    from orchestrator import console

    with _controller() as controller:
        found = controller.store.cluster(cluster)
        jobs = controller.jobs(found.name).records[:10]
    if as_json:
        document = {"cluster": console.cluster_json(found), "jobs": console.jobs_json(jobs)["jobs"]}
        return console.print_json({"schema": 1, **document})
    console.print_cluster(found)
    for name, problem in found.problems.items():
        console.fail(f"{name}: {problem.message}", problem.remedy)
    if jobs:
        console.print_jobs(jobs)
    return None


@main.command()
@click.argument("name", metavar="NODE", required=False)
@click.option("--elect", is_flag=True, help="Take the pin back: let the election choose again.")
@cluster_option
def master(name: str | None, elect: bool, cluster: str | None) -> None:
    """Pin the master of the current cluster; it beats the election.

    \b
    orch master v100
    orch master --elect
    """
    from orchestrator import console

    if bool(name) == elect:
        raise UsageError("name a node, or give --elect", "orch master NODE")
    with _controller() as controller:
        console.print_cluster(controller.pin_master(controller.store.cluster(cluster), name))


@main.group()
def node() -> None:
    """Add, remove, release or restore nodes of the current cluster, never touching your file.

    \b
    orch node add a16 host=192.168.1.52 gpu=A16 bandwidth=2.5Gbps
    orch node release a2000
    """


@node.command("add")
@click.argument("name")
@click.argument("keys", nargs=-1, metavar="KEY=VALUE...")
@accept_option
@cluster_option
@json_option
def node_add(name: str, keys: tuple[str, ...], accept_new_host_keys: bool, cluster: str | None, as_json: bool) -> None:
    """Add a host, with the keys of an inventory's node, and probe it.

    \b
    orch node add a16 host=192.168.1.52 user=ubuntu gpu=A16 bandwidth=2.5Gbps
    """
    from orchestrator.inventory import node_from_keys
    from orchestrator.request import parse_pairs
    from orchestrator.yamlfile import resolve_scalar

    values = {key: resolve_scalar(value) for key, value in parse_pairs(keys, "KEY=VALUE").items()}
    made = node_from_keys({"name": name, **values}, "node add")
    with _controller(accept_new_host_keys) as controller, _busy(f"probing {name}"):
        found = controller.add_node(controller.store.cluster(cluster), made)
    _show_up(found, as_json)


@node.command("remove")
@click.argument("name")
@cluster_option
def node_remove(name: str, cluster: str | None) -> None:
    """Take a host out of the cluster; your inventory file stays as it is.

    \b
    orch node remove a2000
    """
    from orchestrator import console

    with _controller() as controller:
        console.print_cluster(controller.remove_node(controller.store.cluster(cluster), name))


@node.command("release")
@click.argument("name")
@cluster_option
def node_release(name: str, cluster: str | None) -> None:
    """Keep a host in the cluster, but give it no job until it is restored.

    \b
    orch node release a2000
    """
    _release(name, cluster, restore=False)


@node.command("restore")
@click.argument("name")
@cluster_option
def node_restore(name: str, cluster: str | None) -> None:
    """Give a released host jobs again.

    \b
    orch node restore a2000
    """
    _release(name, cluster, restore=True)


def _release(name: str, cluster: str | None, *, restore: bool) -> None:
    from orchestrator import console

    with _controller() as controller:
        console.print_cluster(controller.release_node(controller.store.cluster(cluster), name, restore=restore))


@main.command()
@click.argument("name", metavar="NODE")
@click.option("--inventory", type=click.Path(path_type=Path), help="Look the node up here, before the first `orch up`.")
@click.option("--yes", is_flag=True, help="Record without asking: you have compared the fingerprint by other means.")
@cluster_option
def trust(name: str, inventory: Path | None, yes: bool, cluster: str | None) -> None:
    """Show a host's key and record it once you have compared its fingerprint.

    Compare with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the host's own console.

    \b
    orch trust v100
    orch trust v100 --inventory inventory/a2000_v100.yaml
    """
    from orchestrator import console
    from orchestrator.connections import target_of
    from orchestrator.inventory import load_inventory
    from orchestrator.transport import ssh
    from orchestrator.transport.hostkeys import HostKeys

    with _controller() as controller:
        found = load_inventory(inventory) if inventory else controller.store.cluster(cluster)
        host_keys = HostKeys.default(controller.store.home)
        offered = None
        while offered is None or offered.peer.jump:  # the jump hosts on the way come first
            offered = ssh.fetch_host_key(target_of(found.node(name)), host_keys=host_keys)
            console.say(f"{offered.peer} shows the {offered.key.get_name()} key {offered.fingerprint}")
            if not yes and not click.confirm("Is this the fingerprint of that host?", default=False, err=True):
                raise UsageError(f"{name}: its key was not recorded", "compare it on the host's own console")
            host_keys.check(offered.peer, offered.key, accept_new=True)
        console.say(f"recorded in {controller.store.home.known_hosts}")


# ---- running --------------------------------------------------------------------------------------------------


@main.command(context_settings={"ignore_unknown_options": False})
@click.option("--exp", metavar="NAME", help="A named experiment: mnist_lenet, resnet152_cifar.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="One setting of the experiment; repeatable."
)
@click.option("-m", "--module", metavar="MODULE", help="Run a Python module of your folder.")
@click.option("--folder", type=click.Path(path_type=Path), help="The folder to ship. [default: the script's, or this]")
@click.option(
    "--batch", type=click.IntRange(min=1), metavar="N", help="Split N samples an update: each rank's is in ORCH_SHARE."
)
@click.option("--nodes", metavar="A,B", help="Only these nodes.")
@click.option("--detach", is_flag=True, help="Return once it runs.")
@click.option("--dry-run", is_flag=True, help="Print the plan and start nothing.")
@click.option("--share", is_flag=True, help="Use GPUs even if another job of ours holds them.")
@click.option(
    "--grace", type=Duration(), default="3s", show_default=True, help="What ranks have between INT, TERM and KILL."
)
@click.option("--time-limit", type=Duration(), help="End the job after this time: 90s, 30m, 12h.")
@cluster_option
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(
    exp: str | None,
    settings: tuple[str, ...],
    module: str | None,
    folder: Path | None,
    batch: int | None,
    nodes: str | None,
    detach: bool,
    dry_run: bool,
    share: bool,
    grace: float,
    time_limit: float | None,
    cluster: str | None,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Launch a job on every host and follow it.

    A Ctrl-C leaves the job running and says how to come back; a second one within 3 s cancels it.

    \b
    orch run --exp mnist_lenet --set epochs=1
    orch run --exp resnet152_cifar --set strategy=allreduce --nodes a2000,v100 --detach
    orch run -- train.py --lr 0.1             your own torchrun script; its folder is shipped
    orch run -m mypackage.train -- --lr 0.1   the same for a module
    """
    from dataclasses import replace

    from orchestrator import console
    from orchestrator.request import read_wish

    wish = read_wish(exp, settings, module, folder, command, batch)
    request = replace(
        wish.request,
        share_gpus=share,
        grace_s=grace,
        time_limit_s=time_limit,
    )
    only = [name for name in (nodes or "").split(",") if name]
    with _controller() as controller:
        plan = controller.plan(controller.store.cluster(cluster), request, wish.code, only)
        if dry_run:
            shown = plan.masked()
            return (
                console.print_json(shown.model_dump(mode="json", by_alias=True))
                if as_json
                else console.print_plan(shown)
            )
        for note in plan.notes:
            console.warn(note)
        with _busy(f"starting {plan.job} on {len(plan.nodes)} hosts"):
            try:
                hosts = controller.launch(plan, wish.blob)
            except KeyboardInterrupt:
                console.say(f"{plan.job} was not started; what was begun is undone")
                raise
        console.say(f"job {plan.job}: {plan.world_size} ranks on {len(plan.nodes)} hosts, master {plan.master}")
        if not detach:
            stream = console.err if as_json else console.out
            _follow(controller, plan, lambda: console.print_events(controller.follow(plan, hosts), stream=stream))
        _finish(controller, plan, as_json, detached=detach)
    return None


def _follow(controller: Controller, plan: LaunchPlan, show: Callable[[], None]) -> None:
    """Shows until the end. The first Ctrl-C detaches, a second within SECOND_CTRL_C_S cancels."""
    import threading

    from orchestrator import console

    try:
        show()
    except KeyboardInterrupt:
        try:
            console.say(f"\ndetached; the job goes on. Come back: orch logs -f --job {plan.job}")
            console.say(f"cancel: orch cancel --job {plan.job} (or Ctrl-C again within {SECOND_CTRL_C_S:.0f} s)")
            threading.Event().wait(SECOND_CTRL_C_S)
        except KeyboardInterrupt:
            _cancel(controller, plan)
            console.say(f"cancelled {plan.job}")
        raise


def _finish(controller: Controller, plan: LaunchPlan, as_json: bool, *, detached: bool = False) -> None:
    from orchestrator import console

    job = controller.store.job(plan.job)
    if as_json:
        console.print_json(console.jobs_json([job])["jobs"][0] | {"schema": 1})
    if detached:
        if not as_json:
            click.echo(plan.job)
        return
    console.print_end(job)
    if job.state != "succeeded":
        sys.exit(1)
    console.say(f"next: orch collect --job {plan.job}")


@main.command()
@click.option("--rescan", is_flag=True, help="First ask the hosts for jobs that are unknown or damaged here.")
@cluster_option
@json_option
def jobs(rescan: bool, cluster: str | None, as_json: bool) -> None:
    """All remembered jobs, newest first; those not ended are asked after on their hosts.

    \b
    orch jobs
    orch jobs --rescan                    after $ORCH_HOME was lost or damaged
    orch jobs --json | jq -r '.jobs[0].id'
    """
    from orchestrator import console

    problems: dict[str, OrchError] = {}
    with _controller() as controller:
        if rescan:
            names = [cluster] if cluster else controller.store.cluster_names() or [controller.store.cluster().name]
            with _busy(f"asking the hosts of {', '.join(names)}"):
                rebuilt = controller.rescan(names)
            console.say(f"rebuilt from the hosts: {', '.join(job.id for job in rebuilt.records) or 'nothing'}")
            problems |= rebuilt.problems
        found = controller.jobs(cluster)
    console.print_json(console.jobs_json(found.records)) if as_json else console.print_jobs(found.records)
    problems = {**found.problems, **problems}
    for error in problems.values():
        console.fail(error.message, error.remedy)
    if any(isinstance(error, HostError) for error in problems.values()):
        sys.exit(HostError.exit_code)


@main.command()
@job_option
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended.")
@click.option("--node", "only_node", metavar="N", help="Only this node.")
@click.option("--rank", "only_rank", type=int, metavar="R", help="Only this rank.")
def logs(wanted: str, follow: bool, only_node: str | None, only_rank: int | None) -> None:
    """What the ranks printed, each line with its node and rank.

    \b
    orch logs --job latest -f
    orch logs --job resnet152 --node v100 --rank 0
    """
    from orchestrator import console
    from orchestrator.lines import Line

    def chosen(line: Line) -> bool:
        return only_node in (None, line.node) and only_rank in (None, line.rank)

    with _controller() as controller:
        _, plan = controller.job(wanted)
        if only_node:
            controller.store.cluster(plan.cluster).node(only_node)
        hosts, errors = controller.hosts_of(plan)
        for error in errors.values():
            console.fail(error.message, error.remedy)
        console.print_events(controller.follow(plan, hosts, until_end=follow), chosen)
        if errors:
            sys.exit(3)


@main.command()
@job_option
@json_option
def cancel(wanted: str, as_json: bool) -> None:
    """End a job on all its hosts, and look a second time that nothing stayed.

    \b
    orch cancel --job latest
    """
    from orchestrator import console

    with _controller() as controller:
        _, plan = controller.job(wanted)
        _cancel(controller, plan)
        job = controller.store.job(plan.job)
        if as_json:
            console.print_json(console.jobs_json([job])["jobs"][0] | {"schema": 1})
        else:
            console.print_end(job)


def _cancel(controller: Controller, plan: LaunchPlan) -> None:
    from orchestrator import console

    with _busy(f"ending {plan.job}"):
        _, stayed = controller.cancel(plan)
    for line in stayed:
        console.fail(line)
    if stayed:
        raise OrchError(f"{plan.job} is not proved to be gone", "`orch reap` lists what is left on the hosts")
    console.say("ended on every host; none of its processes is left")


# ---- results --------------------------------------------------------------------------------------------------


@main.command()
@job_option
@out_option
@json_option
def collect(wanted: str, out: Path, as_json: bool) -> None:
    """Pull a job's logs and metrics, compare its hosts, write the report.

    Only what is new is pulled; works while the job runs, too.

    \b
    orch collect --job latest
    orch collect --job mnist_lenet-20261121 --out ~/results
    """
    from orchestrator import console
    from orchestrator.units import format_bytes

    with _controller() as controller:
        _, plan = controller.job(wanted)
        with _busy(f"collecting {plan.job}"):
            report = controller.collect(plan, out)
    if as_json:
        console.print_json(report.summary.to_json())
    else:
        console.print_summary(report.summary)
        console.put(f"report: {report.run.report}")
    console.say(f"{format_bytes(report.new_bytes)} new in {report.run.root}")
    for notice in report.notices:
        console.warn(notice)
    for error in report.errors.values():
        console.fail(error.message, error.remedy)
    if report.errors:
        sys.exit(3)


@main.command()
@job_option
@out_option
@json_option
def report(wanted: str, out: Path, as_json: bool) -> None:
    """The comparison of a collected run once more; asks no host.

    \b
    orch report --job latest
    orch report --job latest --json | jq .efficiency
    """
    from orchestrator import console
    from orchestrator.paths import RunFolder

    with _controller() as controller:
        # A folder of last month's run needs no memory of it.
        job = wanted if (out / wanted).is_dir() else controller.store.find_job(wanted)
        run_folder = RunFolder(out / job)
        if not run_folder.plan.is_file():
            raise UsageError(f"{run_folder.root} holds no collected run", f"`orch collect --job {job}` first")
        summary = controller.report(run_folder)
    if as_json:
        return console.print_json(summary.to_json())
    console.print_summary(summary)
    return console.put(f"report: {run_folder.report}")


# ---- cleaning up ----------------------------------------------------------------------------------------------


@main.command()
@click.option("--yes", is_flag=True, help="End them.")
@cluster_option
@json_option
def reap(yes: bool, cluster: str | None, as_json: bool) -> None:
    """List, and with --yes end, what our earlier jobs left on the hosts. Never touches a foreign process.

    \b
    orch reap
    orch reap --yes
    """
    from orchestrator import console

    with _controller() as controller:
        answers = controller.reap(controller.store.cluster(cluster), end=yes)

    def words(answer: dict[str, Any]) -> str:
        found = [f"{job['job']}: {', '.join(job['processes'])}" for job in answer["found"]]
        stayed = [process for job in answer["found"] for process in job.get("stayed", ())]
        ended = f" — still there: {', '.join(stayed)}" if stayed else " — ended" if yes else ""
        return "; ".join(found) + ended if found else "nothing left"

    _show_answers(answers, words, as_json)
    if not yes and any(isinstance(answer, dict) and answer["found"] for answer in answers.values()):
        console.say("`orch reap --yes` ends them")


@main.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@cluster_option
@json_option
def down(yes: bool, cluster: str | None, as_json: bool) -> None:
    """End this cluster's jobs and remove what we put on its hosts. Collected runs stay.

    \b
    orch down --yes
    """
    with _controller() as controller:
        found = controller.store.cluster(cluster)
        question = f"End the jobs of {found.name} and remove our files from {len(found.nodes)} hosts?"
        if not yes:
            click.confirm(question, abort=True, err=True)
        with _busy(f"clearing {len(found.nodes)} hosts"):
            answers = controller.down(found)
    _show_answers(
        answers, lambda answer: f"removed {', '.join(answer['removed'])}" if answer["removed"] else "clean", as_json
    )


# ---- shared by the commands -----------------------------------------------------------------------------------


@contextlib.contextmanager
def _controller(accept_new_host_keys: bool = False) -> Iterator[Controller]:
    from orchestrator.connections import Connections
    from orchestrator.controller import Controller
    from orchestrator.paths import Home
    from orchestrator.store import Store

    home = Home.default()
    ask = _ask_passphrase if sys.stdin and sys.stdin.isatty() else None
    with Connections(home, accept_new_host_keys=accept_new_host_keys, ask_passphrase=ask) as connections:
        yield Controller(Store(home), connections)


def _ask_passphrase(key_file: str) -> str | None:
    return str(click.prompt(f"Passphrase of {key_file}", hide_input=True, err=True)) or None


@contextlib.contextmanager
def _busy(what: str) -> Iterator[None]:
    """A spinner on a terminal; nothing where nobody looks."""
    from orchestrator import console

    with console.err.status(what) if console.err.is_terminal else contextlib.nullcontext():
        yield


def _show_up(found: Up, as_json: bool) -> None:
    from orchestrator import console

    if as_json:
        console.print_json(console.cluster_json(found.cluster))
    else:
        console.print_cluster(found.cluster)
    for warning in found.warnings:
        console.warn(warning)
    for error in found.problems.values():
        console.fail(error.message, error.remedy)
    if found.problems:
        sys.exit(3)


def _show_answers(answers: dict[str, Any], words: Callable[[dict[str, Any]], str], as_json: bool) -> None:
    from orchestrator import console

    if as_json:
        nodes = {name: a if isinstance(a, dict) else {"error": str(a)} for name, a in answers.items()}
        console.print_json({"schema": 1, "nodes": nodes})
    else:
        console.print_answers(answers, words)
    if any(isinstance(answer, Exception) for answer in answers.values()):
        sys.exit(3)


if __name__ == "__main__":
    main()
