"""One step of a pipeline on one clock: how the ranks' clocks are aligned, and what is read of their marks."""

import itertools
import random

import pytest

from orchestrator.planning import LaunchPlan
from orchestrator.results import align, load_timeline, read_places
from orchestrator.results.analyse import analyse
from orchestrator.results.timeline import timeline
from orchestrator.views import print_summary, write_report
from tests.support.run_folders import Host, end, start, step, write_run
from trainer.shared import LARGEST, MOST_TASKS

SETTINGS = {"strategy": "pipeline", "batch": 64, "warmup_steps": 0, "stages": ""}
USED = {"stages": "v100:0-36,a2000:37-51", "warmup_steps": 0}


# ---- clocks ---------------------------------------------------------------------------------------------------------


def test_the_middle_between_the_fastest_messages_either_way():
    clocks = align({(0, 1): 3.0, (1, 0): -1.0}, [0, 1])
    assert (clocks.offsets_ms, clocks.within_ms) == ({0: 0.0, 1: 2.0}, 1.0)


@pytest.mark.parametrize("seed", range(20))
def test_no_bound_is_broken_and_true_offsets_are_within_what_is_said(seed):
    chance = random.Random(seed)
    ranks = list(range(chance.randint(2, 6)))
    true = {rank: chance.uniform(-1e6, 1e6) * (rank > 0) for rank in ranks}
    pairs = list(itertools.permutations(ranks, 2)) if seed % 2 else [*itertools.pairwise(ranks)]
    pairs += [(b, a) for a, b in pairs]
    bounds = {(a, b): true[b] - true[a] + chance.uniform(0, 5) for a, b in pairs}
    clocks = align(bounds, ranks)
    for rank in ranks:
        assert abs(clocks.offsets_ms[rank] - true[rank]) <= clocks.within_ms + 1e-6
    for (a, b), most in bounds.items():
        assert clocks.offsets_ms[b] - clocks.offsets_ms[a] <= most + 1e-6


def test_a_small_contradiction_is_put_up_with_and_a_large_one_is_not():
    assert align({(0, 1): 1.0, (1, 0): -1.05}, [0, 1]).offsets_ms[1] == pytest.approx(1.025)
    assert align({(0, 1): 1.0, (1, 0): -100.0}, [0, 1]) is None


def test_messages_one_way_say_nothing():
    assert align({(0, 1): 1.0}, [0, 1]) is None
    assert align({(0, 1): 1.0, (1, 0): 1.0}, [0, 1, 2]) is None


# ---- a run ----------------------------------------------------------------------------------------------------------

# Two stages, the second begins its step, and its clock, 8 ms after the first; a message takes 2 ms.
FIRST = [
    ["forward", 0, 0.0, 10.0, None, 9.0],
    ["forward", 1, 10.0, 20.0, None, 19.0],
    ["backward", 0, 27.0, 37.0, 26.0, None],
    ["weights", 0, 37.0, 40.0, None, None],
    ["backward", 1, 40.0, 50.0, 38.0, None],
    ["weights", 1, 50.0, 53.0, None, None],
    ["sum", None, 53.0, 53.0, None, None],
    ["optimiser", None, 53.0, 55.0, None, None],
]
SECOND = [
    ["forward", 0, 3.0, 8.0, 3.0, None],
    ["backward", 0, 8.0, 17.0, None, 16.0],
    ["forward", 1, 17.0, 22.0, 13.0, None],
    ["backward", 1, 22.0, 32.0, None, 28.0],
]


def ranks(first=FIRST, second=SECOND, **more):
    """Their records. Rank 0, the second stage, computes 30 of 60 ms and waits 25; rank 1 computes 50 and waits 7."""
    later = step(0, 0, 1, 30, 26, 3, bubble_before_ms=25.0, bubble_behind_ms=0.0, wire_ms=4.0)
    entry = step(0, 64, 1, 50, 7.5, 1.5, bubble_before_ms=0.0, bubble_behind_ms=7.0, wire_ms=5.0)
    groups = {"batch_per_rank": 64, "settings": USED}
    return {
        0: [
            start(rank=0, work=0.3, batch_norm_groups=None, **groups),
            later,
            {"event": "tasks", "step": 0, "tasks": second, "left_out": 0, **more},
            end(),
        ],
        1: [
            start(rank=1, work=0.7, batch_norm_groups=[[32, 2]], **groups),
            entry,
            {"event": "tasks", "step": 0, "tasks": first, "left_out": 0, **more},
            end(),
        ],
    }


def run_of(tmp_path, lines, settings=SETTINGS):
    return write_run(tmp_path / "run", [Host("a2000"), Host("v100")], lines, settings=settings)


def test_a_step_is_put_on_one_clock(tmp_path):
    run = run_of(tmp_path, ranks())
    analyse(run)
    found = load_timeline(run.timeline)
    assert (found.step, found.within_ms) == (0, 2.0)
    assert [(lane.node, lane.stage, lane.first_block, lane.last_block, lane.begin_ms) for lane in found.lanes] == [
        ("v100", 0, 0, 36, 0.0),
        ("a2000", 1, 37, 51, 8.0),
    ]
    assert [(bar.task, bar.number, bar.begin_ms) for bar in found.lanes[1].bars] == [
        ("forward", 0, 11.0), ("backward", 0, 16.0), ("forward", 1, 25.0), ("backward", 1, 30.0),
    ]  # fmt: skip
    assert {(one.source, one.target, one.task, one.number): one.came_ms - one.sent_ms for one in found.messages} == {
        (1, 0, "forward", 0): 2.0,
        (1, 0, "forward", 1): 2.0,
        (0, 1, "backward", 0): 2.0,
        (0, 1, "backward", 1): 2.0,
    }


def test_no_other_clock_gives_another_picture(tmp_path):
    moved = [[*row[:2], *(None if ms is None else ms + 12345.0 for ms in row[2:])] for row in SECOND]
    pictures = []
    for name, second in (("a", SECOND), ("b", moved)):
        run = run_of(tmp_path / name, ranks(second=second))
        analyse(run)
        found = load_timeline(run.timeline)
        zero_ms = found.lanes[0].begin_ms
        bars = [(bar.task, bar.begin_ms - zero_ms, bar.end_ms - zero_ms) for lane in found.lanes for bar in lane.bars]
        pictures.append((bars, found.within_ms, [one.came_ms - one.sent_ms for one in found.messages]))
    assert pictures[0] == pictures[1]


NO_ROWS = [
    ["forward", 0, 5.0, 4.0, None, None],
    ["forward", 0, float("nan"), 4.0, None, None],
    ["forward", 0, 1.0, 2 * LARGEST, None, None],
    ["forward", -1, 1.0, 2.0, None, None],
    ["forward", "0", 1.0, 2.0, None, None],
    ["forward", 0, None, 2.0, None, None],
    ["forward", 0, True, 2.0, None, None],
    ["<script>", 0, 1.0, 2.0, None, None],
    [["forward"], 0, 1.0, 2.0, None, None],
    ["forward", 0, 1.0],
    "forward",
    None,
]


def test_rows_that_no_rank_wrote_are_left_out(tmp_path):
    run = run_of(tmp_path, ranks(second=[*NO_ROWS, *SECOND]))
    analyse(run)
    assert [(bar.task, bar.number) for bar in load_timeline(run.timeline).lanes[1].bars] == [
        (task, number) for task, number, *_ in SECOND
    ]


@pytest.mark.parametrize(
    "more", [{"tasks": "x"}, {"tasks": []}, {"step": None}, {"tasks": [["forward", 0, 1.0, 2.0, None, None]]}]
)
def test_without_marks_of_both_there_is_no_picture_and_an_older_one_goes(tmp_path, more):
    run = run_of(tmp_path, ranks(**more))
    run.timeline.write_text("{}")
    analyse(run)
    assert not run.timeline.exists()


def test_the_latest_step_of_which_all_have_marks_is_shown(tmp_path):
    lines = ranks()
    for rank in (0, 1):
        lines[rank].insert(3, {**lines[rank][2], "step": 10})
    lines[1].insert(4, {**lines[1][2], "step": 100})  # the other rank was killed before
    run = run_of(tmp_path, lines)
    analyse(run)
    assert load_timeline(run.timeline).step == 10


def test_ranks_that_hold_the_same_blocks_are_aligned_by_their_sums(tmp_path):
    """Two pipelines beside each other: no message passes between them."""
    used = {"stages": "a:0-1,b:2-3|c:0-1,d:2-3"}
    hosts = [Host(name) for name in "abcd"]
    run = write_run(tmp_path / "run", hosts, {}, settings=SETTINGS)
    plan = LaunchPlan.model_validate_json(run.plan.read_text())
    places = read_places(plan, {0: {"settings": used}})
    first = [*FIRST[:6], ["sum", None, 53.0, 60.0, None, None]]
    late = [[*row[:2], *(None if ms is None else ms + 500.0 for ms in row[2:])] for row in first]
    found = timeline(0, places, {0: first, 1: SECOND, 2: late, 3: SECOND}, dict(enumerate("abcd")), 0)
    sums = [bar.begin_ms for lane in found.lanes for bar in lane.bars if bar.task == "sum"]
    assert sums[0] == sums[1]
    assert [lane.pipeline for lane in found.lanes] == [0, 0, 1, 1]


def test_no_more_rows_are_read_than_a_rank_writes(tmp_path):
    run = run_of(tmp_path, ranks(first=[*FIRST, *[["weights", 9, 60.0, 61.0, None, None]] * (2 * MOST_TASKS)]))
    analyse(run)
    found = load_timeline(run.timeline)
    assert found is None or len(found.lanes[0].bars) == MOST_TASKS


# ---- stages ---------------------------------------------------------------------------------------------------------


def test_each_stage_says_what_it_computed_and_whom_it_waited_for(tmp_path):
    summary = analyse(run_of(tmp_path, ranks()))
    first, second = summary.stages
    assert (first.node, first.blocks, first.work, first.compute_ms) == ("v100", "0-36", 0.7, 50.0)
    assert (first.bubble_ms, first.waits_for, first.wire_ms) == (7.0, "a2000", 5.0)
    assert (second.node, second.blocks, second.bubble_ms, second.waits_for) == ("a2000", "37-51", 25.0, "v100")
    assert [(node.wait_ms, node.sync_ms) for node in summary.nodes] == [(25.0, 1.0), (7.0, 0.5)]
    assert [node.samples_per_s for node in summary.nodes] == [pytest.approx(19 / 0.06), pytest.approx(45 / 0.06)]


def test_batch_norms_micro_batches_count_once_and_stand_beside_ddps_parts(tmp_path):
    found = analyse(run_of(tmp_path, ranks())).batch_norm
    assert found.groups == ((32, 2),)
    assert found.words == "BatchNorm saw micro-batches of 32 and 32 (with ddp: groups of 32 and 32)"
    assert "sync_bn" not in found.exact_words


def test_the_one_that_others_wait_for_is_named_by_its_blocks(tmp_path):
    straggler = analyse(run_of(tmp_path, steps_of(10))).straggler
    assert (straggler.node, straggler.reason) == (
        "v100",
        "computes 50.0 ms a step for its blocks, a2000 30.0 ms",
    )


def steps_of(count):
    lines = ranks()
    for rank in (0, 1):
        lines[rank][1:2] = [{**lines[rank][1], "step": number} for number in range(count)]
    return lines


def test_records_without_bubbles_are_read_as_they_were(tmp_path):
    """As an older trainer wrote them, and as other strategies do: null."""
    lines = ranks()
    for more in ({}, {"bubble_before_ms": None, "bubble_behind_ms": None, "wire_ms": None}):
        for rank in (0, 1):
            lines[rank][1] = {key: value for key, value in lines[rank][1].items() if "bubble" not in key} | more
        summary = analyse(run_of(tmp_path / str(len(more)), lines))
        assert [(node.wait_ms, node.sync_ms) for node in summary.nodes] == [(18.5, 7.5), (0.0, 7.5)]
        assert [stage.bubble_ms for stage in summary.stages] == [None, None]


@pytest.mark.parametrize("text", ["", "x", None, 3, "v100:0-1,v100:2-3"])
def test_where_no_rank_says_how_the_network_was_cut_nobody_has_a_place(tmp_path, text):
    plan = LaunchPlan.model_validate_json(run_of(tmp_path, {}).plan.read_text())
    assert read_places(plan, {0: {"settings": {"stages": text}}, 1: {}}) == {}


def test_on_one_host_stages_wait_for_ranks(tmp_path):
    lines = ranks()
    for rank in (0, 1):
        lines[rank][0] = {**lines[rank][0], "settings": {**USED, "stages": "1:0-36,0:37-51"}}
    summary = analyse(write_run(tmp_path / "run", [Host("lab", ranks=2)], lines, settings=SETTINGS))
    assert [(one.node, one.name, one.ranks, one.waits_for) for one in summary.stages] == [
        ("lab", "rank 1", (1,), "rank 0"),
        ("lab", "rank 0", (0,), "rank 1"),
    ]


def test_ranks_of_a_host_may_hold_a_stage_each(tmp_path):
    run = write_run(tmp_path / "run", [Host("a16", ranks=2), Host("v100")], {}, settings=SETTINGS)
    plan = LaunchPlan.model_validate_json(run.plan.read_text())
    places = read_places(plan, {0: {"settings": {"stages": "a16:0:0-12,a16:1:13-28,v100:29-51"}}})
    assert [(rank, one.stage, one.name, one.first) for rank, one in places.items()] == [
        (0, 0, "a16:0", 0),
        (1, 1, "a16:1", 13),
        (2, 2, "v100", 29),
    ]


def test_the_page_has_a_row_for_each_stage_and_draws_the_step(tmp_path):
    run = run_of(tmp_path, ranks())
    page = write_report(run, analyse(run)).read_text()
    assert "<td>0–36</td>" in page
    assert "stage 2 · a2000 · blocks 37–51" in page
    assert page.count('<svg viewBox="0 0 1000') == 1
    assert "agree to within 2.00 ms" in page
    assert "(asked: )" not in page
    run.timeline.unlink()
    assert '<svg viewBox="0 0 1000' not in write_report(run, analyse_without_marks(run)).read_text()


def analyse_without_marks(run):
    """As an older trainer left the folder."""
    for node, rank in (("a2000", 0), ("v100", 1)):
        path = run.metrics(node, rank)
        path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if '"tasks"' not in line))
    return analyse(run)


def test_the_terminal_has_a_row_for_each_stage(tmp_path, capsys):
    print_summary(analyse(run_of(tmp_path, ranks())))
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "v100", "0-36", "70", "%", "50.0", "7.00", "5.00", "a2000"] in shown
    assert ["2", "a2000", "37-51", "30", "%", "30.0", "25.0", "4.00", "v100"] in shown
