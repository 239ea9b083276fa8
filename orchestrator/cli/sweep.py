"""`sweep`: runs one program with many settings, as jobs packed over the hosts."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from orchestrator.cli.common import busy, json_option, open_controller, out_option
from orchestrator.cli.spec_words import RunCommand, is_job_file, script_argument, spec_of
from orchestrator.errors import UsageError
from orchestrator.studies import study_names
from orchestrator.sweeps import JOB_FIELDS

if TYPE_CHECKING:
    from orchestrator.controller import Controller
    from orchestrator.measuring.sweep_run import SweepNow, SweepRun
    from orchestrator.measuring.sweep_slots import Slots
    from orchestrator.planning.job_spec import JobSpec
    from orchestrator.planning.request import ParsedJob
    from orchestrator.sweeps.estimates import Estimates
    from orchestrator.sweeps.sweep_record import SweepRecord
    from orchestrator.sweeps.sweep_spec import SweepSpec

LEAST_COMPARED = 2
ON_SLURM = "`orch run --detach` in a shell loop: Slurm packs the jobs; then `orch collect`, `orch compare`"


class SweepCommand(RunCommand):
    fields = JOB_FIELDS


@click.command(cls=SweepCommand)
@click.option("--grid", multiple=True, metavar="KEY=VALUES", help="A key and its values: 0.1,0.01 or 0:3; repeatable.")
@click.option(
    "--random",
    type=click.IntRange(1),
    metavar="N",
    help="Only N combinations, drawn alike each time; ranges like lr=1e-4..1e-1:log need it.",
)
@click.option("--gpus", type=click.IntRange(1), metavar="N", help="GPUs of each job: several jobs share a host.")
@click.option("--hosts", type=click.IntRange(1), metavar="N", help="Hosts of each job.  [default: 1]")
@click.option("--length", metavar="KEY", help="A script's time is proportional to this key, like epochs.")
@click.option("--stop", type=click.Choice(["median"]), help="End jobs whose loss is worse than most were at that step.")
@click.option("--continue", "again", metavar="ID", help="Go on with this sweep, or with `latest`.")
@click.option("--cancel", "ended", metavar="ID", help="End this sweep, or `latest`, and its jobs.")
@click.option("--dry-run", is_flag=True, help="Print which job would run where and when; start nothing.")
@out_option
@json_option
@script_argument
@click.pass_context
def sweep(
    ctx: click.Context,
    /,
    grid: tuple[str, ...],
    random: int | None,
    gpus: int | None,
    hosts: int | None,
    length: str | None,
    stop: str | None,
    again: str | None,
    ended: str | None,
    dry_run: bool,
    out: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Run a script or an experiment with many settings, as jobs packed over the hosts.

    Each job takes a host, --gpus of a host, or --hosts. The longest jobs start first, each on the host on which it will
    end first, by measured or predicted speeds. Values reach a script as `--key value` behind its arguments, or in place
    of `{key}` in them; env.KEY sets a variable; keys of an experiment are its settings.

    Ctrl-C leaves the jobs running. The same command, or --continue, goes on, --cancel ends them; jobs of a host that
    gives no answer run on others.

    \b
    orch sweep --grid lr=0.1,0.01 --grid seed=0:3 train.py --epochs 3
    orch sweep --grid lr=0.1,0.05,0.02 --set epochs=1 --exp mnist_lenet
    orch sweep --random 20 --grid lr=1e-4..1e-1:log --gpus 1 train.py
    orch sweep --grid width=64,128 --dry-run -- ./train.sh {width}
    orch sweep sweep.yaml
    orch sweep --continue latest
    """
    command = tuple(options["command"])
    if command and command[0] in study_names():
        raise UsageError(f"{command[0]} is a published study", f"orch study {' '.join(command)}")
    asked = {"random": random, "gpus": gpus, "hosts": hosts, "length": length, "stop": stop}
    given = {name: value for name, value in asked.items() if value is not None}
    with open_controller() as controller:
        if ended:
            return _cancel(controller, ended)
        if again:
            record, job = _known(controller, again, ctx, options)
        else:
            record, job = _asked(controller, ctx, options, grid, given, out)
        made = _Made.of(controller, record, job)
        if dry_run:
            return _show_packing(made, as_json)
        return _run(controller, made, as_json)


def _cancel(controller: Controller, wanted: str) -> None:
    from orchestrator.sweeps.sweep_record import SweepStore
    from orchestrator.units import counted
    from orchestrator.views import console

    store, count = SweepStore(controller.store.home), 0
    record = store.find(wanted)
    with store.held(record.id), busy(f"ending {record.id}"):
        for trial in record.trials:
            if trial.state == "running" and trial.job in controller.store.job_ids():
                _, left = controller.jobs.find(trial.job).cancel()
                count += 1
                for line in left:
                    console.warn(line)
            if not trial.is_over:
                changed = trial.model_copy(update={"state": "cancelled", "why": "cancelled by a person"})
                store.save(record := record.with_trial(changed))
    console.say(f"cancelled {record.id}; {counted(count, 'job')} ended")


def _known(
    controller: Controller, wanted: str, ctx: click.Context, options: Mapping[str, Any]
) -> tuple[SweepRecord, JobSpec]:
    from orchestrator.sweeps.sweep_record import SweepStore

    if options["command"] or options["exp"]:
        raise UsageError("--continue goes on with what the sweep was asked to run", "leave the program out")
    record = SweepStore(controller.store.home).find(wanted)
    return record, record.asked


def _asked(
    controller: Controller,
    ctx: click.Context,
    options: Mapping[str, Any],
    grid: Sequence[str],
    given: Mapping[str, Any],
    out: Path,
) -> tuple[SweepRecord, JobSpec]:
    """The unfinished sweep of the same command, else a new one."""
    from datetime import datetime, timezone

    from orchestrator.clusters import now_utc
    from orchestrator.planning import naming
    from orchestrator.planning.request import parse_job
    from orchestrator.sweeps.grid import drawn
    from orchestrator.sweeps.sweep_record import SweepRecord, SweepStore, digest_of, trials_of
    from orchestrator.views import console

    job, asked = _specs(ctx, options, grid, given)
    store = SweepStore(controller.store.home)
    cluster, first = controller.store.own_cluster(job.cluster, ON_SLURM), parse_job(job)
    digest = digest_of(job, asked, cluster.name, first.code.sha256)
    if known := store.unfinished(digest):
        console.say(f"going on with {known.id}, which this command began")
        return known, job
    name = naming.job_id(f"sweep-{job.name or first.request.name}", datetime.now(timezone.utc))
    shown = job.updated(env=dict.fromkeys(job.env)) if job.env else job
    record = SweepRecord(
        schema=1,
        id=name,
        cluster=cluster.name,
        created=now_utc(),
        asked=shown,
        sweep=asked,
        digest=digest,
        out=str(out.absolute()),
        trials=trials_of(drawn(asked.axes, asked.random)),
    )
    return record, job


def _specs(
    ctx: click.Context, options: Mapping[str, Any], grid: Sequence[str], given: Mapping[str, Any]
) -> tuple[JobSpec, SweepSpec]:
    from orchestrator.sweeps.grid import parse_grid
    from orchestrator.sweeps.sweep_spec import read_sweep, sweep_of

    command, typed, asked = tuple(options["command"]), parse_grid(grid), None
    if command and is_job_file(command[0]) and not options["is_module"]:
        file, asked = read_sweep(Path(command[0]))
        job = spec_of(ctx, options, file)
    else:
        job = spec_of(ctx, options)
    if asked is None and not typed:
        raise UsageError("no --grid given", "like --grid lr=0.1,0.01; `orch study NAME` runs a published study")
    known = asked.model_dump(exclude_unset=True) if asked else {}
    return job, sweep_of(**{**known, **given, "grid": {**known.get("grid", {}), **typed}})


class _Made:
    """Everything that a sweep's run needs, without a host having been asked."""

    def __init__(self, record: SweepRecord, slots: Slots, jobs: Mapping[str, ParsedJob], estimates: Estimates) -> None:
        self.record, self.slots, self.jobs, self.estimates = record, slots, jobs, estimates

    @classmethod
    def of(cls, controller: Controller, record: SweepRecord, job: JobSpec) -> _Made:
        """Raises UsageError."""
        from orchestrator.measuring.sweep_slots import estimates_of, slots_of, speeds_of, usable
        from orchestrator.planning.bundle import pack_folder
        from orchestrator.planning.request import parse_job
        from orchestrator.sweeps.grid import with_values

        cluster = controller.store.own_cluster(record.cluster, ON_SLURM)
        with busy(f"planning {len(record.trials)} jobs"):
            pack = functools.cache(pack_folder)
            jobs = {trial.key: parse_job(with_values(job, trial.values), pack=pack) for trial in record.trials}
            nodes, notes = usable(cluster, cluster.names(job.nodes))
            first = next(iter(jobs.values()))
            speeds = speeds_of(controller, cluster, first, [node.name for node in nodes])
            slots = slots_of(cluster, nodes, record.sweep, speeds)
            estimates = estimates_of(controller, slots.all, jobs, record.trials, record.sweep.length)
        return cls(record, type(slots)(slots.all, (*notes, *slots.notes)), jobs, estimates)


def _show_packing(made: _Made, as_json: bool) -> None:
    from orchestrator.sweeps.packing import pack
    from orchestrator.views import console, sweep_table

    waiting = [trial.key for trial in made.record.trials if not trial.is_over]
    placed = pack(waiting, dict.fromkeys((slot.name for slot in made.slots.all), 0.0), made.estimates.takes_s)
    known = made.estimates.are_known
    if as_json:
        return console.print_json(sweep_table.sweep_json(made.record, placed, in_seconds=known))
    return sweep_table.print_packing(made.record, placed, made.slots.notes, in_seconds=known)


def _run(controller: Controller, made: _Made, as_json: bool) -> None:
    from orchestrator.measuring.sweep_run import SweepRun
    from orchestrator.sweeps.sweep_record import SweepStore
    from orchestrator.units import counted
    from orchestrator.views import console, sweep_table

    store, record = SweepStore(controller.store.home), made.record
    say = _once(console.warn)
    with store.held(record.id):
        store.save(record)
        jobs, slots = counted(len(record.trials), "job"), counted(len(made.slots.all), "slot")
        console.say(f"{record.id}: {jobs} on {slots} of cluster {record.cluster}")
        for note in made.slots.notes:
            say(note)
        run = SweepRun(controller.store.home, store, record, made.slots.all, made.jobs, made.estimates, say)
        try:
            record = _watched(controller, run, record, Path(record.out))
        except KeyboardInterrupt:
            console.say(f"\nLeft; jobs that run go on.\nContinue: orch sweep --continue {record.id}")
            console.say(f"Cancel: orch sweep --cancel {record.id}")
            raise
    for left in run.left:
        console.warn(f"{left} may still run on its host, which gives no answer: `orch cancel --job {left}`")
    if as_json:
        console.print_json(sweep_table.sweep_json(record))
    else:
        sweep_table.print_sweep(record)
        _compare(record)
    failed = [trial for trial in record.trials if trial.state in ("failed", "cancelled")]
    for trial in failed:
        console.fail(f"{trial.label}: {trial.why or trial.state}", f"orch logs --job {trial.job}" if trial.job else "")
    if failed:
        sys.exit(1)


def _watched(controller: Controller, run: SweepRun, record: SweepRecord, out: Path) -> SweepRecord:
    with contextlib.closing(run.course(controller, out)) as course, _shown() as show:
        for now in course:
            show(now)
            record = now.record
    return record


@contextlib.contextmanager
def _shown() -> Iterator[Callable[[SweepNow], None]]:
    from rich.live import Live

    from orchestrator.views import console, sweep_table

    lines = sweep_table.Lines()
    if not console.err.is_terminal:

        def say(now: SweepNow) -> None:
            for line in lines.of(now.record):
                console.say(line)

        yield say
        return
    with Live(console=console.err, auto_refresh=False, transient=True, vertical_overflow="ellipsis") as live:
        yield lambda now: live.update(
            sweep_table.board(now.record, now.live, now.away, console.err.size.height), refresh=True
        )


def _compare(record: SweepRecord) -> None:
    """The best of them, by loss or accuracy, else the first."""
    from orchestrator.files import write_atomic
    from orchestrator.paths import RunFolder
    from orchestrator.results.compare import compare
    from orchestrator.views import console
    from orchestrator.views.charts import MOST_LINES
    from orchestrator.views.run_comparison import print_comparison, render_comparison

    done = [trial for trial in record.trials if trial.state == "succeeded" and trial.is_collected and trial.job]
    worst = float("inf")
    best = sorted(done, key=lambda trial: (-(trial.accuracy or 0.0), worst if trial.loss is None else trial.loss))
    folders = [RunFolder(Path(record.out) / str(trial.job)) for trial in best[:MOST_LINES]]
    there = [folder for folder in folders if folder.steps.is_file()]
    if len(there) < LEAST_COMPARED:
        return
    comparison = compare(there)
    console.put("")
    if len(best) > MOST_LINES:
        console.put(f"the best {MOST_LINES} of {len(best)}:")
    print_comparison(comparison)
    page = Path(record.out) / f"{record.id}.html"
    write_atomic(page, render_comparison(comparison))
    console.put(f"page: {page}")


def _once(show: Callable[[str], None]) -> Callable[[str], None]:
    said = set[str]()

    def say(line: str) -> None:
        if line not in said:
            said.add(line)
            show(line)

    return say
