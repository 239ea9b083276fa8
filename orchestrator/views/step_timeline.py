"""Drawing of one pipeline step for the report: positions in SVGs 1000 wide. Pure.

    drawing = draw_timeline(load_timeline(run.timeline))
    drawing.panels[0].lanes[0].paths            # [("forward", "M0.6 20h12.1v20h-12.1z..."), ...]

If bars are too narrow, two more panels enlarge the filling and draining of the pipeline.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from orchestrator.results.timeline import Bar, Message, Timeline, TimelineLane
from orchestrator.units import format_figure
from trainer.shared.metrics import TASKS

WIDTH = 1000.0
BAR, ABOVE, AXIS = 20, 34, 18
"""Heights: bar, space above it (title, lines between stages), axis."""
NARROW = 5.0
"""If half of the bars are narrower, they are enlarged."""
LARGER = 22.0
"""Minimum width of half of the enlarged bars."""
READABLE, DIGIT = 14.0, 6.0
"""Minimum width of a bar with a number; DIGIT: for a third digit."""
HAIR = 0.6
"""Closer bars of one kind are joined."""
WORDS = ("forward", "backward", "gradients of weights", "sum of gradients", "optimiser")


@dataclass(frozen=True)
class Tick:
    place: float
    text: str


@dataclass(frozen=True)
class DrawnLane:
    title: str
    top: int
    idle: tuple[float, float]
    """Left and width of its step."""
    paths: tuple[tuple[str, str], ...]
    """Task, SVG path."""
    labels: tuple[Tick, ...]


@dataclass(frozen=True)
class Panel:
    title: str
    height: int
    bar: int
    lanes: tuple[DrawnLane, ...]
    sent: tuple[tuple[str, str], ...]
    """Task, SVG path of its messages."""
    stroke: float
    ticks: tuple[Tick, ...]


@dataclass(frozen=True)
class TimelineDrawing:
    step: int
    """From 1."""
    panels: tuple[Panel, ...]
    kinds: tuple[tuple[str, str], ...]
    """Kinds of bars, and idle time."""
    within: str
    left_out: int


def draw_timeline(line: Timeline) -> TimelineDrawing | None:
    """None if empty."""
    bars = [bar for lane in line.lanes for bar in lane.bars]
    last_ms = max((bar.end_ms for bar in bars), default=0.0)
    if last_ms <= 0:
        return None
    return TimelineDrawing(
        step=line.step + 1,
        panels=tuple(_panel(line, *part) for part in _parts(line.lanes, last_ms)),
        kinds=(*((task, words) for task, words in _kinds(bars, last_ms / WIDTH)), ("idle", "idle")),
        within=format_figure(line.within_ms),
        left_out=line.left_out,
    )


def _kinds(bars: Iterable[Bar], least_ms: float) -> Iterator[tuple[str, str]]:
    """Without invisibly short ones."""
    there = {bar.task for bar in bars if bar.end_ms - bar.begin_ms > least_ms}
    return ((task, words) for task, words in zip(TASKS, WORDS, strict=True) if task in there)


def _parts(lanes: Sequence[TimelineLane], last_ms: float) -> Iterator[tuple[str, float, float]]:
    """Title, begin and end of each panel."""
    yield "", 0.0, last_ms
    of_micro_batches = [[bar for bar in lane.bars if bar.number is not None] for lane in lanes]
    usual_ms = statistics.median([bar.end_ms - bar.begin_ms for bars in of_micro_batches for bar in bars] or [0.0])
    part_ms = usual_ms * WIDTH / LARGER
    if usual_ms * WIDTH / last_ms >= NARROW or not 0 < part_ms < last_ms:
        return
    filled_ms = max(min(bar.begin_ms for bar in bars) for bars in of_micro_batches if bars)
    drained_ms = max(bar.end_ms for bars in of_micro_batches for bar in bars)
    fills_ms = min(max(0.0, filled_ms - part_ms / 3), last_ms - part_ms)
    yield "as it fills", fills_ms, fills_ms + part_ms
    drains_ms = max(0.0, min(drained_ms + part_ms / 20, last_ms) - part_ms)
    yield "as it drains", drains_ms, drains_ms + part_ms


def _panel(line: Timeline, title: str, from_ms: float, to_ms: float) -> Panel:
    scale = WIDTH / (to_ms - from_ms)

    def across(ms: float) -> float:
        return (ms - from_ms) * scale

    tops = {lane.rank: ABOVE - 14 + number * (BAR + ABOVE) for number, lane in enumerate(line.lanes)}
    titles = _titles(line.lanes)
    shown = [one for one in line.messages if one.came_ms > from_ms and one.sent_ms < to_ms]
    return Panel(
        title=title,
        height=len(line.lanes) * (BAR + ABOVE) - 14 + AXIS,
        bar=BAR,
        lanes=tuple(_lane(lane, titles[lane.rank], tops[lane.rank], from_ms, scale) for lane in line.lanes),
        sent=tuple(_sent([one for one in shown if one.task == task], task, tops, from_ms, scale) for task in TASKS[:2]),
        stroke=1.0 if len(shown) <= 100 else 0.5,
        ticks=tuple(Tick(across(ms), f"{text} ms") for ms, text in _marks(from_ms, to_ms - 0.04 * (to_ms - from_ms))),
    )


def _marks(from_ms: float, to_ms: float) -> Iterator[tuple[float, str]]:
    from matplotlib.ticker import MaxNLocator

    values = MaxNLocator(4, steps=[1, 2, 5, 10]).tick_values(from_ms, to_ms)
    digits = max(0, -math.floor(math.log10(values[1] - values[0]) + 1e-9))
    return ((ms, f"{ms:,.{digits}f}") for ms in values if from_ms <= ms <= to_ms)


def _titles(lanes: Sequence[TimelineLane]) -> dict[int, str]:
    several = lanes[-1].pipeline > 0
    hosts = [lane.node for lane in lanes]
    found = {}
    for lane in lanes:
        number = f"{lane.pipeline + 1}.{lane.stage + 1}" if several else str(lane.stage + 1)
        rank = f", rank {lane.rank}" if hosts.count(lane.node) > 1 else ""
        found[lane.rank] = f"stage {number} · {lane.node}{rank} · blocks {lane.first_block}–{lane.last_block}"
    return found


def _lane(lane: TimelineLane, title: str, top: int, from_ms: float, scale: float) -> DrawnLane:
    def within(begin_ms: float, end_ms: float) -> tuple[float, float]:
        left = min(WIDTH, max(0.0, (begin_ms - from_ms) * scale))
        return left, max(left, min(WIDTH, (end_ms - from_ms) * scale))

    boxes = [(bar, *within(bar.begin_ms, bar.end_ms)) for bar in lane.bars]
    boxes = [box for box in boxes if box[1] < WIDTH and box[2] > 0]
    left, right = within(lane.begin_ms, max((bar.end_ms for bar in lane.bars), default=lane.begin_ms))
    paths = ((task, _path([box[1:] for box in boxes if box[0].task == task], top)) for task in TASKS)
    labels = (
        Tick((left + right) / 2, str(bar.number + 1))
        for bar, left, right in boxes
        if bar.number is not None and right - left >= READABLE + DIGIT * (bar.number >= 99)
    )
    return DrawnLane(
        title, top, (left, right - left), tuple((task, path) for task, path in paths if path), tuple(labels)
    )


def _path(spans: Iterable[tuple[float, float]], top: int) -> str:
    """Rectangles, with a gap if wide enough."""
    joined: list[tuple[float, float]] = []
    for left, right in spans:
        if joined and right - left < 3 and left - joined[-1][1] < HAIR:
            joined[-1] = joined[-1][0], right
        else:
            joined.append((left, right - (HAIR if right - left >= 3 else 0)))
    widths = ((left, max(right - left, 0.2)) for left, right in joined)
    return "".join(f"M{left:.2f} {top}h{width:.2f}v{BAR}h-{width:.2f}z" for left, width in widths)


def _sent(
    messages: Iterable[Message], task: str, tops: dict[int, int], from_ms: float, scale: float
) -> tuple[str, str]:
    """Lines between the ranks' rows."""
    path = ""
    for one in messages:
        down = tops[one.target] > tops[one.source]
        begin = (one.sent_ms - from_ms) * scale, tops[one.source] + BAR * down
        end = (one.came_ms - from_ms) * scale, tops[one.target] + BAR * (not down)
        path += f"M{begin[0]:.2f} {begin[1]}L{end[0]:.2f} {end[1]}"
    return task, path
