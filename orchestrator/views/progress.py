"""How a run goes at this moment: as a small table, and in sentences where there is no screen."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from orchestrator.jobs.live import HostRow, RunProgress, Silence
from orchestrator.text import one_line
from orchestrator.views.figures import clock, figure, percent
from orchestrator.views.tables import LEAST_NAME

STARTING_S = 60.0
"""So long it is no wonder that nothing is printed: torch is loaded."""


def silence_words(silence: Silence) -> str:
    """`2 ranks are starting (12 s)`."""
    ranks = "1 rank is" if silence.ranks == 1 else f"{silence.ranks} ranks are"
    if silence.elapsed_s < STARTING_S:
        return f"{ranks} starting ({silence.elapsed_s:.0f} s)"
    return f"no line and no metric from any rank so far ({clock(silence.elapsed_s)})"


def time_words(progress: RunProgress) -> str:
    """`running 1:02, about 4:10 left`."""
    left = progress.left_s
    return f"running {clock(progress.elapsed_s or 0)}" + (f", about {clock(left)} left" if left is not None else "")


def progress_table(progress: RunProgress, width: int) -> Table:
    """At most `width` columns wide and one line a host; where it is narrow, names are cut before figures."""
    rows = [*progress.rows, *([progress.together] if progress.together else [])]
    columns, figures = ["step", "samples/s", "loss", "sync", "wait"], [_progress_cells(row) for row in rows]

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
    for row, cells in zip(rows, figures, strict=True):
        table.add_row(Text(one_line(row.node)), *map(Text, cells))
    return table


def _progress_cells(row: HostRow) -> tuple[str, ...]:
    shares = percent(row.sync_share), percent(row.wait_share)
    return (_of_steps(row), figure(row.samples_per_s), figure(row.loss), *shares)


def progress_lines(progress: RunProgress) -> list[str]:
    """A sentence for each host; of a pipeline one more, with the speed and the loss that its hosts have together."""
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
