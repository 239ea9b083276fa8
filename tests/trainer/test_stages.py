"""Where a network is cut, whose turn it is, and which way micro-batches take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.compute.models import build_model
from trainer.paced import StageClock, dissect
from trainer.pipeline import Layout, balanced, part_of, survey
from trainer.shared import (
    Pace,
    Stage,
    StageSchedule,
    Task,
    check_stages,
    format_stages,
    in_flight_of,
    in_flight_of_rank,
    interleaved,
    parse_stages,
)

NAMES = st.text("abcxyz-.0189", min_size=1, max_size=6)


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3))
def test_stages_are_read_as_they_are_written(lengths: list[list[int]]) -> None:
    pipelines = []
    for number, of_stages in enumerate(lengths):
        ends = [sum(of_stages[: count + 1]) for count in range(len(of_stages))]
        stages = [
            Stage(f"h{number}.{i}", end - n, end - 1) for i, (n, end) in enumerate(zip(of_stages, ends, strict=True))
        ]
        pipelines.append(tuple(stages))
    assert parse_stages(format_stages(tuple(pipelines))) == tuple(pipelines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a", "expected a host and its blocks, like v100:0-31,a2000:32-51"),
        ("a:0-3,,b:4-5", "expected a host and its blocks"),
        ("a:3-0", "the blocks end before they begin"),
        ("a:0-3,b:5-6", "block 4 is in no stage of 'a:0-3,b:5-6'"),
        ("a:0-3,b:3-6", "block 3 is in two stages"),
        ("a:1-3", "block 0 is in no stage"),
        ("a:0-3,a:4-6", "'a' holds two stages"),
        ("a:0-3|a:0-3", "'a' holds two stages"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        parse_stages(text)


@pytest.mark.parametrize(("text", "said"), [("a:0-3", "block 4 is in no stage"), ("a:0-9", "there is no block 9")])
def test_the_last_block_is_the_networks(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said}.*each of the 5 blocks"):
        check_stages(parse_stages(text), 5)


@given(st.lists(st.integers(0, 7), min_size=1, max_size=4), st.integers(1, 8), st.booleans(), st.booleans(), st.data())
def test_turns_take_each_micro_batch_once_and_hold_no_more_than_memory(
    counts: list[int], in_flight: int, splits: bool, is_late: bool, data: st.DataObject
) -> None:
    """Inputs and gradients come when they please; a gradient comes of what went forward. Several updates."""
    ahead = 0
    for count, following in zip(counts, [*counts[1:], 0], strict=True):
        schedule = StageSchedule(count, in_flight, splits, following if is_late else 0, forwards=ahead)
        _take_all(schedule, data)
        ahead = schedule.ahead
        assert ahead <= schedule.following


def _take_all(turns: StageSchedule, data: st.DataObject) -> None:
    count, forwards = turns.count + turns.following, turns.forwards
    arrived, returned = forwards, 0
    done: list[Task] = []
    while not turns.is_over:
        arrived = data.draw(st.integers(arrived, count))
        returned = data.draw(st.integers(returned, turns.forwards))
        task = turns.take(has_input=arrived > turns.forwards, has_gradient=returned > turns.backwards)
        if task:
            done.append(task)
        else:
            arrived, returned = max(arrived, min(count, turns.forwards + 1)), turns.forwards
        assert turns.forwards - turns.weights <= turns.in_flight
        assert turns.weights <= turns.backwards <= turns.forwards <= count
        assert turns.backwards <= turns.count  # the next update has gradients of its own
    found = [done.count(task) for task in Task]
    assert found == [turns.forwards - forwards, turns.count, turns.count if turns.splits else 0]
    assert turns.forwards >= turns.count


def test_a_gradient_goes_before_a_forward_and_that_before_weights() -> None:
    turns = StageSchedule(4, in_flight=3)
    first = [turns.take(has_input=True, has_gradient=False) for _ in range(4)]
    assert first == [Task.FORWARD, Task.FORWARD, Task.FORWARD, None]
    assert turns.take(has_input=True, has_gradient=True) is Task.BACKWARD
    assert turns.take(has_input=True, has_gradient=False) is Task.WEIGHTS  # memory is full until it is done
    assert turns.take(has_input=True, has_gradient=False) is Task.FORWARD


@pytest.mark.parametrize("splits", [True, False])
def test_gradients_that_come_at_once_let_inputs_pass_between_them(splits: bool) -> None:
    """Else the stage behind has no input for as long as they take."""
    turns = StageSchedule(8, in_flight=6, splits=splits)
    for _ in range(4):
        turns.take(has_input=True, has_gradient=False)
    found = [turns.take(has_input=True, has_gradient=True) for _ in range(4)]
    assert found == [Task.BACKWARD, Task.FORWARD, Task.BACKWARD, Task.FORWARD]
    assert turns.take(has_input=False, has_gradient=True) is Task.BACKWARD
    assert turns.take(has_input=False, has_gradient=True) is Task.BACKWARD  # no input waits


def test_a_late_stage_fills_a_wait_with_the_next_update() -> None:
    turns = StageSchedule(2, in_flight=3, following=2)
    assert [turns.take(has_input=True, has_gradient=False) for _ in range(4)] == [*3 * [Task.FORWARD], None]
    found = [turns.take(has_input=True, has_gradient=True) for _ in range(5)]
    # A third gradient would belong to the next update, which has not begun.
    assert found == [Task.BACKWARD, Task.BACKWARD, Task.WEIGHTS, Task.FORWARD, Task.WEIGHTS]
    assert (turns.is_over, turns.ahead) == (True, 2)
    turns = StageSchedule(2, in_flight=3, forwards=turns.ahead)
    assert turns.take(has_input=True, has_gradient=True) is Task.BACKWARD


@pytest.mark.parametrize("splits", [True, False])
def test_a_late_stage_takes_turns_if_each_update_has_one_micro_batch(splits: bool) -> None:
    """Also if the gradient is there first: else an update would end with nothing ahead."""
    ahead, found = 1, []
    for _ in range(3):
        turns = StageSchedule(1, in_flight=5, splits=splits, following=1, forwards=ahead)
        while not turns.is_over:
            found.append(turns.take(has_input=True, has_gradient=True))
        ahead = turns.ahead
    assert found == 3 * [Task.FORWARD, Task.BACKWARD, *([Task.WEIGHTS] if splits else [])]


def test_each_later_stage_holds_one_fewer() -> None:
    assert [in_flight_of(0, 3, stage) for stage in range(3)] == [7, 6, 5]
    assert [in_flight_of(2, 3, stage) for stage in range(3)] == [2, 1, 1]
    assert in_flight_of_rank(0, 3, 0, lanes=2) == 4


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_lanes_are_mixed_evenly(counts: list[int]) -> None:
    mixed = interleaved(counts)
    assert [mixed.count(lane) for lane in range(len(counts))] == counts
    for lane, count in enumerate(counts):
        for upto in range(len(mixed)):
            expected = count * (upto + 1) / len(mixed)
            assert abs(mixed[: upto + 1].count(lane) - expected) <= len(counts)


def test_a_layout_knows_who_holds_what_and_the_way_of_each_micro_batch() -> None:
    layout = Layout.of(parse_stages("v100:0-3,a16:4-6"), ["a16", "v100", "a16"], blocks=7)
    assert layout.ranks == (((1,), (0, 2)),)
    assert layout.first_ranks == (1,)
    assert [layout.holders(block) for block in (0, 3, 4)] == [(1,), (1,), (0, 2)]
    assert [one.ranks for one in layout.routes(0, {1: (8, 8, 7)})] == [(1, 0), (1, 2), (1, 0)]


def test_ranks_of_a_host_may_hold_a_stage_each() -> None:
    layout = Layout.of(parse_stages("a16:1:0-1,v100:2-3,a16:0:4-6"), ["a16", "v100", "a16"], blocks=7)
    assert layout.ranks == (((2,), (1,), (0,)),)


def test_all_ranks_on_one_host_are_stages_by_their_numbers() -> None:
    assert Layout.of(parse_stages("1:0-3,0:4-6"), ["h", "h"], blocks=7).ranks == (((1,), (0,)),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a:0-3,a:0:4-5,b:6", "'a' and 'a:0' are the same rank: a rank holds one stage"),
        ("a:0-3,b:1:4-6", "'b:1' has a stage, but is not among a, b"),
        ("a:0-3,c:4-6", "'c' has a stage, but is not among a, b"),
        ("a:0-6", "'b' has no stage: give it blocks, or leave it out"),
        ("a:0-3,b:4-5", "block 6 is in no stage"),
    ],
)
def test_stages_have_to_fit_the_ranks(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Layout.of(parse_stages(text), ["a", "b"], blocks=7)


def test_a_host_alone_has_no_stage_by_its_name() -> None:
    with pytest.raises(
        ValueError, match="'h' has a stage, but is not among 0, 1: on a single host, name ranks by their numbers"
    ):
        Layout.of(parse_stages("h:0-6"), ["h", "h"], blocks=7)


def test_pipelines_beside_each_other_have_the_same_cuts() -> None:
    with pytest.raises(ValueError, match="cut at the same blocks"):
        Layout.of(parse_stages("a:0-3,b:4-6|c:0-2,d:3-6"), list("abcd"), blocks=7)


@pytest.mark.parametrize(("name", "shape"), [("lenet", (1, 28, 28)), ("resnet152", (3, 32, 32))])
def test_the_chain_adds_up_to_the_network(name: str, shape: tuple[int, int, int]) -> None:
    chain, whole = survey(name, shape, 10), dissect(name, shape, 10)
    assert sum(block.work for block in chain) == pytest.approx(1)
    assert sum(block.kernels for block in chain) == pytest.approx(1)
    assert sum(3 * block.weight_bytes + block.buffer_bytes for block in chain) == whole.state_bytes
    assert sum(block.activation_bytes for block in chain) == whole.activation_bytes
    assert chain[-1].behind == (10,)


def test_resnet152_is_cut_where_its_work_is_divided() -> None:
    chain = survey("resnet152", (3, 32, 32), 10)
    assert len(chain) == 52
    (stages,) = balanced(chain, {"a2000": 333, "v100": 833})
    before = sum(block.work for block in chain[: stages[0].last + 1])
    assert before == pytest.approx(333 / 1166, abs=0.01)
    assert chain[stages[0].last].behind == (1024, 2, 2)  # 16 kB a sample


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=7))
def test_each_host_has_a_block_at_least(speeds: list[float]) -> None:
    chain = survey("lenet", (1, 28, 28), 10) * 4
    pipelines = balanced(chain, {f"h{number}": speed for number, speed in enumerate(speeds)})
    check_stages(parse_stages(format_stages(pipelines)), len(chain))


def test_more_hosts_than_blocks_are_refused() -> None:
    with pytest.raises(
        ValueError, match="3 stages for the network's 2 blocks: each stage needs a block; use fewer hosts"
    ):
        balanced(survey("lenet", (1, 28, 28), 10), {"a": 1, "b": 1, "c": 1})


def test_a_part_keeps_the_names_and_weights_of_its_blocks_alone() -> None:
    model = build_model("lenet", (1, 28, 28), 10)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    part = part_of(model, Stage("a", 1, 1))
    names = {name.removeprefix("whole."): tensor for name, tensor in part.state_dict().items()}
    assert set(names) == {name for name in whole if name.startswith("classifier")}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in names.items())


class Hand:
    """A clock that moves when it is slept on."""

    def __init__(self) -> None:
        self.s = 100.0

    def now(self) -> float:
        return self.s

    def sleep(self, seconds: float) -> None:
        self.s += seconds


def test_a_paced_stage_takes_its_part_of_the_networks_time_and_makes_up_for_lateness() -> None:
    hand = Hand()
    clock = StageClock(Pace(100, fixed_ms=10), work=0.5, kernels=0.2, clock=hand)
    clock.start()
    clock.run(0.33, samples=20)
    task_s = 0.33 * (0.2 * 0.010 + 0.5 * 0.2)
    assert hand.s == pytest.approx(100 + task_s)
    hand.s += 0.004  # the CPU is late with what follows
    clock.run(0.33, samples=20)
    assert hand.s == pytest.approx(100 + 2 * task_s)
    clock.run(0.33, samples=20, there_s=hand.s + 0.02)  # its data come later: the stage waits for them
    assert hand.s == pytest.approx(100 + 3 * task_s + 0.02)
    clock.optimise()
    assert hand.s == pytest.approx(100 + 3 * task_s + 0.02 + 0.01 * 3 * task_s)
    assert clock.median_lateness(0) == pytest.approx(0)


def test_a_task_that_ends_late_shows() -> None:
    hand = Hand()
    clock = StageClock(Pace(100), work=1, kernels=1, clock=hand)
    clock.start()
    hand.s += 0.3
    clock.run(0.33, samples=20)
    clock.optimise()
    assert clock.median_lateness(0) == pytest.approx((0.3 - 0.066) / 0.066)
