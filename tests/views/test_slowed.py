"""GPUs whose clocks were held down: what readings come to, how the report draws them, where it is said."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.results import read_gpu_use
from orchestrator.results.analyse import analyse
from orchestrator.views import MARKED, PALETTE, POINTS, GpuCourse, gpu_charts, host_tables, read_course, write_report
from orchestrator.views import MOST_LINES as HOSTS
from tests.support.run_folders import Host, lines, start, step, two_hosts, write_run

CAP, HEAT, HARDWARE, IDLE, OWN_CLOCKS = 0x4, 0x20, 0x8, 0x1, 0x2


def reading(second, mhz=1800, slowed_by=0, rank=0, **fields):
    values = {
        "event": "gpu",
        "rank": rank,
        "index": 0,
        "utilisation": 97,
        "memory_bytes": 2**30,
        "wall": 1.8e9 + second,
    }
    return {**values, "sm_mhz": mhz, "watts": 65.5, "celsius": 70, "slowed_by": slowed_by, **fields}


def limits(second=0, **fields):
    return reading(second, max_sm_mhz=2100, limit_watts=70.0, **fields)


def capped(of, slowed, mhz=1290, **fields):
    """So many readings, the last of them at a power cap."""
    return [limits(**fields)] + [
        reading(2 * n, mhz if n >= of - slowed else 1800, CAP if n >= of - slowed else 0, **fields)
        for n in range(1, of)
    ]


def found(tmp_path, events):
    path = tmp_path / "gpu.jsonl"
    path.write_bytes(lines(events))
    return read_gpu_use(path).slowed


def test_a_power_cap_is_shown_with_its_share_and_what_it_cost(tmp_path):
    slowed = found(tmp_path, capped(100, 43))
    assert slowed.words == "slowed by its power cap of 70 W for 43 % of the run: 1,290 instead of 1,800 MHz"


def test_where_it_never_ran_free_the_cards_own_clock_is_named(tmp_path):
    events = [limits(slowed_by=CAP, mhz=1290), *(reading(n, 1290, CAP) for n in range(1, 9))]
    assert found(tmp_path, events).words == (
        "slowed by its power cap of 70 W for 100 % of the run: 1,290 MHz of at most 2,100"
    )
    assert found(tmp_path, events[1:]).words == "slowed by its power cap for 100 % of the run: 1,290 MHz"


@pytest.mark.parametrize(
    ("bits", "by"),
    [
        (HEAT, "heat"),
        (HARDWARE | 0x40, "heat"),
        (HARDWARE | 0x80, "the power brake of its host"),
        (HARDWARE, "its hardware's own protection"),
        (CAP | IDLE | OWN_CLOCKS, "its power cap"),
    ],
)
def test_the_reason_that_is_given_is_the_one_behind_it(tmp_path, bits, by):
    slowed = found(tmp_path, [reading(0), *(reading(n, 900, bits) for n in range(1, 10))])
    assert slowed.words == f"slowed by {by} for 90 % of the run: 900 instead of 1,800 MHz"


@pytest.mark.parametrize(
    "events",
    [
        [],
        [reading(n) for n in range(9)],
        [reading(n, 300, IDLE, utilisation=0) for n in range(9)],
        [reading(n, 1200, OWN_CLOCKS) for n in range(9)],
        capped(100, 4),
        capped(100, 90, mhz=1780),
        [reading(n, slowed_by=None) for n in range(9)],
        [reading(n, slowed_by=2**70) for n in range(9)],
        [reading(n, slowed_by=4.5) for n in range(9)],
    ],
    ids=["none", "free", "idle", "set so", "for a moment", "hardly", "not reported", "no mask", "no bits"],
)
def test_what_holds_nobody_up_is_not_spoken_of(tmp_path, events):
    assert found(tmp_path, events) is None


def test_what_it_runs_at_while_idle_is_not_what_it_could(tmp_path):
    idle = [reading(n, 300, utilisation=0) for n in range(50)]
    assert found(tmp_path, [*idle, *capped(100, 43)]).instead_mhz == 1800


def test_of_several_gpus_the_one_that_was_slowed_longest_is_named(tmp_path):
    assert found(tmp_path, [*capped(100, 20, rank=3), *capped(100, 60, rank=4), *capped(9, 0, rank=5)]).rank == 4


def test_two_gpus_of_one_rank_are_not_taken_for_one(tmp_path):
    both = [each for pair in zip(capped(100, 0), capped(100, 90, index=1), strict=True) for each in pair]
    slowed = found(tmp_path, both)
    assert (slowed.rank, slowed.share) == (0, 0.9)


# ---- drawn -----------------------------------------------------------------------------------------------------


def course_of(tmp_path, events, name="gpu.jsonl") -> GpuCourse:
    (tmp_path / name).write_bytes(lines(events))
    return read_course(tmp_path / name)


@given(seconds=st.lists(st.floats(0, 1e8), min_size=2, max_size=40))
def test_a_line_has_no_more_points_than_can_be_seen(seconds):
    course, previous = GpuCourse(), 0.0
    for second in sorted(seconds):
        course.add(Sample(second))
    points = list(course.points("watts"))
    assert 1 <= len(points) <= 2 * POINTS
    for second, watts, slowed in points:
        assert second >= previous and watts == pytest.approx(50) and slowed
        previous = second


class Sample:
    rank, utilisation, sm_mhz, watts, celsius, slowed_by = 0, None, None, 50.0, None, CAP

    def __init__(self, wall):
        self.wall = wall


def test_each_host_is_a_line_and_its_slow_stretches_are_marked(tmp_path):
    slow = [reading(2 * n, 1200, CAP if 3 <= n < 6 else 0) for n in range(10)]
    free = [reading(2 * n, 1800) for n in range(10)]
    drawn = gpu_charts({"a2000": course_of(tmp_path, slow), "v100": course_of(tmp_path, free), "cpu": GpuCourse()})
    assert [chart.title for chart in drawn.charts] == ["GPU use, %", "SM clock, MHz", "power, W", "temperature, °C"]
    assert (drawn.hosts, drawn.unit, drawn.of) == (("a2000", "v100"), "seconds", 2)
    clock = drawn.charts[1]
    first, second = clock.lines
    assert [[x for x, _ in run] for run in first.marked] == [[6, 8, 10]]
    assert second.marked == ()


def test_what_a_driver_does_not_report_has_no_chart(tmp_path):
    readings = [reading(2 * n, None, None, watts=None) for n in range(9)]
    assert [chart.title for chart in gpu_charts({"a": course_of(tmp_path, readings)}).charts] == [
        "GPU use, %",
        "temperature, °C",
    ]


def test_of_many_hosts_those_that_were_slowed_are_drawn(tmp_path):
    free, slow = course_of(tmp_path, capped(99, 0)), course_of(tmp_path, capped(99, 50))
    drawn = gpu_charts({**{f"h{n}": free for n in range(20)}, "slow": slow})
    assert (len(drawn.hosts), drawn.of) == (HOSTS, 21)
    assert "slow" in drawn.hosts


def test_a_clock_that_was_set_spoils_no_line(tmp_path):
    readings = [reading(0), reading(2), reading(-500_000), reading(1e12), reading(4, wall="soon"), reading(6)]
    assert [second for second, _, _ in course_of(tmp_path, readings).points("watts")] == [0, 2, 6]


# ---- said ------------------------------------------------------------------------------------------------------


def slow_a2000(tmp_path: Path):
    """The straggler's GPU stands at its power cap; v100 has two GPUs, one of them too hot for a while."""
    hot = [reading(2 * n, 900 if n > 50 else 1500, HEAT if n > 50 else 0, rank=2) for n in range(100)]
    return two_hosts(tmp_path / "run", gpu={"a2000": capped(100, 43), "v100": hot})


SLOW = "a2000 was slowed by its power cap of 70 W for 43 % of the run: 1,290 instead of 1,800 MHz"
HOT = "v100, rank 2, was slowed by heat for 49 % of the run: 900 instead of 1,500 MHz"


def test_report_and_terminal_name_slowed_gpus_the_stragglers_beside_it(tmp_path, capsys):
    run = slow_a2000(tmp_path)
    summary = analyse(run)
    assert summary.straggler.node == "a2000"
    page = write_report(run, summary).read_text()
    assert page.count(SLOW) == page.count(HOT) == 1
    beside, later = page.index("<h2>Where a step"), page.index("What the GPUs did")
    assert beside < page.index(SLOW) < later < page.index(HOT)
    drawings = re.findall(r'<svg viewBox="0 0 420.*?</svg>', page, re.DOTALL)
    assert len(drawings) == 9  # and the loss, over updates, seconds and samples
    assert MARKED in drawings[3] and PALETTE[1] in drawings[3]
    host_tables.print_summary(summary)
    said = capsys.readouterr().out
    assert said.index("waited for a2000") < said.index(SLOW) < said.index(HOT)


def test_a_script_without_metrics_has_its_gpus_drawn_too(tmp_path):
    run = write_run(tmp_path / "run", [Host("a2000")], {}, kind="script", settings={}, gpu={"a2000": capped(100, 43)})
    page = write_report(run, analyse(run)).read_text()
    assert page.count(SLOW) == 1 and page.count("<svg") == 4


def test_without_readings_there_is_nothing_to_see(tmp_path):
    run = write_run(tmp_path / "run", [Host("a2000")], {0: [start(), step(0, 1, 1, 1, 1, 1)]})
    page = write_report(run, analyse(run)).read_text()
    assert "What the GPUs did" not in page and "slowed" not in page.partition("<body>")[2]
