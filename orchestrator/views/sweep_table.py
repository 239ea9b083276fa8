"""A sweep on the screen: its growing table, lines without a screen, the packing of a dry run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.text import Text

from orchestrator.jobs.live_stats import JobNow
from orchestrator.sweeps.packing import Placed, makespan_s
from orchestrator.sweeps.sweep_record import SweepRecord, Trial
from orchestrator.units import counted, one_line
from orchestrator.views import console
from orchestrator.views.console import UNKNOWN, clock, figure, percent
from orchestrator.views.job_table import STATE_COLOURS

_FIGURES = ("step", "loss", "accuracy", "samples/s", "time")


def varying(record: SweepRecord) -> list[str]:
    """Keys with more than one value."""
    names = list(record.trials[0].values) if record.trials else []
    return [name for name in names if len({trial.values[name] for trial in record.trials}) > 1] or names


def board(record: SweepRecord, live: Mapping[int, JobNow], away: Mapping[str, str], height: int) -> RenderableType:
    """Running trials first, then the newest ends; the rest is counted."""
    running = [trial for trial in record.trials if trial.state == "running"]
    over = [trial for trial in record.trials if trial.is_over]
    shown = [*running, *reversed(over)][: max(1, height - 4 - len(away))]
    parts: list[RenderableType] = [_table(record, sorted(shown, key=lambda trial: trial.number), live)]
    parts += [Text(f"{one_line(slot)}: {one_line(why)}", "yellow") for slot, why in away.items()]
    return Group(*parts, Text(_counts(record), "dim"))


def print_sweep(record: SweepRecord) -> None:
    console.out.print(_table(record, record.trials, {}))


def _table(record: SweepRecord, trials: Sequence[Trial], live: Mapping[int, JobNow]) -> RenderableType:
    names = varying(record)
    rows = [_row(trial, names, live.get(trial.number)) for trial in trials]
    titles = ("", *names, "on", "state", *_FIGURES)
    return console.table(None, titles, rows, right_from=3 + len(names), drop=("step", "samples/s", "accuracy"))


def _row(trial: Trial, names: Sequence[str], now: JobNow | None) -> tuple[str | Text, ...]:
    step = now.step if now else trial.step
    loss = now.loss if now else trial.loss
    speed = now.samples_per_s if now else trial.samples_per_s
    took_s = now.progress.elapsed_s if now else trial.seconds
    steps = (
        f"{step:,}/{now.steps:,}"
        if now and now.steps and step is not None
        else UNKNOWN
        if step is None
        else f"{step:,}"
    )
    figures = (
        steps,
        figure(loss),
        percent(trial.accuracy, 2),
        figure(speed),
        UNKNOWN if took_s is None else clock(took_s),
    )
    state = Text(trial.state, STATE_COLOURS.get(trial.state, "default"))
    return (trial.key, *(trial.values[name] for name in names), trial.slot or UNKNOWN, state, *figures)


def _counts(record: SweepRecord) -> str:
    states = [trial.state for trial in record.trials]
    parts = [f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states))]
    return f"{record.id}: {', '.join(parts)}"


@dataclass
class Lines:
    """Changes since the last look, as sentences."""

    states: dict[int, tuple[str, str | None]] = field(default_factory=dict)

    def of(self, record: SweepRecord) -> Iterator[str]:
        for trial in record.trials:
            now = (trial.state, trial.job)
            before, self.states[trial.number] = self.states.get(trial.number, ("waiting", None)), now
            if now != before:
                yield f"{trial.number}/{len(record.trials)} {trial.label}: {_change(trial)}"


def _change(trial: Trial) -> str:
    if trial.state == "running":
        return f"runs on {trial.slot} as {trial.job}"
    if trial.state == "waiting":
        return "waits for another host"
    figures = [f"loss {figure(trial.loss)}"] if trial.loss is not None else []
    figures += [f"accuracy {percent(trial.accuracy, 2)}"] if trial.accuracy is not None else []
    took = [f"after {clock(trial.seconds)}"] if trial.seconds is not None else []
    return ", ".join([trial.state, *took, *figures, *([trial.why] if trial.why else [])])


def print_packing(record: SweepRecord, placed: Sequence[Placed], notes: Iterable[str], *, in_seconds: bool) -> None:
    """in_seconds: else lengths are relative."""
    for note in notes:
        console.warn(note)
    names, trials = varying(record), {trial.key: trial for trial in record.trials}
    rows = [
        (each.job, *(trials[each.job].values[name] for name in names), each.slot, *_times(each, in_seconds=in_seconds))
        for each in sorted(placed, key=lambda each: (each.slot, each.start_s))
    ]
    console.print_table(("", *names, "on", "from", "to"), rows, right_from=2 + len(names))
    slots = len({each.slot for each in placed})
    ends = (
        f", over after {clock(makespan_s(placed))}"
        if in_seconds
        else "; no speed is known yet (`orch profile` measures it), so lengths are relative"
    )
    console.put(f"{counted(len(placed), 'job')} on {counted(slots, 'slot')}{ends}")


def _times(each: Placed, *, in_seconds: bool) -> tuple[str, str]:
    return (clock(each.start_s), clock(each.end_s)) if in_seconds else (UNKNOWN, UNKNOWN)


def sweep_json(record: SweepRecord, placed: Sequence[Placed] = (), *, in_seconds: bool = True) -> dict[str, object]:
    """placed: the packing of waiting trials."""
    trials = [trial.model_dump(mode="json", exclude={"is_collected"}) for trial in record.trials]
    slots = [
        {"trial": int(each.job), "slot": each.slot, "start_s": each.start_s if in_seconds else None,
         "end_s": each.end_s if in_seconds else None} for each in placed
    ]  # fmt: skip
    return {"schema": 1, "sweep": record.id, "cluster": record.cluster, "trials": trials, "planned": slots}
