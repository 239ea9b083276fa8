"""Live output of a followed run: every line of its ranks, and its progress."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator

from rich.color import ColorSystem
from rich.console import Console, Group
from rich.live import Live
from rich.segment import Segment, SegmentLines, Segments
from rich.style import Style
from rich.table import Table
from rich.text import Text

from orchestrator.jobs.job_store import JobRecord
from orchestrator.jobs.lines import Bars, LogLine
from orchestrator.jobs.live import HostRow, Notice, RunProgress, Silence, Standstill
from orchestrator.jobs.tracebacks import Ending
from orchestrator.units import one_line
from orchestrator.views import console
from orchestrator.views.console import LEAST_NAME, clock, figure, local_second, percent

_RANK_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_cyan", "bright_magenta", "bright_yellow")
Shown = RunProgress | Bars | Silence | Standstill
"""Shown below the lines until replaced."""
PROGRESS_LINE_S = 10.0
BARS_SHOWN = 8


def print_events(
    events: Iterable[tuple[LogLine, ...] | Notice | Shown | Ending],
    show: Callable[[LogLine], bool] = lambda line: True,
    stream: Console = console.out,
    *,
    times: bool = False,
    ended: Callable[[JobRecord], None] = lambda record: None,
) -> int:
    """Prints lines with node and rank, and progress below or between them. times: with the time of printing. ended:
    called at an Ending, when its lines are printed. Returns the number of lines. Closes a generator: interrupted,
    it would go on connecting to hosts.
    """
    words, printed = _LineWords(stream, times=times), 0
    board: _LiveTable | _Sentences = _LiveTable(stream) if _is_screen(stream) else _Sentences()
    # Output that bypasses a table on the same screen would be torn by its next drawing.
    notices = stream if _is_screen(stream) and _is_screen(console.err) else console.err
    try:
        for event in events:
            with board.whole():
                if isinstance(event, Notice):
                    console.warn(event.text, notices)
                elif isinstance(event, Bars):
                    board.show(Bars(tuple(line for line in event.lines if show(line))))
                elif isinstance(event, (RunProgress, Silence, Standstill)):
                    board.show(event)
                else:
                    board.lines_come()
                    if isinstance(event, Ending):
                        board.close()
                        for line in event.folded:
                            console.say(line)
                    lines = event.lines if isinstance(event, Ending) else event
                    shown = [words.of(line) for line in lines if show(line)]
                    _print_lines("".join(shown), stream)
                    printed += len(shown)
                    if isinstance(event, Ending):
                        ended(event.record)
    finally:
        board.close()
        if isinstance(events, Generator):
            events.close()
    return printed


def _print_lines(text: str, stream: Console) -> None:
    """A single raw segment: layout of each line would cost ten times as much."""
    if text:
        stream.print(Segments([Segment(text)]), end="")


@contextlib.contextmanager
def ctrl_c_waits() -> Iterator[None]:
    """Delays a Ctrl-C until the block ends."""
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
    def __init__(self, stream: Console, *, times: bool) -> None:
        self._coloured, self._times = stream.color_system is not None and not stream.no_color, times
        self._frames: dict[tuple[str, int, str], tuple[str, str]] = {}

    def of(self, line: LogLine) -> str:
        node, rank, stream, text, wall = line
        before, after = self._frames.get((node, rank, stream)) or self._frame(node, rank, stream)
        return f"{local_second(wall):19} {before}{text}{after}" if self._times else f"{before}{text}{after}"

    def _frame(self, node: str, rank: int, stream: str) -> tuple[str, str]:
        prefix, after = _prefix(LogLine(node, rank, stream, "")), "\n"
        if self._coloured:
            colour = Style.parse(_RANK_COLOURS[rank % len(_RANK_COLOURS)])
            prefix = colour.render(prefix, color_system=ColorSystem.STANDARD)
            if stream == "stderr":
                prefix, after = f"{prefix}\x1b[2m", "\x1b[0m\n"
        self._frames[node, rank, stream] = prefix, after
        return prefix, after


def _is_screen(stream: Console) -> bool:
    """FORCE_COLOR makes rich treat a pipe as a terminal."""
    return stream.is_interactive and stream.file.isatty()


class _LiveTable:
    """Below the lines on a terminal; redrawn with each event."""

    def __init__(self, stream: Console) -> None:
        self._stream = stream
        self._live: Live | None = None
        self._shown: dict[type, Shown] = {}

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Wraps each drawing, so that a Ctrl-C does not tear it."""
        return ctrl_c_waits()

    def lines_come(self) -> None:
        if self._shown.pop(Silence, None):
            self._draw()

    def show(self, event: Shown) -> None:
        if not isinstance(event, Silence):
            self._shown.pop(Silence, None)
        self._shown[type(event)] = event
        self._draw()

    def close(self) -> None:
        if self._live:
            self._shown = {kind: event for kind, event in self._shown.items() if kind is RunProgress}
            self._draw()  # redrawn lines have come as lines
            self._live.stop()
            self._live, self._shown = None, {}

    def _draw(self) -> None:
        if self._live is None:
            self._live = Live(
                console=self._stream,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=_is_screen(console.err),
            )
            self._live.start()
        # Laid out once: each printed line redraws the table below it.
        parts = Group(
            *(part for kind in (Silence, Standstill, RunProgress, Bars) for part in self._parts(self._shown.get(kind)))
        )
        lines = self._stream.render_lines(parts, pad=False) if parts.renderables else []
        self._live.update(SegmentLines(lines, new_lines=True), refresh=True)

    def _parts(self, event: Shown | None) -> Iterator[Table | Text]:
        width = self._stream.width
        if isinstance(event, Silence):
            yield Text(silence_words(event), "dim", no_wrap=True, overflow="ellipsis")
        elif isinstance(event, Standstill) and event.words:
            yield console.plain(event.words, "red" if event.is_alarm else "dim")
        elif isinstance(event, RunProgress):
            yield progress_table(event, width)
            if event.elapsed_s is not None:
                yield Text(time_words(event), "dim", no_wrap=True, overflow="ellipsis")
        elif isinstance(event, Bars):
            for line in event.lines[:BARS_SHOWN]:
                colour = _RANK_COLOURS[line.rank % len(_RANK_COLOURS)]
                text = Text.assemble((_prefix(line), colour), console.plain(line.text.strip()))
                text.no_wrap, text.overflow = True, "ellipsis"
                yield text
            if more := event.lines[BARS_SHOWN:]:
                yield Text(f"and {len(more)} more progress bars", "dim")


class _Sentences:
    """Without a screen: one line per host and progress bar, seldom, and the last state at the end."""

    def __init__(self) -> None:
        self._due: float | None = None
        self._latest: dict[type, Shown] = {}

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """A pipe without a reader must not delay a Ctrl-C."""
        return contextlib.nullcontext()

    def lines_come(self) -> None:
        self._latest.pop(Silence, None)

    def show(self, event: Shown) -> None:
        if isinstance(event, Standstill):
            if event.words and not event.is_alarm:  # an alarm comes as a notice
                console.say(event.words)
            return
        if isinstance(event, RunProgress) and event.still_s:
            return  # its lines have come before
        now = time.monotonic()
        self._latest[type(event)] = event
        if self._due is None:
            self._due = now + PROGRESS_LINE_S
        elif now >= self._due:
            self._due = now + PROGRESS_LINE_S
            self._say()

    def close(self) -> None:
        """Redrawn lines have come as lines."""
        self._latest = {kind: event for kind, event in self._latest.items() if kind is RunProgress}
        self._say()

    def _say(self) -> None:
        latest, self._latest = self._latest, {}
        for event in latest.values():
            if isinstance(event, RunProgress):
                for line in progress_lines(event):
                    console.say(line)
            elif isinstance(event, Bars):
                for bar in event.lines[:BARS_SHOWN]:
                    console.say(f"{_prefix(bar)}{bar.text.strip()}")
            elif isinstance(event, Silence) and event.elapsed_s < STARTING_S:
                console.say(silence_words(event))


def _prefix(line: LogLine) -> str:
    return f"[{one_line(line.node)} {line.rank}] "


# Progress of a run as a small table, or in sentences without a screen.

STARTING_S = 60.0
"""Until then silence is normal: torch is loaded."""


def silence_words(silence: Silence) -> str:
    """`2 ranks are starting (12 s)`."""
    ranks = "1 rank is" if silence.ranks == 1 else f"{silence.ranks} ranks are"
    if silence.elapsed_s < STARTING_S:
        return f"{ranks} starting ({silence.elapsed_s:.0f} s)"
    return f"no line and no metric from any rank so far ({clock(silence.elapsed_s)})"


def time_words(progress: RunProgress) -> str:
    """`running 1:02, about 4:10 left`, or `running 1:02, no step for 0:25`."""
    left = progress.left_s
    if progress.still_s:
        return f"running {clock(progress.elapsed_s or 0)}, no step for {clock(progress.still_s)}"
    return f"running {clock(progress.elapsed_s or 0)}" + (f", about {clock(left)} left" if left is not None else "")


def progress_table(progress: RunProgress, width: int) -> Table:
    """At most `width` columns; names are cut before figures."""
    rows = [*progress.rows, *([progress.together] if progress.together else [])]
    columns, figures = ["step", "samples/s", "loss", "sync", "wait"], [_progress_cells(row) for row in rows]

    def taken() -> int:
        return sum(2 + max(map(len, column)) for column in zip(columns, *figures, strict=True))

    for index in (2, 0):  # a loss of fifteen digits is useless
        if taken() + LEAST_NAME > width:
            del columns[index]
            figures = [cells[:index] + cells[index + 1 :] for cells in figures]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("node", no_wrap=True, max_width=max(LEAST_NAME, width - taken()))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row, cells in zip(rows, figures, strict=True):
        table.add_row(Text(one_line(row.node)), *map(Text, cells))
    return table


def _progress_cells(row: HostRow) -> tuple[str, ...]:
    shares = percent(row.sync_share), percent(row.wait_share)
    return (_of_steps(row), figure(row.samples_per_s), figure(row.loss), *shares)


def progress_lines(progress: RunProgress) -> list[str]:
    """A sentence per host; for a pipeline another for all hosts together."""
    if not progress.together:
        return [progress_words(row) for row in progress.rows]
    step, speed, loss, *_ = _progress_cells(progress.together)
    return [*map(_stage_words, progress.rows), f"{progress.together.node}: step {step}, {speed} samples/s, loss {loss}"]


def progress_words(row: HostRow) -> str:
    """`a2000: step 120/938, 333 samples/s, loss 0.312, sync 20 %, wait 41 %`."""
    step, speed, loss, sync, wait = _progress_cells(row)
    return f"{row.node}: step {step}, {speed} samples/s, loss {loss}, sync {sync}, wait {wait}"


def _stage_words(row: HostRow) -> str:
    step, _, _, sync, wait = _progress_cells(row)
    return f"{row.node}: step {step}, sync {sync}, wait {wait}"


def _of_steps(row: HostRow) -> str:
    return f"{row.step}/{row.steps}" if row.steps else str(row.step)
