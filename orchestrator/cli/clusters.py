"""Commands about a cluster: `up`, `status`, `master`, `trust`, `reap`, `down`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.common import (
    accept_option,
    agrees,
    answered,
    busy,
    cluster_option,
    insist,
    json_option,
    node_names,
    open_controller,
    out_option,
)
from orchestrator.cli.results import bring, leave, lines
from orchestrator.cli.ssh import refresh_kept
from orchestrator.errors import HostError, OrchError, StateError, UsageError
from orchestrator.units import counted, some

if TYPE_CHECKING:
    from orchestrator.clusters import Up
    from orchestrator.hosts.cluster import Cluster
    from orchestrator.hosts.facts import NodeFacts
    from orchestrator.hosts.inventory import Node
    from orchestrator.paths import Home
    from orchestrator.transport.hostkeys import HostKeys, OfferedKey


allow_local_option = click.option(
    "--allow-local", is_flag=True, help="Do not ask about commands that the file runs on this machine."
)


@click.command()
@click.argument("inventory", type=click.Path(path_type=Path))
@accept_option
@allow_local_option
@json_option
def up(inventory: Path, accept_new_host_keys: bool, allow_local: bool, as_json: bool) -> None:
    """Connect to every host, probe it, and elect the master with a reason.

    The cluster becomes the current one. The exit code is 3 if a host cannot be used, or if hosts are too different to
    train together; the others still can. If the file runs commands on this machine (`transport: local`), they are
    shown and you are asked about them once, and again after changes.

    \b
    orch up rack.yaml
    orch up lab.yaml --accept-new-host-keys
    """
    from orchestrator.hosts.inventory_file import load_inventory
    from orchestrator.views import console

    loaded = load_inventory(inventory)
    with open_controller(accept_new_host_keys) as controller:
        nodes = controller.clusters.nodes_of(loaded)
        ask_about_local(controller.store.home, loaded.file, nodes, allow_local)
        with busy(f"probing {counted(len(loaded.nodes), 'host')}"):
            probed = controller.up(loaded)
        refresh_kept(controller.store.home, probed.cluster)
        terminals = controller.store.terminals()
    if terminals and terminals.name != loaded.cluster:
        console.warn(f"{terminals.by}={terminals.name} still chooses in this terminal: unset {terminals.by}")
    show_up(probed, as_json)


def ask_about_local(home: Home, source: str, nodes: Sequence[Node], yes: bool) -> None:
    from orchestrator.hosts.occupied import allow, not_allowed
    from orchestrator.views import console

    commands = not_allowed(home, nodes)
    if not commands:
        return
    console.say(f"{source} would have this machine run, as you:")
    for command in commands:
        console.say(f"  {command}")
    if not yes and not agrees("Do you trust it?"):
        raise UsageError(f"{source}: nothing of it was run", "read it, then `orch up --allow-local` with it")
    allow(home, commands)


@click.command()
@click.option("--no-look", is_flag=True, help="Contact no host; show what was last known.")
@cluster_option
@json_option
def status(no_look: bool, cluster: str | None, as_json: bool) -> None:
    """Show the cluster's hosts, which of them answer now, and its latest jobs.

    All hosts are contacted at the same time; a host that is off costs 2 s. `status` is of now; the other columns are
    from the last probe, as old as `facts from` shows. Other people's processes on the GPUs are looked up now and named.

    \b
    orch status
    orch status --no-look
    orch status --json | jq .cluster.master
    """
    from orchestrator.views import console, documents, host_tables, job_table

    with open_controller() as controller:
        known = controller.store.cluster(cluster)
        silent = on_gpus = None
        if not no_look:
            with busy(f"looking at {counted(len(known.nodes), 'host')}"):
                silent = controller.clusters.silent(known)
                on_gpus = controller.clusters.on_gpus(known, without=silent)
        listed = controller.jobs.all(known.name, silent, why=not no_look)
        jobs = listed.records[:10]
    if as_json:
        cluster_now = documents.cluster_json(known, silent, on_gpus)
        console.print_json(documents.status_json(cluster_now, jobs, listed.unheard))
        return job_table.warn_unheard(listed.unheard)
    host_tables.print_status(known, silent)
    if jobs:
        job_table.print_jobs(jobs)
    _warn_of_others(known, on_gpus or {}, [job.id for job in listed.records])
    job_table.warn_stalls(jobs)
    job_table.warn_unheard(listed.unheard)
    return None


def _warn_of_others(cluster: Cluster, on_gpus: Mapping[str, NodeFacts], jobs: Sequence[str]) -> None:
    from orchestrator.hosts.checks import gpu_warnings
    from orchestrator.hosts.occupied import without_jobs
    from orchestrator.views import console

    for name, facts in on_gpus.items():
        for line in gpu_warnings(cluster.node(name), without_jobs(facts, jobs)):
            console.warn(line)


@click.command()
@click.argument("name", metavar="NODE", required=False, shell_complete=node_names)
@click.option("--elect", is_flag=True, help="Remove the pin; the election chooses again.")
@cluster_option
def master(name: str | None, elect: bool, cluster: str | None) -> None:
    """Pin the master of the current cluster; the pin overrides the election.

    \b
    orch master v100
    orch master --elect
    """
    from orchestrator.views import host_tables

    if bool(name) == elect:
        what = f"{name} and --elect at once" if name else "neither a node nor --elect was given"
        raise UsageError(what, "`orch master NODE`, or `orch master --elect`")
    with open_controller() as controller:
        known = controller.store.own_cluster(cluster, "each job elects its master")
        host_tables.print_cluster(controller.clusters.pin_master(known, name))


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NODE...", shell_complete=node_names)
@click.option(
    "--inventory", type=click.Path(path_type=Path), help="Read the nodes from this file, before the first `orch up`."
)
@click.option(
    "--yes", is_flag=True, help="Record without asking, after you have compared the fingerprints by other means."
)
@cluster_option
def trust(names: tuple[str, ...], inventory: Path | None, yes: bool, cluster: str | None) -> None:
    """Show hosts' keys and record them once you have compared their fingerprints.

    NODE is a name, a range or a pattern. Compare with `ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub` on the host's
    own console. Known keys are not asked about. The exit code is 3 if a host did not answer or its key has changed.

    \b
    orch trust v100
    orch trust 'gpu[01-16]' v100 --inventory rack.yaml
    """
    from orchestrator.hosts.connections import target_of
    from orchestrator.hosts.grammar import names_in
    from orchestrator.hosts.inventory_file import load_inventory
    from orchestrator.transport import ssh
    from orchestrator.transport.fanout import errors_by_node, for_each, values
    from orchestrator.transport.hostkeys import HostKeys
    from orchestrator.views import console

    with open_controller() as controller:
        source = load_inventory(inventory) if inventory else controller.store.cluster(cluster)
        chosen = names_in(",".join(names), [node.name for node in source.nodes], "the cluster")
        todo = {name: target_of(source.node(name)) for name in chosen}
        host_keys, failed = HostKeys.default(controller.store.home), dict[str, HostError]()
        while todo:  # once more after a jump host, which is first
            with busy(f"asking {counted(len(todo), 'host')} for their keys"):
                found = for_each(todo, lambda target: ssh.fetch_host_key(target, host_keys=host_keys), deadline_s=30)
            failed |= errors_by_node(found) | _record(values(found), host_keys, yes)
            todo = {name: todo[name] for name, key in values(found).items() if key.peer.jump and name not in failed}
        if not inventory:
            refresh_kept(controller.store.home, controller.store.cluster(cluster))
    console.fail_each(failed.values())
    if failed:
        sys.exit(3)


def _record(offered: Mapping[str, OfferedKey], host_keys: HostKeys, yes: bool) -> dict[str, HostError]:
    """Asks about unknown keys; returns an error for each changed key. Raises UsageError after a no."""
    from orchestrator.transport.hostkeys import UnknownHostKeyError
    from orchestrator.views import console

    unknown: dict[str, OfferedKey] = {}
    failed: dict[str, HostError] = {}
    for name, one in offered.items():
        try:
            host_keys.check(one.peer, one.key)
            console.say(f"{one.peer} shows the known {one.key.get_name()} key {one.fingerprint}")
        except UnknownHostKeyError:
            if all(str(one.peer) != str(other.peer) for other in unknown.values()):  # a shared jump host once
                console.say(f"{one.peer} shows the {one.key.get_name()} key {one.fingerprint}")
                unknown[name] = one
        except HostError as error:
            failed[name] = error
    question = "Is this the fingerprint of that host?" if len(unknown) == 1 else "Are these those hosts' fingerprints?"
    if unknown and not yes and not click.confirm(question, default=False, err=True):
        keys = "its key was" if len(unknown) == 1 else "their keys were"
        raise UsageError(f"{some(list(unknown), 5)}: {keys} not recorded", "compare on the host's own console")
    for one in unknown.values():
        host_keys.check(one.peer, one.key, accept_new=True)
    if unknown:
        console.say(f"recorded in {host_keys.recorded}")
    return failed


def show_up(probed: Up, as_json: bool) -> None:
    from orchestrator.views import console, documents, host_tables

    if as_json:
        shown = documents.cluster_json(probed.cluster)
        console.print_json({**shown, "findings": documents.findings_json(probed.findings)})
    else:
        host_tables.print_cluster(probed.cluster)
    for warning in probed.warnings:
        console.warn(warning)
    console.fail_each([*probed.problems.values(), *([probed.unlike] if probed.unlike else [])])
    if probed.problems or probed.unlike:
        sys.exit(3)


# `reap`, `down`.

SHOWN_JOBS, SHOWN_FILES, SHOWN_NAMES = 5, 3, 10
KEEP_OR_DELETE = "`orch down --yes --pull` pulls them first; --discard deletes them"
_CODE = re.compile(r".*/code/[0-9a-f]{64}")

if TYPE_CHECKING:
    from orchestrator.controller import Controller
    from orchestrator.hosts.cluster import Cluster
    from orchestrator.hosts.work_folders import Cleared, Leftover, Reaped, Survey
    from orchestrator.jobs.pull import Output, Unpulled


@click.command()
@click.option("--yes", is_flag=True, help="End such processes of your own jobs.")
@cluster_option
@json_option
def reap(yes: bool, cluster: str | None, as_json: bool) -> None:
    """List processes that jobs without a supervisor left on the hosts; with --yes, end the processes of your own jobs.

    Your jobs are those started with this $ORCH_HOME on this cluster. Other jobs are listed with their owners.

    \b
    orch reap
    orch reap --yes
    """
    from orchestrator.views import console

    with open_controller() as controller:
        if yes:
            controller.jobs.settle_half_starts()
        answers = controller.clusters.reap(controller.store.own_cluster(cluster, "`orch cancel`, `orch down`"), end=yes)
    found = [leftover for answer in answers.values() if not isinstance(answer, Exception) for leftover in answer.found]

    def words(answer: Reaped) -> str:
        ended = " — ended" if yes else ""
        programs = [f"stuck since a link fell silent: {program}{ended}" for program in answer.programs]
        return "; ".join([*map(leftover_words, answer.found), *programs]) or "nothing left"

    _show_answers(answers, words, as_json)
    if not yes and any(leftover.mine for leftover in found):
        console.say("`orch reap --yes` ends " + ("them" if all(leftover.mine for leftover in found) else "ours"))
    elif not yes and any(answer.programs for answer in answers.values() if not isinstance(answer, Exception)):
        console.say("`orch reap --yes` ends them")


def leftover_words(left: Leftover) -> str:
    words = f"{left.there.job}: {', '.join(left.processes)}"
    if not left.mine:
        return f"{words} — not ours: cluster {left.there.cluster} of {left.there.owner or 'an older orch'}"
    if left.stayed is None:
        return words
    return f"{words} — still there: {', '.join(left.stayed)}" if left.stayed else f"{words} — ended"


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask, unless files would be deleted that were never pulled.")
@click.option("--pull", "pull_first", is_flag=True, help="Pull such files first.")
@click.option("--discard", is_flag=True, help="Delete such files, too.")
@click.option("--forget", is_flag=True, help="Then forget the cluster, too, also if hosts do not answer.")
@out_option
@cluster_option
@json_option
def down(
    yes: bool, pull_first: bool, discard: bool, forget: bool, out: Path, cluster: str | None, as_json: bool
) -> None:
    """End this cluster's jobs and remove what we put on its hosts. Collected runs stay.

    It removes only what was started with this $ORCH_HOME on this cluster; shared code and environments stay while
    others need them. Jobs of other clusters and people, and files that orch did not make, are named and left alone.
    Files that were never pulled are deleted only with your separate consent; a host that does not report its jobs'
    files is left as it is.

    \b
    orch down --yes
    orch down --yes --pull
    """
    from orchestrator.views import console

    if pull_first and discard:
        raise UsageError("--pull keeps what --discard deletes", "give one of them")
    if as_json and not yes:
        raise UsageError("`orch down --json` cannot ask for your consent", "add --yes to give it")
    with open_controller() as controller:
        known = controller.store.cluster(cluster)
        if jobs := controller.store.uncollected(known.name):
            console.warn(f"jobs not collected: {len(jobs)} ({some(jobs, 3)}); their files are removed, too")
        with busy(f"looking at what jobs wrote on {counted(len(known.nodes), 'host')}"):
            surveys, lost = _surveyed(controller, known)
        for line in _unpulled_words(lost):
            console.warn(line)
        spared = {} if discard else {**lost.errors}
        if spared:
            console.warn(f"nothing is removed on {some(list(spared), SHOWN_NAMES)}; --discard removes it unseen")
        pulls = pull_first or (lost.files and not discard and _wants_them(lost, out, may_ask=not yes))
        if not yes:
            _say_what_goes(known, surveys)
            if count := len(known.nodes) - len(spared):
                insist(f"Do this on {counted(count, 'host')}?")
        if not discard:
            has_ended = _end_all(controller, known, surveys)  # first, since a script may save its work at its end
            last = _surveyed(controller, known)[1] if has_ended else lost
            spared |= last.errors
            if pulls:
                _pull_all(controller, last, out)
            elif (saved := _without(last, lost)).files and _wants_them(saved, out, may_ask=not yes):
                _pull_all(controller, saved, out)
        with busy(f"clearing {counted(len(known.nodes), 'host')}"):
            answers = controller.down(known, spared)
        if forget:
            _forget(controller, known, answers, may_ask=not yes)
    _show_answers(answers, _cleared_words, as_json)


def _forget(controller: Controller, cluster: Cluster, answers: Mapping[str, Any], *, may_ask: bool) -> None:
    """Not if a host answers and keeps files; a host that is gone would keep its cluster for ever."""
    from orchestrator.views import console

    failed = [name for name, answer in answers.items() if isinstance(answer, HostError)]
    if may_hold := [name for name in failed if name in cluster.facts]:
        silent = controller.clusters.silent(cluster)
        if answer := [name for name in may_hold if name not in silent]:
            console.warn(f"{cluster.name} is not forgotten: {some(answer, SHOWN_NAMES)} may still hold its files")
            return
        places = some([f"{name}:{cluster.facts[name].workdir}" for name in may_hold], SHOWN_NAMES)
        console.warn(f"files may stay in {places}, with what was never pulled; there `orch up` and `down` clear them")
        if may_ask:
            insist(f"Forget {cluster.name}?")
    controller.store.forget_cluster(cluster.name)
    console.say(f"cluster {cluster.name} is forgotten; `orch up {cluster.file}` remembers it again")


def _wants_them(lost: Unpulled, out: Path, *, may_ask: bool) -> bool:
    if not may_ask:
        raise UsageError(
            f"files that were never pulled would be deleted ({some(list(lost.files), SHOWN_NAMES)})",
            KEEP_OR_DELETE,
        )
    if answered(f"Pull these files into {out} first?", default=True, remedy=KEEP_OR_DELETE):
        return True
    insist("Delete them?")
    return False


def _surveyed(controller: Controller, cluster: Cluster) -> tuple[list[Survey], Unpulled]:
    """Remembers jobs that are unknown or damaged here."""
    from orchestrator.jobs.pull import Unpulled, unpulled
    from orchestrator.transport.fanout import errors_by_node, values

    seen = controller.clusters.look(cluster)
    there = {name: [each.job for each in survey.mine] for name, survey in values(seen).items()}
    sound = {job.id for job in controller.store.jobs() if not job.was_queued} - controller.store.damaged().keys()
    for job in {job for jobs in there.values() for job in jobs} - sound:
        try:
            controller.jobs.find(job)
        except OrchError:
            controller.lost_jobs.rescan([cluster.name])
            break
    lost = unpulled(controller.store, controller.connections, cluster, there)
    return list(values(seen).values()), Unpulled(lost.files, {**errors_by_node(seen), **lost.errors})


def _without(lost: Unpulled, agreed: Unpulled) -> Unpulled:
    """Without files of names whose deletion was agreed to."""
    from orchestrator.jobs.pull import Unpulled

    names = {(job, node, file.name) for job, files in agreed.files.items() for node, file in files}
    left = {
        job: [(node, file) for node, file in files if (job, node, file.name) not in names]
        for job, files in lost.files.items()
    }
    return Unpulled({job: files for job, files in left.items() if files}, lost.errors)


def _end_all(controller: Controller, cluster: Cluster, surveys: Sequence[Survey]) -> bool:
    """Whether any job ran."""
    from orchestrator.jobs.job_store import ENDED
    from orchestrator.views import console

    own = [job.id for job in controller.store.jobs() if job.cluster == cluster.name and job.state not in ENDED]
    alive = [there.job for survey in surveys for there in survey.mine if there.alive]
    running = [*dict.fromkeys([*own, *alive])]
    for job in running:
        with busy(f"ending {job}"), suppress(UsageError, StateError):  # jobs of another owner stay
            controller.jobs.find(job).cancel()
            console.say(f"ended {job}")
    if cluster.engine:
        controller.submissions.end_all(cluster)
    return bool(running)


def _pull_all(controller: Controller, lost: Unpulled, out: Path) -> None:
    from orchestrator.paths import RunFolder
    from orchestrator.views import console

    for job, files in lost.files.items():
        chosen: dict[str, list[Output]] = {}
        for node, file in files:
            chosen.setdefault(node, []).append(file)
        found = bring(controller.jobs.find(job), chosen, out)
        for line in lines(RunFolder(out / job), chosen, found):
            console.say(line)
        leave({}, found)


def _say_what_goes(cluster: Cluster, surveys: Sequence[Survey]) -> None:
    from orchestrator.views import console

    mine = {there.job: there for survey in surveys for there in survey.mine}
    running = sorted({there.job for survey in surveys for there in survey.mine if there.alive})
    others = sorted({str(there) for survey in surveys for there in survey.others})
    strange = sorted({name for survey in surveys for name in survey.strange})
    console.say(f"ends: {', '.join(running) or 'nothing, no job of ' + cluster.name + ' runs'}")
    console.say(f"removes: {some(sorted(mine), SHOWN_NAMES) or 'no job'}; code and environments without other users")
    if others or strange:
        console.say(f"leaves alone: {some([*others, *strange], SHOWN_NAMES)}")


def _cleared_words(answer: Cleared) -> str:
    gone = [counted(len(answer.jobs), "job")] * bool(answer.jobs) + list(_folder_words(answer.removed))
    done = [f"ended {', '.join(answer.ended)}"] * bool(answer.ended) + [f"removed {', '.join(gone)}"] * bool(gone)
    stays = [*map(str, answer.left), *answer.strange, *answer.why]
    return "; ".join(done or ["clean" if not stays else "removed nothing"]) + (
        f"; left alone: {some(stays, SHOWN_NAMES)}" if stays else ""
    )


def _folder_words(removed: Sequence[str]) -> Iterator[str]:
    """Code folders only as a number; paths inside removed folders not at all."""
    codes = [path for path in removed if _CODE.fullmatch(path)]
    if codes:
        yield counted(len(codes), "code folder")
    yield from (path for path in removed if path not in codes and not any(path.startswith(f"{up}/") for up in removed))


def _unpulled_words(lost: Unpulled) -> Iterator[str]:
    from orchestrator.units import format_bytes

    for job, files in list(lost.files.items())[:SHOWN_JOBS]:
        largest = sorted(files, key=lambda pair: pair[1].size, reverse=True)[:SHOWN_FILES]
        shown = ", ".join(f"{file.name} {format_bytes(file.size)} on {node}" for node, file in largest)
        more = f" and {len(files) - len(largest)} more" if len(files) > len(largest) else ""
        size = format_bytes(sum(file.size for _, file in files))
        lost_files = f"{counted(len(files), 'file')}, {size} ({shown}{more})"
        yield f"never pulled of {job}: {lost_files}; `orch pull {job}` brings them home"
    if others := list(lost.files.values())[SHOWN_JOBS:]:
        size = format_bytes(sum(file.size for files in others for _, file in files))
        yield f"never pulled of {counted(len(others), 'older job')}: {size}"
    for error in lost.errors.values():
        yield f"not asked what its jobs wrote: {error}"


def _show_answers(
    answers: Mapping[str, Any],
    words: Callable[[Any], str],
    as_json: bool,
) -> None:
    from orchestrator.views import console, documents

    failed = {name: answer for name, answer in answers.items() if isinstance(answer, Exception)}
    if as_json:
        console.print_json(documents.nodes_json(answers, failed))
    else:
        console.print_answers(answers, words)
    if failed:
        sys.exit(3)
