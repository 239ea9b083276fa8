"""A run's report.html: one self-contained page, for offline use, phones, dark mode and paper. Pure except for the
written files.

    write_report(run, analyse(run))     # throughput.png, report.html
"""

from __future__ import annotations

import base64
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from orchestrator.files import write_atomic
from orchestrator.jobs.job_store import FirstFailure
from orchestrator.jobs.lines import Drawing
from orchestrator.paths import RunFolder
from orchestrator.results.network import Collectives, CollectiveTime, LinksCarried, link_matrix
from orchestrator.results.summary import RankEnd, Summary
from orchestrator.results.timeline import load_timeline
from orchestrator.studies.study import published_for
from orchestrator.units import clean, clean_lines, counted, format_bandwidth, format_bytes, format_duration, one_line
from orchestrator.views.charts import MARKED, PALETTE, draw_throughput, svg
from orchestrator.views.console import figure, percent
from orchestrator.views.run_charts import (
    GpuCharts,
    by_clock,
    curve_charts,
    gpu_charts,
    host_speeds,
    read_course,
    speed_chart,
    split_of_run,
)
from orchestrator.views.step_timeline import TimelineDrawing, draw_timeline
from trainer.shared.config import EXPERIMENTS

_EVEN = 0.02
"""Shares this close count as even."""
LOGS, LOG_LINES, LOG_BYTES = 64, 20, 1 << 13
LOST = {
    "compressed": "two ranks lost 0.1 points of accuracy by it in our tests, with a rate that falls",
    "late": "two stages lost 0.05 points of accuracy by it in our tests (median of five seeds), with a rate that falls",
    "local": "two ranks lost 0.1 (8 steps) to 0.25 points (32) of accuracy by it in our tests, with a rate that falls, "
    "and more are known to lose more",
}
"""Accuracy lost by a fidelity; see docs/strategies.md."""
SLOWED = 20
"""Hosts with slowed GPUs named at most."""


def write_report(run: RunFolder, summary: Summary, links: LinksCarried | None = None) -> Path:
    """links: see `render_report`."""
    chart = base64.b64encode(run.chart.read_bytes()).decode() if draw_throughput(summary, run.chart) else None
    logs = () if summary.metrics else last_words(run, summary)
    gpus = gpu_charts({node.name: read_course(run.gpu(node.name)) for node in summary.nodes})
    line = load_timeline(run.timeline) if summary.stages else None
    drawing = draw_timeline(line) if line else None
    write_atomic(run.report, render_report(summary, chart, logs, gpus, drawing, links))
    return run.report


@dataclass(frozen=True)
class LogEnd:
    name: str
    """Relative to the run's folder."""
    lines: tuple[str, ...]


def last_words(run: RunFolder, summary: Summary) -> tuple[LogEnd, ...]:
    """Ends of all ranks' non-empty logs, at most LOGS."""
    ranks = [(node.name, end.rank) for node in summary.nodes for end in node.ends]
    paths = [run.rank(*rank) / name for rank in ranks for name in ("stdout.log", "stderr.log")]
    found = (LogEnd(path.relative_to(run.root).as_posix(), _tail(path)) for path in paths)
    return tuple(itertools.islice((log for log in found if log.lines), LOGS))


def _tail(path: Path) -> tuple[str, ...]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            text = file.read(LOG_BYTES).decode(errors="replace")
    except OSError:
        return ()
    drawing = Drawing()
    lines = [*drawing.take(text.rstrip()), *drawing.rest()]
    return tuple(clean(line.text) for line in lines[-LOG_LINES:])


def render_report(
    summary: Summary,
    chart: str | None = None,
    logs: tuple[LogEnd, ...] = (),
    gpus: GpuCharts | None = None,
    timeline: TimelineDrawing | None = None,
    links: LinksCarried | None = None,
) -> str:
    """chart: a PNG in base64, of collectives. logs: shown without metrics. links: measured by another run."""
    named = summary.named if summary.metrics and not summary.collectives else frozenset()
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            run=summary,
            chart=chart,
            logs=logs,
            gpus=gpus,
            timeline=timeline,
            links=links,
            slowed_named=[node.slowed_words for node in summary.slowed if node.name in named],
            slowed_others=[node.slowed_words for node in summary.slowed if node.name not in named][:SLOWED],
            headline=headline(summary),
            further=outcome(summary) if summary.slow_words else "",
            split=split_of_run(summary),
            host_speeds=host_speeds(summary),
            efficiency_words=efficiency_words(summary),
            fidelity_words=fidelity_words(summary),
            parts=_parts(summary),
            settings_groups=tuple(_settings_groups(summary)),
            speeds=speed_chart(summary),
            curve_charts=curve_charts(summary.curves),
            curves_by_clock=[*by_clock(summary.curves)],
            shares_over_steps=tuple(_shares_over_steps(summary)),
            published=published_for(summary),
            conditions=_conditions(summary),
        )
    )


def _conditions(summary: Summary) -> str:
    """Hardware, length and batch, for comparison with published figures."""
    settings = summary.recorded
    epochs, steps = settings.epochs, settings.steps
    length = f"{steps} steps" if steps else f"{epochs} epoch{'' if epochs == 1 else 's'}" if epochs else ""
    types = ", ".join(f"{gpu.ranks} x {name}" for name, gpu in summary.by_gpu.items())
    batch = "" if settings.batch is None else f"batch {settings.batch}"
    return ", ".join(part for part in (types, length, batch) if part)


def headline(summary: Summary) -> str:
    """The slow host and the reason; if that is unknown, the outcome."""
    has_failed = summary.first_failure is not None and summary.state != "succeeded"
    return outcome(summary) if has_failed or summary.collectives else summary.slow_words or outcome(summary)


def outcome(summary: Summary) -> str:
    """One sentence."""
    failure = summary.first_failure
    if failure is not None and summary.state != "succeeded":
        return f"{_ended(summary.state)}: {_cause(failure)}"
    if summary.collectives:
        return _network_headline(summary, summary.collectives)
    if not summary.metrics:
        return f"{_ended(summary.state)}; it wrote no metrics."
    if summary.samples_per_s is None:
        return f"{_ended(summary.state)}; no speed could be measured."
    speed = f"{figure(summary.samples_per_s)} samples/s"
    if any(node.samples_per_s is None for node in summary.nodes):
        return f"{speed} from the ranks that reported; the others left no figures."
    work = _who_did_the_work(summary)
    if summary.efficiency is None:
        return f"{work}; together {speed}." if len(summary.nodes) > 1 else f"{work} at {speed}."
    if len(summary.nodes) == 1:
        return f"{work} at {speed}, {percent(summary.efficiency)} of its standalone speed."
    estimated = " (estimated)" if summary.efficiency_basis == "estimated" else ""
    return (
        f"{work}; the cluster reached {percent(summary.efficiency)} of its hosts' combined standalone speed{estimated}."
    )


def _network_headline(summary: Summary, found: Collectives) -> str:
    best = found.operation("all_reduce") or next(iter(found.operations), None)
    if best is None:
        return f"{_ended(summary.state)}; no collective could be measured."
    reached = f"{best.operation} of {format_bytes(best.largest_bytes)} ran at {figure(best.busbw_gbps)} Gbps"
    if best.of_declared is None or found.declared_gbps is None:
        return f"{reached} of bus bandwidth."
    return (
        f"{reached} of bus bandwidth, {percent(best.of_declared)} of the declared {figure(found.declared_gbps)} Gbps."
    )


def _times_by_size(found: Collectives) -> dict[int, dict[str, CollectiveTime]]:
    """By bytes and operation, smallest first."""
    table: dict[int, dict[str, CollectiveTime]] = {}
    for time in sorted(found.times, key=lambda time: time.bytes):
        table.setdefault(time.bytes, {})[time.operation] = time
    return table


def _who_did_the_work(summary: Summary) -> str:
    shares = {node.name: summary.share(node) or 0.0 for node in summary.nodes}
    if len(shares) == 1:
        return f"{summary.nodes[0].name} did all the work"
    if max(shares.values()) - min(shares.values()) <= _EVEN:
        return f"{len(shares)} hosts did equal parts of the work"
    most = max(shares, key=lambda name: shares[name])
    return f"{most} did {percent(shares[most])} of the work"


def efficiency_words(summary: Summary) -> str:
    """Basis of the efficiency."""
    if summary.efficiency is None or summary.samples_per_s is None:
        return "Unknown: it needs the steps and the compute time of every rank."
    alone = summary.samples_per_s / summary.efficiency
    compared = f"{figure(summary.samples_per_s)} samples/s together, against {figure(alone)}"
    return f"{compared}, the sum of what each host does alone ({summary.basis_words})."


def fidelity_words(summary: Summary) -> str:
    """Possible loss by the synchronisation, and groups of BatchNorm."""
    fidelity = summary.recorded.fidelity or "exact"
    words = f"{fidelity}: {LOST[fidelity]}" if fidelity in LOST else fidelity
    if summary.batch_norm is None:
        return words
    same_as = f": {summary.batch_norm.exact_words}" if fidelity == "exact" else ""
    return f"{words}; {summary.batch_norm.words}{same_as}"


def _settings_groups(summary: Summary) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changed settings without a title; then the experiment's own, folded."""
    own = EXPERIMENTS.get(summary.experiment, {})
    plain = {key for key, value in summary.settings.items() if key in own and own[key] == value}
    plain -= summary.asked.keys()
    yield "", {key: value for key, value in summary.settings.items() if key not in plain}
    title = f"{counted(len(plain), 'setting')} as {summary.experiment} has them"
    yield title, {key: value for key, value in summary.settings.items() if key in plain}


def _ended(state: str) -> str:
    return f"The job was {state}" if state in ("cancelled", "lost") else f"The job {state}"


def _cause(failure: FirstFailure) -> str:
    """`rank 1 on v100 exited with code 1`."""
    subject = f"rank {failure.rank} "
    if failure.rank is None:
        return f"{failure.node}: {failure.reason}"
    if not failure.reason.startswith(subject):
        return f"rank {failure.rank} on {failure.node}: {failure.reason}"
    what = re.sub(r"^exited (?=-?[0-9])", "exited with code ", failure.reason.removeprefix(subject))
    return f"{subject}on {failure.node} {what}"


def _parts(summary: Summary) -> tuple[tuple[str, str], ...]:
    """Parts of a step in order: field of a node, label."""
    exposed = "exposed " if summary.overlapped else ""
    return (
        ("load_ms", "load"),
        ("compute_ms", "compute"),
        ("sync_ms", f"{exposed}sync"),
        ("wait_ms", f"{exposed}wait"),
        ("optim_ms", "optimiser"),
    )


def _shares_over_steps(summary: Summary) -> Iterator[dict[str, Any]]:
    """Shares at the beginning, and after each change."""
    if not summary.rebalances:
        return
    rows: list[tuple[int, tuple[int, ...], float | None]] = [(0, summary.rebalances[0].before, None)]
    rows += [(change.step, change.shares, change.spread) for change in summary.rebalances]
    for step, shares, spread in rows:
        left, by_node = iter(shares), []
        for node in summary.nodes:
            by_node.append(tuple(itertools.islice(left, node.ranks)))
        percents = [100 * share / sum(shares) for share in shares if share]
        yield {"step": step + 1, "by_node": by_node, "percents": percents, "spread": spread}


def _how(end: RankEnd) -> str:
    if end.signal:
        return f"ended by {one_line(end.signal, 40)}"
    return "unknown" if end.exit_code is None else f"exit code {end.exit_code}"


@cache
def _environment() -> Environment:
    return environment(how=_how, times_by_size=_times_by_size, link_matrix=link_matrix)


# Pages: one HTML file with its style, without scripts and external references. Host names and log lines are untrusted:
# Jinja2 escapes every value, and each page's policy blocks fetches and scripts.

NOTHING = "–"


def environment(**filters: Callable[..., Any]) -> Environment:
    """filters: of a single page, besides the common filters."""
    made = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: clean_lines(value) if type(value) is str else value,  # a Markup is ours
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "figure": or_nothing(figure),
        "percent": or_nothing(percent),
        "size": or_nothing(format_bytes),
        "bandwidth": or_nothing(format_bandwidth),
        "duration": or_nothing(format_duration),
        "known": or_nothing(str),
        "moment": _moment,
        "svg": svg,
        "line": lambda value: one_line(str(value)),
        **filters,
    }
    made.globals |= {"palette": PALETTE, "marked": MARKED}
    return made


def or_nothing(show: Callable[..., str]) -> Callable[..., str]:
    return lambda value, *more: NOTHING if value is None else show(value, *more)


def _moment(text: str | None) -> str:
    return NOTHING if not text else one_line(text, 40).replace("T", " ").replace("Z", " UTC")
