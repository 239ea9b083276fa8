"""The time line of a pipeline's step as it is drawn: places, and what happens where bars become hairs."""

import re

from orchestrator.results import Bar, Message, Timeline, TimelineLane
from orchestrator.views import LARGER, NARROW, draw_timeline


def lane(stage, bars, **more):
    fields = {
        "rank": stage,
        "node": f"host{stage}",
        "pipeline": 0,
        "stage": stage,
        "first_block": 0,
        "last_block": 3,
        "begin_ms": 0.0,
    }
    return TimelineLane(
        **{**fields, **more}, bars=tuple(Bar(task=t, number=n, begin_ms=a, end_ms=b) for t, n, a, b in bars)
    )


def line(lanes, messages=(), **more):
    return Timeline(step=3, within_ms=0.25, lanes=tuple(lanes), messages=tuple(messages), **more)


def spans(path):
    return [(float(left), float(width)) for left, width in re.findall(r"M([\d.]+) \d+h([\d.]+)", path)]


TWO = line(
    [
        lane(0, [("forward", 0, 0, 10), ("backward", 0, 30, 50), ("optimiser", None, 90, 100)]),
        lane(1, [("forward", 0, 12, 20), ("backward", 0, 20, 28)]),
    ],
    [
        Message(source=0, target=1, task="forward", number=0, sent_ms=10, came_ms=12),
        Message(source=1, target=0, task="backward", number=0, sent_ms=28, came_ms=30),
    ],
)


def test_bars_lie_where_and_as_long_as_they_lasted():
    drawing = draw_timeline(TWO)
    (panel,) = drawing.panels
    first, second = panel.lanes
    assert {task: spans(path) for task, path in first.paths} == {
        "forward": [(0, 99.4)],
        "backward": [(300, 199.4)],
        "optimiser": [(900, 99.4)],
    }
    assert [(label.place, label.text) for label in second.labels] == [(160, "1"), (240, "1")]
    assert first.top + panel.bar < second.top < panel.height
    assert [tick.text for tick in panel.ticks][:2] == ["0 ms", "50 ms"]
    assert (drawing.step, drawing.within) == (4, "0.25")


def test_only_the_kinds_that_there_are_have_a_key():
    assert [kind for kind, _ in draw_timeline(TWO).kinds] == ["forward", "backward", "optimiser", "idle"]


def test_a_message_leaves_at_the_edge_of_the_one_row_and_comes_to_the_edge_of_the_other():
    (panel,) = draw_timeline(TWO).panels
    (down_task, down), (up_task, up) = panel.sent
    top, bottom = panel.lanes[0].top + panel.bar, panel.lanes[1].top
    assert (down_task, down) == ("forward", f"M100.00 {top}L120.00 {bottom}")
    assert (up_task, up) == ("backward", f"M280.00 {bottom}L300.00 {top}")


def test_many_micro_batches_are_shown_as_a_whole_and_larger_at_either_end():
    bars = [("forward" if n % 2 else "backward", n // 2, n * 1.0, n + 0.9) for n in range(600)]
    drawing = draw_timeline(line([lane(0, bars), lane(1, bars)]))
    whole, begin, end = drawing.panels
    assert [panel.title for panel in drawing.panels] == ["", "as it fills", "as it drains"]
    assert NARROW * 599.9 / 1000 > 0.9
    for panel in (begin, end):
        widths = [width for _, path in panel.lanes[0].paths for _, width in spans(path)]
        assert max(widths) >= LARGER - 1
        assert panel.lanes[0].labels
        assert all(
            0 <= left <= 1000 and left + width <= 1000.5 for _, p in panel.lanes[0].paths for left, width in spans(p)
        )
    assert not whole.lanes[0].labels


def test_bars_that_are_hairs_are_drawn_as_one_where_they_touch():
    bars = [("forward", n, n * 1.0, n + 1.0) for n in range(5000)]
    whole = draw_timeline(line([lane(0, bars)])).panels[0]
    assert len(spans(dict(whole.lanes[0].paths)["forward"])) == 1


def test_lanes_and_pipelines_are_told_apart():
    bars = [("forward", 0, 0, 1)]
    shared = draw_timeline(line([lane(0, bars), lane(0, bars, rank=1), lane(1, bars, rank=2)])).panels[0]
    assert [one.title for one in shared.lanes] == [
        "stage 1 · host0, rank 0 · blocks 0–3",
        "stage 1 · host0, rank 1 · blocks 0–3",
        "stage 2 · host1 · blocks 0–3",
    ]
    beside = draw_timeline(line([lane(0, bars), lane(0, bars, rank=1, pipeline=1)])).panels[0]
    assert [one.title[:9] for one in beside.lanes] == ["stage 1.1", "stage 2.1"]


def test_a_step_that_takes_no_time_is_not_drawn():
    assert draw_timeline(line([lane(0, [("forward", 0, 0, 0)])])) is None
    assert draw_timeline(line([lane(0, [])])) is None
