"""What a person sees: tables and lines, by rich. With `cli` the only file that prints.

Results go to standard output, everything else (progress, notices, errors) to standard error; colours only on a
terminal. Whatever is printed here goes through `plain`: hosts have a say in nearly all of it, and nothing of theirs may
steer the terminal or be taken for markup.
"""

from __future__ import annotations

import contextlib
import io
import json
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from rich.color import ColorSystem
from rich.console import Console, Group
from rich.live import Live
from rich.segment import Segment, SegmentLines, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from orchestrator.errors import ConnectError, HostError, OrchError
from orchestrator.hosts.alike import host_set, reasons, together
from orchestrator.hosts.cluster import Cluster
from orchestrator.hosts.facts import NodeFacts
from orchestrator.hosts.masking import MASK
from orchestrator.jobs.faults import fault_words
from orchestrator.jobs.lines import Bars, Line
from orchestrator.jobs.live import Notice, Progress, Row, Silence
from orchestrator.jobs.record import FirstFailure, JobRecord
from orchestrator.jobs.stall import stall_words
from orchestrator.planning.launch_plan import Faster, LaunchPlan
from orchestrator.results.summary import Collectives, Summary, link_matrix
from orchestrator.text import clean_lines, one_line, place
from orchestrator.transport import shell
from orchestrator.units import counted, format_age, format_bandwidth, format_bytes


class _Out(Console):
    def on_broken_pipe(self) -> None:
        """rich would exit with 1 here; `cli` knows that a reader who has left is no error."""
        raise BrokenPipeError


if isinstance(sys.stdout, io.TextIOWrapper):  # where an encoding lacks a letter that a host printed, show a `?`
    sys.stdout.reconfigure(errors="replace")
# A pipe has no width: a table is not to be folded for it.
out = _Out(highlight=False, soft_wrap=True, width=None if sys.stdout and sys.stdout.isatty() else 200)
err = Console(stderr=True, highlight=False, soft_wrap=True)

_RANK_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_cyan", "bright_magenta", "bright_yellow")
PROGRESS_LINE_S = 10.0
FILES_SHOWN = 40
SLOWED_SHOWN = 5
LEAST_TEXT = 24
"""So wide a column of words is, to be read where it is folded."""
LEAST_NAME = 4
BARS_SHOWN = 8
STARTING_S = 60.0
"""So long it is no wonder that nothing is printed: torch is loaded."""
_STATE_COLOURS = {"succeeded": "green", "failed": "red", "lost": "red", "cancelled": "yellow", "running": "cyan"}


def plain(text: object, style: str = "") -> Text:
    """Nothing in it is obeyed by the terminal or taken for markup; line breaks stay."""
    return Text(clean_lines(text), style)


def put(text: object) -> None:
    """A line of the result."""
    out.print(plain(text))


def say(text: str) -> None:
    """A line beside the result."""
    err.print(plain(text))


def warn(text: str, to: Console | None = None) -> None:
    (to or err).print(Text.assemble(("note:", "yellow"), " ", plain(text)))


def fail(message: str, remedy: str = "") -> None:
    """An error: what is wrong, then what to try."""
    for line in message.split("\n"):
        err.print(Text.assemble(("error:", "red"), " ", plain(line)))
    if remedy:
        err.print(Text.assemble("  ", ("try:", "bold"), " ", plain(remedy)))


def fail_each(errors: Iterable[OrchError]) -> None:
    """Each different one once, with the hosts that share it."""
    for error in together(errors):
        fail(error.message, error.remedy)


def print_json(value: Any) -> None:
    """The one document of `--json`, never coloured or wrapped."""
    print(json.dumps(value, indent=2))  # and not `write`: there may be no standard output


# ---- the cluster ----------------------------------------------------------------------------------------------


def print_cluster(cluster: Cluster) -> None:
    _print_nodes(cluster, cluster_json(cluster)["nodes"], "added")


def print_status(cluster: Cluster, silent: Mapping[str, HostError] | None) -> None:
    """silent: the nodes that do not answer at this moment; None where nobody looked."""
    nodes = cluster_json(cluster, silent)["nodes"]
    _print_nodes(cluster, [{**node, "probed": _age(node["probed"])} for node in nodes], "probed")
    known = {name: problem.as_error(name) for name, problem in cluster.problems.items()}
    fail_each({**known, **(silent or {})}.values())


def _print_nodes(cluster: Cluster, nodes: Sequence[Mapping[str, Any]], when: str) -> None:
    """when: the key of the time that comes last."""
    columns = ("name", "IP", "id", "note", "GPU", "bandwidth", "image", "torch", "venv", "status", when)
    rows = [[str(node["address" if column == "IP" else column.lower()] or "") for column in columns] for node in nodes]
    told = [index for index in range(len(columns)) if any(row[index] for row in rows)]  # a narrow screen has no room
    shown = [[row[index] for index in told] for row in rows]
    drop = ("added", "venv", "note", "image", "id", "bandwidth")
    out.print(_table(f"cluster {cluster.name}", [columns[index] for index in told], shown, drop=drop))
    if cluster.master:
        out.print(Text.assemble("master: ", plain(cluster.master_reason, "bold")))


def cluster_json(
    cluster: Cluster,
    silent: Mapping[str, HostError] | None = None,
    on_gpus: Mapping[str, NodeFacts] | None = None,
) -> dict[str, Any]:
    """The document of `orch up --json` and `orch status --json`. silent: as for `print_status`. on_gpus: who is on the
    GPUs now, of the nodes that said so; None: those that were there when the nodes were probed.
    """
    rows = []
    for node in cluster.nodes:
        facts = cluster.facts.get(node.name)
        gpu = node.gpu or (facts.gpus[0].name if facts and facts.gpus else None)
        count = node.gpus or (len(facts.gpus) if facts else 0)
        rows.append(
            {
                "name": node.name,
                "address": node.address or node.host,
                "id": node.id,
                "note": node.note,
                "gpu": f"{count}x {gpu}" if gpu and count > 1 else gpu or ("CPU" if facts else None),
                "bandwidth": format_bandwidth(node.bandwidth_bps) if node.bandwidth_bps else None,
                "image": node.image,
                "torch": facts.torch.version if facts and facts.torch else None,
                "venv": cluster.venvs[node.name].torch if node.name in cluster.venvs else None,
                "occupants": _occupants((cluster.facts if on_gpus is None else on_gpus).get(node.name)),
                "status": node_status(cluster, node.name, silent or {}),
                "answers": None if silent is None else node.name not in silent,
                "probed": cluster.probed.get(node.name),
                "added": _short_time(cluster.added.get(node.name)),
            }
        )
    return {
        "schema": 1,
        "cluster": cluster.name,
        "file": cluster.file,
        "master": cluster.master,
        "master_reason": cluster.master_reason,
        "nodes": rows,
        "problems": {name: problem.model_dump() for name, problem in cluster.problems.items()},
    }


def _occupants(facts: NodeFacts | None) -> list[dict[str, Any]] | None:
    """Every process on a GPU of the node; None where it is not known."""
    if facts is None:
        return None
    return [{"gpu": gpu.index, **occupant.model_dump()} for gpu in facts.gpus for occupant in gpu.occupants]


def node_status(cluster: Cluster, name: str, silent: Mapping[str, HostError]) -> str:
    if name in silent:
        return "no answer" if isinstance(silent[name], ConnectError) else "unusable"
    if name in cluster.released:
        return "released"
    if name in cluster.problems:
        return "unusable"
    if name == cluster.master:
        return "master"
    return "connected" if name in cluster.facts else "not probed"


# ---- jobs -----------------------------------------------------------------------------------------------------


def print_jobs(jobs: Sequence[JobRecord]) -> None:
    """An id is never broken: it is there to be copied. What a narrow screen has no room for is in `--json`."""
    columns = ["job", "state", "cluster", "started", "took", "exit", "nodes", "exp", "first failure"]
    rows = [_job_cells(job) for job in jobs]
    drop = ["exp", "nodes", "first failure", "exit", "took", "cluster", "started"]
    idle = {"cluster"} if len({job.cluster for job in jobs}) < 2 else set()
    idle |= {name for index, name in enumerate(columns) if rows and not any(str(row[index]) for row in rows)}
    told = [index for index, name in enumerate(columns) if name not in idle]
    columns, rows = [columns[index] for index in told], [tuple(row[index] for index in told) for row in rows]
    out.print(_table(None, columns, rows, drop=drop, text=("first failure",)))


def _job_cells(job: JobRecord) -> tuple[Any, ...]:
    failure = job.first_failure
    return (
        job.id,
        Text(job.state, style=_STATE_COLOURS.get(job.state, "default")),
        job.cluster,
        _short_time(job.started) or "",
        _lasted(job),
        "" if job.exit_code is None else str(job.exit_code),
        ", ".join(job.nodes),
        job.exp,
        one_line(f"{failure.node}: {failure.reason}", 80) if failure else "",
    )


def _lasted(job: JobRecord) -> str:
    """Until its end, or so far."""
    try:
        ended = datetime.fromisoformat(job.ended) if job.ended else datetime.now(timezone.utc)
        return _clock((ended - datetime.fromisoformat(job.started or "")).total_seconds())
    except (ValueError, TypeError):
        return ""


def _clock(seconds: float) -> str:
    """`0:42`, `1:02:03`, `2d 01:02:03`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    days, hours = divmod(minutes // 60, 24)
    return (f"{days}d {hours:02d}" if days else str(hours)) + f":{minutes % 60:02d}:{rest:02d}"


def jobs_json(
    jobs: Sequence[JobRecord], unheard: Mapping[str, Mapping[str, HostError]] | None = None
) -> dict[str, Any]:
    """unheard: by job that may still run, the hosts that gave no answer."""
    when = ("started", "ended", "exit_code", "first_failure", "faults", "stall", "joined")
    keys = ("id", "state", "exp", "cluster", "nodes", *when)
    rows = [{key: job.model_dump(mode="json")[key] for key in keys} for job in jobs]
    return {"schema": 1, "jobs": [{**row, "unheard": list((unheard or {}).get(row["id"], ()))} for row in rows]}


def warn_stalls(jobs: Iterable[JobRecord]) -> None:
    """Of jobs that run, those whose ranks stand still."""
    for job in jobs:
        if job.stall and job.state == "running":
            warn(f"{job.id}: {stall_words(job.stall)}")


def warn_unheard(unheard: Mapping[str, Mapping[str, HostError]]) -> None:
    """That a job's state is not what all its hosts say now."""
    for job, errors in unheard.items():
        names, why = host_set(list(errors)), "; ".join(reasons(errors.values()))
        warn(f"{job}: no answer from {names} ({why}); its state is what the others say, else what was last known")


def print_end(job: JobRecord) -> None:
    """How a job ended; the failing rank's own code is on the last line."""
    colour = _STATE_COLOURS.get(job.state, "default")
    err.print(Text.assemble((job.state, colour), " ", plain(job.id)))
    for fault in job.faults:
        say(fault_words(fault))
    if job.first_failure:
        say(failure_words(job.first_failure))
    if job.exit_code:
        err.print(f"exit code {job.exit_code}")


def failure_words(failure: FirstFailure) -> str:
    log = f"\n  its log says: {one_line(failure.log_line)}" if failure.log_line else ""
    return f"first cause: {one_line(failure.node)}: {one_line(failure.reason)}{log}"


# ---- a plan ---------------------------------------------------------------------------------------------------


def print_plan(plan: LaunchPlan, files: Sequence[str] = ()) -> None:
    """The whole plan as text: exactly what would run. files: what it ships; the first FILES_SHOWN are named."""
    rendezvous = place(plan.master_address, plan.rendezvous_port)
    put(f"job {plan.job} on cluster {plan.cluster}: {counted(plan.world_size, 'rank')}")
    put(f"master {plan.master}, rendezvous {rendezvous} (static)")
    if plan.elastic:
        nodes = f"{plan.elastic.min_nodes} to {plan.elastic.max_nodes} nodes"
        put(f"elastic: {nodes}, at most {plan.elastic.max_restarts} restarts of a host's ranks")
    commit = f", {plan.code.commit.words}" if plan.code.commit else ""
    size = f"{counted(plan.code.files, 'file')}, {format_bytes(plan.code.size_bytes)}"
    put(f"ships {size}, from {plan.code.source} (sha256 {plan.code.sha256[:12]}){commit}")
    for name in files[:FILES_SHOWN]:
        put(f"  {one_line(name)}")
    if len(files) > FILES_SHOWN:
        put(f"  and {len(files) - FILES_SHOWN} more (`--json` names all)")
    for setting in plan.nccl:
        put(f"sets {setting.words}")
    for node in plan.nodes:
        last = node.first_rank + node.ranks - 1
        ranks = f"rank {last}" if node.ranks == 1 else f"ranks {node.first_rank}..{last}"
        rest = f" node rank {node.node_rank}, {ranks} on {node.device}"
        out.print(Text.assemble("\n", plain(node.name, "bold"), rest))
        put(f"  address    {node.address} on {node.interface or 'an unknown interface'}")
        if node.shares:
            put(f"  batch      {' + '.join(map(str, node.shares))} samples a step")
        put(f"  workdir    {node.workdir}")
        if node.prepare:
            put(f"  prepare    {node.prepare}")
        torchrun, command = plan.typed(node)
        values = (f"{name}={value if value == MASK else shell.join([value])}" for name, value in node.env.items())
        put(f"  env        {' '.join(values)}")
        put(f"  torchrun   {shell.typed(torchrun)}")
        put(f"  rank runs  {shell.typed(command)}")
    if plan.prediction:
        put(f"\n{plan.prediction.words}")
    warn_notes(plan)
    warn_faster(plan.faster)


def warn_notes(plan: LaunchPlan, said: set[str] | None = None) -> None:
    """said: what an earlier plan of the same command has noted, which is not repeated; this one's notes join it."""
    said = set() if said is None else said
    for note in plan.notes:
        if note not in said:
            warn(note)
        said.add(note)


def warn_faster(found: Iterable[Faster]) -> None:
    """What would take less time, each with the line to copy."""
    for each in found:
        warn(each.words)
        err.print(Text.assemble("  ", ("try:", "bold"), " ", plain(each.command)))


# ---- following ------------------------------------------------------------------------------------------------


def print_events(
    events: Iterable[tuple[Line, ...] | Notice | Progress | Bars | Silence],
    show: Callable[[Line], bool] = lambda line: True,
    stream: Console = out,
) -> None:
    """Every line with its node and rank before it, a colour a rank, and how the run goes below or between them."""
    words = _LineWords(stream)
    board: _Table | _Sentences = _Table(stream) if _is_screen(stream) else _Sentences()
    # What is printed past a table that stands on the same screen would be torn by its next drawing.
    notices = stream if _is_screen(stream) and _is_screen(err) else err
    try:
        for event in events:
            with board.whole():
                if isinstance(event, Notice):
                    warn(event.text, notices)
                elif isinstance(event, Bars):
                    board.show(Bars(tuple(line for line in event.lines if show(line))))
                elif isinstance(event, (Progress, Silence)):
                    board.show(event)
                else:
                    board.lines_come()
                    # One segment as it is: laying out each line would cost a flood of them ten times what they cost us.
                    if text := "".join([words.of(line) for line in event if show(line)]):
                        stream.print(Segments([Segment(text)]), end="")
    finally:
        board.close()


@contextlib.contextmanager
def _ctrl_c_waits() -> Iterator[None]:
    """Until what is under way is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[object] = []
    before = signal.signal(signal.SIGINT, lambda *_: came.append(None))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        signal.raise_signal(signal.SIGINT)


class _LineWords:
    """Lines as they are printed, coloured where the stream shows colours."""

    def __init__(self, stream: Console) -> None:
        self._coloured = stream.color_system is not None and not stream.no_color
        self._frames: dict[tuple[str, int, str], tuple[str, str]] = {}

    def of(self, line: Line) -> str:
        node, rank, stream, text = line
        before, after = self._frames.get((node, rank, stream)) or self._frame(node, rank, stream)
        return f"{before}{text}{after}"

    def _frame(self, node: str, rank: int, stream: str) -> tuple[str, str]:
        """What stands around the text of every line of this stream."""
        prefix, after = _prefix(Line(node, rank, stream, "")), "\n"
        if self._coloured:
            colour = Style.parse(_RANK_COLOURS[rank % len(_RANK_COLOURS)])
            prefix = colour.render(prefix, color_system=ColorSystem.STANDARD)
            if stream == "stderr":
                prefix, after = f"{prefix}\x1b[2m", "\x1b[0m\n"
        self._frames[node, rank, stream] = prefix, after
        return prefix, after


def _is_screen(console: Console) -> bool:
    """FORCE_COLOR makes rich take a pipe for a terminal."""
    return console.is_interactive and console.file.isatty()


class _Table:
    """Below the lines on a terminal; drawn anew with each value, and left standing at the end."""

    def __init__(self, stream: Console) -> None:
        self._stream = stream
        self._live: Live | None = None
        self._shown: dict[type, Progress | Bars | Silence] = {}

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Around whatever is drawn: what a Ctrl-C tears would stand on the screen beside the next drawing of it."""
        return _ctrl_c_waits()

    def lines_come(self) -> None:
        """What was said of their silence is over."""
        if self._shown.pop(Silence, None):
            self._draw()

    def show(self, event: Progress | Bars | Silence) -> None:
        if not isinstance(event, Silence):
            self._shown.pop(Silence, None)
        self._shown[type(event)] = event
        self._draw()

    def close(self) -> None:
        if self._live:
            self._shown = {kind: event for kind, event in self._shown.items() if kind is Progress}
            self._draw()  # what was drawn over and over has come as lines
            self._live.stop()

    def _draw(self) -> None:
        if self._live is None:
            self._live = Live(
                console=self._stream,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=_is_screen(err),
            )
            self._live.start()
        # Laid out here, once: each line that is printed draws the table below it again.
        parts = Group(*(part for kind in (Silence, Progress, Bars) for part in self._parts(self._shown.get(kind))))
        lines = self._stream.render_lines(parts, pad=False) if parts.renderables else []
        self._live.update(SegmentLines(lines, new_lines=True), refresh=True)

    def _parts(self, event: Progress | Bars | Silence | None) -> Iterator[Table | Text]:
        width = self._stream.width
        if isinstance(event, Silence):
            yield Text(silence_words(event), "dim", no_wrap=True, overflow="ellipsis")
        elif isinstance(event, Progress):
            yield progress_table(event, width)
            if event.elapsed_s is not None:
                yield Text(time_words(event), "dim", no_wrap=True, overflow="ellipsis")
        elif isinstance(event, Bars):
            for line in event.lines[:BARS_SHOWN]:
                colour = _RANK_COLOURS[line.rank % len(_RANK_COLOURS)]
                text = Text.assemble((_prefix(line), colour), plain(line.text.strip()))
                text.no_wrap, text.overflow = True, "ellipsis"
                yield text
            if more := event.lines[BARS_SHOWN:]:
                yield Text(f"and {len(more)} more that are drawn over and over", "dim")


class _Sentences:
    """Where there is no screen: one line a host and a bar, seldom, and the last word of each host at the end."""

    def __init__(self) -> None:
        self._due: float | None = None
        self._latest: dict[type, Progress | Bars | Silence] = {}

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """A pipe that nobody reads shall not hold a Ctrl-C up."""
        return contextlib.nullcontext()

    def lines_come(self) -> None:
        self._latest.pop(Silence, None)

    def show(self, event: Progress | Bars | Silence) -> None:
        now = time.monotonic()
        self._latest[type(event)] = event
        if self._due is None:
            self._due = now + PROGRESS_LINE_S
        elif now >= self._due:
            self._due = now + PROGRESS_LINE_S
            self._say()

    def close(self) -> None:
        """What is still being drawn has come as lines."""
        self._latest = {kind: event for kind, event in self._latest.items() if kind is Progress}
        self._say()

    def _say(self) -> None:
        latest, self._latest = self._latest, {}
        for event in latest.values():
            if isinstance(event, Progress):
                for row in event.rows:
                    say(progress_words(row))
            elif isinstance(event, Bars):
                for line in event.lines[:BARS_SHOWN]:
                    say(f"{_prefix(line)}{line.text.strip()}")
            elif event.elapsed_s < STARTING_S:
                say(silence_words(event))


def _prefix(line: Line) -> str:
    return f"[{one_line(line.node)} {line.rank}] "


def silence_words(silence: Silence) -> str:
    """`2 ranks are starting (12 s)`."""
    ranks = "1 rank is" if silence.ranks == 1 else f"{silence.ranks} ranks are"
    if silence.elapsed_s < STARTING_S:
        return f"{ranks} starting ({silence.elapsed_s:.0f} s)"
    return f"no line and no metric from any rank so far ({_clock(silence.elapsed_s)})"


def time_words(progress: Progress) -> str:
    """`running 1:02, about 4:10 left`."""
    left = progress.left_s
    return f"running {_clock(progress.elapsed_s or 0)}" + (f", about {_clock(left)} left" if left is not None else "")


def progress_table(progress: Progress, width: int) -> Table:
    """At most `width` columns wide and one line a host; where it is narrow, names are cut before figures."""
    columns, figures = ["step", "samples/s", "loss", "sync", "wait"], [_progress_cells(row) for row in progress.rows]

    def taken() -> int:
        return sum(2 + max(map(len, column)) for column in zip(columns, *figures, strict=True))

    for index in (2, 0):  # nobody needs a loss of fifteen digits
        if taken() + LEAST_NAME > width:
            del columns[index]
            figures = [cells[:index] + cells[index + 1 :] for cells in figures]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("node", no_wrap=True, max_width=max(LEAST_NAME, width - taken()))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row, cells in zip(progress.rows, figures, strict=True):
        table.add_row(Text(one_line(row.node)), *map(Text, cells))
    return table


def _progress_cells(row: Row) -> tuple[str, ...]:
    shares = _percent(row.sync_share), _percent(row.wait_share)
    return (_of_steps(row), _short(row.samples_per_s), _short(row.loss), *shares)


def progress_words(row: Row) -> str:
    """`a2000: step 120/938, 333 samples/s, loss 0.312, sync 20 %, wait 41 %`."""
    step, speed, loss, sync, wait = _progress_cells(row)
    return f"{row.node}: step {step}, {speed} samples/s, loss {loss}, sync {sync}, wait {wait}"


def _of_steps(row: Row) -> str:
    return f"{row.step}/{row.steps}" if row.steps else str(row.step)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}".replace("%", " %")


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if 100 <= abs(value) < 1e7 else f"{value:.3g}"


# ---- results --------------------------------------------------------------------------------------------------


def print_summary(summary: Summary) -> None:
    """The comparison of the hosts, and what it comes to."""
    if summary.collectives:
        _print_network(summary.collectives)
    else:
        _print_hosts(summary)
    if summary.first_failure:
        put(failure_words(summary.first_failure))
    for sentence in (*summary.missing, *summary.warnings):
        warn(sentence)
    for each in summary.faster:
        put(each.words)
        put(f"  try: {each.command}")


def _print_network(found: Collectives) -> None:
    """A line an operation: what a small call costs, how fast a large one is, and the line between."""
    columns = ["operation", "size", "µs", "size", "bus Gbps", "of declared", "alpha µs", "beta Gbps", "off by at most"]
    rows = []
    for each in found.operations:
        ends = format_bytes(each.smallest_bytes), _figure(each.latency_us), format_bytes(each.largest_bytes)
        line = _percent(each.of_declared), _figure(each.alpha_us), _figure(each.beta_gbps), _percent(each.worst_error)
        rows.append((each.operation, *ends, _figure(each.busbw_gbps), *line))
    declared = f", declared {_figure(found.declared_gbps)} Gbps" if found.declared_gbps else ""
    drop = ("off by at most", "of declared")
    out.print(_table(f"collectives{declared}", columns, rows, right_from=1, drop=drop))
    if found.links:
        _print_links(*link_matrix(found))


def _print_links(names: Sequence[str], gbps: Mapping[tuple[str, str], float]) -> None:
    """From each host (a line) to each (a column), in as many tables as the screen's width asks for."""
    title: str | None = "Gbps from one host to another, by itself"
    first = max(len("from / to"), *map(len, names))
    for part in _parts(names, max(LEAST_NAME, out.width - first)):
        rows = [(a, *(_figure(gbps.get((a, b))) for b in part)) for a in names]
        out.print(_table(title, ["from / to", *part], rows, right_from=1))
        title = None


def _parts(names: Sequence[str], width: int) -> Iterator[list[str]]:
    """The names cut into runs that stand beside each other on so many columns, two before each; at least one a run."""
    part: list[str] = []
    for name in names:
        if part and sum(len(each) + 2 for each in (*part, name)) > width:
            yield part
            part = []
        part.append(name)
    yield part


def _print_hosts(summary: Summary) -> None:
    columns = (
        "node",
        "GPU",
        "ranks",
        "batch/rank",
        "samples/s",
        "alone*",
        "step ms",
        "load",
        "compute",
        "sync",
        "wait",
    )
    rows = []
    for node in summary.nodes:
        step = node.step_ms.p50 if node.step_ms else None
        alone = node.solo_samples_per_s or node.own_samples_per_s
        figures = (node.samples_per_s, alone, step, node.load_ms, node.compute_ms, node.sync_ms, node.wait_ms)
        batch = "-" if node.batch_per_rank is None else str(node.batch_per_rank)
        rows.append((node.name, node.gpu, str(node.ranks), batch, *(_figure(value) for value in figures)))
    title = f"{summary.experiment}: {summary.state}, {counted(summary.steps, 'measured step')}"
    table = _table(title, columns, rows, right_from=2, drop=("ranks", "batch/rank", "load", "GPU", "alone*"))
    out.print(table)
    if summary.samples_per_s is not None:
        whole = f"cluster: {_figure(summary.samples_per_s)} samples/s"
        if summary.efficiency is not None:
            whole += f", {summary.efficiency:.2f} of the sum of its hosts' speeds alone*"
        put(whole)
        if summary.efficiency is not None or any(column.header == "alone*" for column in table.columns):
            measured = summary.efficiency_basis == "solo"
            basis = "measured with each host alone" if measured else "estimated: samples over compute time"
            out.print(f"* {basis}", style="dim")
        put(f"left out: {summary.left_out_words}")
        if summary.wall_clock_words:
            put(summary.wall_clock_words)
    if summary.prediction and summary.of_prediction:
        put(f"{summary.prediction.words}; measured {summary.of_prediction:.0%} of it")
    if summary.bound:
        put(summary.bound.words)
    if summary.straggler:
        put(f"straggler: {summary.straggler.node} — {summary.straggler.reason}")
    for node in summary.slowed[:SLOWED_SHOWN]:
        put(node.slowed_words)
    if more := summary.slowed[SLOWED_SHOWN:]:
        put(f"so were GPUs of {counted(len(more), 'more host')} (the report and `--json` name them)")
    if summary.batch_norm:
        put(summary.batch_norm.words)
    if summary.accuracy is not None:
        out.print(f"test accuracy: {summary.accuracy:.2%}")
        for line in class_lines(summary.accuracy_per_class):
            put(line)
    if summary.curves.epochs:
        put(f"epochs: {summary.curves.epoch_words}")


CLASSES_SHOWN = 20


def class_lines(accuracies: Mapping[str, float]) -> list[str]:
    """In at most 80 columns; of many classes those that did worst."""
    worst = sorted(accuracies, key=lambda name: accuracies[name])[:5]
    shown = list(accuracies) if len(accuracies) <= CLASSES_SHOWN else worst
    head = "  by class, %: " if shown is not worst else f"  worst of {len(accuracies)} classes, %: "
    cells = ", ".join(f"{one_line(name, 24)}\u00a0{100 * accuracies[name]:.1f}" for name in shown)
    wrapped = textwrap.wrap(head + cells, 80, subsequent_indent="    ", break_long_words=False) if cells else []
    return [line.replace("\u00a0", " ") for line in wrapped]


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    right_from: int,
    title: str | None = None,
    *,
    left_from: int = 99,
    drop: Sequence[str] = (),
) -> None:
    """right_from, left_from: figures stand at the right, and words after them at the left. drop: as for `_table`."""
    out.print(_table(title, columns, rows, right_from, left_from, drop=drop))


def print_answers(answers: Mapping[str, Any], words: Any) -> None:
    """One line a host with what it answered in words; then the errors."""
    for node, answer in answers.items():
        if not isinstance(answer, Exception):
            put(f"{node}: {words(answer)}")
    fail_each(answer for answer in answers.values() if isinstance(answer, OrchError))


def _table(
    title: str | None,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    right_from: int = 99,
    left_from: int = 99,
    *,
    drop: Sequence[str] = (),
    text: Sequence[str] = (),
) -> Table:
    """drop: columns that a narrow screen does without, the first ones first. text: columns that may be folded."""
    heading = None if title is None else plain(title)
    table = Table(title=heading, title_justify="left", header_style="bold", box=None, pad_edge=False)
    cells = [[cell if isinstance(cell, Text) else Text(one_line(cell)) for cell in row] for row in rows]
    kept, fits = _kept(columns, cells, drop, text)
    for index in kept:
        name, justify = columns[index], "right" if right_from <= index < left_from else "left"
        whole = fits and name not in text
        table.add_column(name, justify=justify, overflow="fold", no_wrap=whole)  # type: ignore[arg-type]
    for row in cells:
        table.add_row(*(row[index] for index in kept))
    return table


def _kept(
    columns: Sequence[str], rows: Sequence[Sequence[Text]], drop: Sequence[str], text: Sequence[str]
) -> tuple[list[int], bool]:
    """The columns for which this screen has room, and whether it has room for them without folding figures."""
    widths = [max(len(name), *(row[index].cell_len for row in rows), 0) for index, name in enumerate(columns)]
    for index, name in enumerate(columns):
        widths[index] = min(widths[index], LEAST_TEXT) if name in text else widths[index]
    kept, left = list(range(len(columns))), list(drop)

    def fits() -> bool:
        return sum(widths[index] for index in kept) + 2 * (len(kept) - 1) <= out.width

    while left and not fits():
        name = left.pop(0)
        kept = [index for index in kept if columns[index] != name]
    return kept, fits()


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}" if value < 10 else f"{value:.1f}"


def _age(iso: str | None) -> str | None:
    try:
        return format_age(time.time() - datetime.fromisoformat(iso).timestamp()) if iso else None
    except ValueError:
        return None


def _short_time(iso: str | None) -> str | None:
    """Local time, to the minute."""
    try:
        return f"{datetime.fromisoformat(iso).astimezone():%Y-%m-%d %H:%M}" if iso else None
    except ValueError:
        return None
