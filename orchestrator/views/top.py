"""`orch top`: running jobs and their hosts, on a screen of any width, or in lines without a screen."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from orchestrator.jobs.live_stats import HostNow, JobNow, Reading
from orchestrator.jobs.stall import standstill
from orchestrator.units import format_bytes, one_line
from orchestrator.views.console import UNKNOWN, clock, figure, percent
from orchestrator.views.following import time_words
from orchestrator.views.job_table import STATE_COLOURS

BARS = "▁▂▃▄▅▆▇█"
LEAST_SPARK, HEADING_SPARK, MOST_SPARK = 8, 24, 60
COLUMNS = ("node", "samples/s", "wait", "sync", "GPU", "memory", "heat", "power")
DISPENSABLE = ("power", "heat", "memory", "sync")
"""Dropped first on a narrow screen."""
SILENT = "no answer"


def board(jobs: Sequence[JobNow], width: int, height: int) -> RenderableType:
    """On a low screen later jobs get one line each; a single job is complete."""
    parts, left = list[RenderableType](), height - len(jobs)
    for job in jobs:
        whole = tuple(_job(job, width))
        more = _lines(whole, width) - 1
        parts += whole if more <= left or len(jobs) == 1 else [_cut(Text(line(job)))]
        left -= more if more <= left else 0
    if len(jobs) > height:
        parts[height - 1 :] = [_cut(Text(f"and {len(jobs) - height + 1} more; `orch top JOB` shows one", "dim"))]
    return Group(*parts)


def _lines(parts: Sequence[RenderableType], width: int) -> int:
    measure = Console(width=width, file=io.StringIO(), legacy_windows=False)
    return len(measure.render_lines(Group(*parts), pad=False))


def _job(job: JobNow, width: int) -> Iterator[RenderableType]:
    heading = Text(one_line(job.record.id), "bold")
    heading.append(f"  {job.record.state}", STATE_COLOURS.get(job.record.state, "default"))
    top, room = max((speed or 0.0 for speed in job.speeds), default=0.0), width - heading.cell_len - 2
    if room >= LEAST_SPARK:
        heading.append("  " + spark(job.speeds, top, min(room, HEADING_SPARK)), "cyan")
    yield _cut(heading)
    yield Padding(Text("  ".join(_figures(job))), (0, 0, 0, 2))  # folded if too long: a figure is never cut
    yield _cut(Text(f"  {time_words(job.progress)}", "dim"))
    yield _hosts(job, width)
    for words in remarks(job):
        yield Padding(Text(words, "yellow"), (0, 0, 0, 2))
    yield Text()


def _cut(line: Text) -> Text:
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _figures(job: JobNow) -> Iterator[str]:
    if job.step is None:
        yield "no step yet"
        return
    yield f"step {job.step:,}/{job.steps:,}" if job.steps else f"step {job.step:,}"
    yield f"{figure(job.samples_per_s)} samples/s"
    if job.loss is not None:
        yield f"loss {figure(job.loss)}"


def remarks(job: JobNow) -> Iterator[str]:
    if job.held_up_by:
        name, part = job.held_up_by
        yield f"{one_line(name)} is the slowest: others wait for it up to {percent(part)} of the time"
    if words := standstill(job.record).words:
        yield words
    for host in job.hosts:
        if host.silent:
            yield one_line(host.silent, 200)


def _hosts(job: JobNow, width: int) -> Table:
    rows = [_cells(host) for host in job.hosts]
    kept = [index for index, name in enumerate(COLUMNS) if index < 3 or any(row[index] != UNKNOWN for row in rows)]

    def taken() -> int:
        return 2 + sum(2 + max(len(COLUMNS[index]), *(len(row[index]) for row in rows)) for index in kept)

    for name in DISPENSABLE:
        if taken() > width and COLUMNS.index(name) in kept:
            kept.remove(COLUMNS.index(name))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", width=0)
    for index in kept:
        # If no more columns can go, names are cut before figures.
        most = max(4, width - (taken() - max(len(row[0]) for row in rows))) if not index else None
        table.add_column(COLUMNS[index], justify="right" if index else "left", no_wrap=True, max_width=most)
    top = max((speed for host in job.hosts for speed in host.speeds if speed is not None), default=0.0)
    room = min(MOST_SPARK, width - taken() - 2) if top else 0
    if room >= LEAST_SPARK:
        table.add_column("samples/s so far", no_wrap=True, max_width=room)
    for host, cells in zip(job.hosts, rows, strict=True):
        words = [Text(cells[index]) for index in kept]
        if room >= LEAST_SPARK:
            words.append(Text(spark(host.speeds, top, room), "cyan"))
        table.add_row("", *words)
    return table


def _cells(host: HostNow) -> tuple[str, ...]:
    row, name = host.row, one_line(host.node)
    if host.silent:
        return (name, SILENT, *[UNKNOWN] * (len(COLUMNS) - 2))
    return (
        name,
        figure(row.samples_per_s if row else None),
        percent(row.wait_share if row else None),
        percent(row.sync_share if row else None),
        _mean(host.gpus, "utilisation", " %"),
        _memory(host.gpus),
        _most(host.gpus, "celsius", " °C"),
        _total_watts(host.gpus),
    )


def _values(gpus: Sequence[Reading], name: str) -> list[float]:
    return [value for gpu in gpus if (value := getattr(gpu, name)) is not None]


def _mean(gpus: Sequence[Reading], name: str, unit: str) -> str:
    values = _values(gpus, name)
    return f"{sum(values) / len(values):.0f}{unit}" if values else UNKNOWN


def _most(gpus: Sequence[Reading], name: str, unit: str) -> str:
    values = _values(gpus, name)
    return f"{max(values):.0f}{unit}" if values else UNKNOWN


def _memory(gpus: Sequence[Reading]) -> str:
    """The fullest GPU's."""
    values = _values(gpus, "memory_bytes")
    return format_bytes(max(values)) if values else UNKNOWN


def _total_watts(gpus: Sequence[Reading]) -> str:
    values = _values(gpus, "watts")
    return f"{sum(values):.0f} W" if values else UNKNOWN


def spark(values: Sequence[float | None], top: float, width: int) -> str:
    """Newest values as bars from 0 to `top`, blank if unknown."""
    if top <= 0:
        return ""
    return "".join(" " if value is None else _bar(value / top) for value in values[-width:]).lstrip()


def _bar(part: float) -> str:
    return BARS[min(len(BARS) - 1, max(0, math.ceil(part * len(BARS)) - 1))]


def line(job: JobNow) -> str:
    """`12:03:41 resnet152-…: running, step 120/938, 1,166 samples/s, loss 0.312, about 4:10 left`, the slowest host,
    silent hosts.
    """
    words = [f"{time.strftime('%H:%M:%S')} {one_line(job.record.id)}: {job.record.state}", *_figures(job)]
    if (left_s := job.progress.left_s) is not None:
        words.append(f"about {clock(left_s)} left")
    if job.held_up_by:
        words.append(f"{one_line(job.held_up_by[0])} is the slowest")
    silent = [one_line(host.node) for host in job.hosts if host.silent]
    return ", ".join([*words, *([f"no answer from {', '.join(silent)}"] if silent else [])])
