"""A pipeline's update, task by task: by hand where that can be done, and beside what was found before."""

from __future__ import annotations

import dataclasses

import pytest

from orchestrator.forecast import GLOO, NCCL, LinkCosts, Site, blocks_of, estimate, gradient_bytes, layers_of
from orchestrator.forecast.pipeline import (
    Chain,
    ChainBlock,
    Course,
    Space,
    StageHost,
    chain_from,
    clock,
    stages_setting,
    time_update,
    update_seconds,
)
from orchestrator.forecast.pipeline.solve import solve
from orchestrator.hosts import find_card
from trainer.compute.microbatches import MicroBatches
from trainer.shared import check_stages, parse_stages

CIFAR = ("resnet152", (3, 32, 32), 10)
RESNET, LAYERS = chain_from(blocks_of(*CIFAR)), layers_of(*CIFAR)
FREE = dataclasses.replace(GLOO, message_s=0.0)
A2000, V100, A16, R3090 = (
    StageHost(name, 1, 0.0, 1000 / speed)
    for name, speed in (("a2000", 333), ("v100", 833), ("a16", 220), ("3090", 850))
)
"""The lab's assumed paces."""
LIKE_1F1B = {"splits": False}


def even_chain(blocks=2, cut_bytes=0, weight_bytes=0):
    """All blocks alike."""
    return Chain((ChainBlock(*(1 / blocks / 3,) * 3, 1 / blocks, weight_bytes, 0, cut_bytes),) * blocks)


def wire_of(hosts, bps=2.35e9, costs=GLOO):
    return LinkCosts(tuple(Site(host.name, host.ranks, bps, bps) for host in hosts), costs)


def card(name, part_of_fixed=1.0):
    speed = estimate(find_card(name), LAYERS, "none").speed
    return StageHost(name, 1, part_of_fixed * speed.fixed_ms, speed.sample_ms)


def of_sum(hosts, batch, seconds):
    """The cluster's speed by the sum of its hosts' own."""
    return (
        batch
        / seconds
        / sum(1000 * host.ranks * batch / (host.ranks * host.fixed_ms + host.sample_ms * batch) for host in hosts)
    )


# ---- by hand --------------------------------------------------------------------------------------------------------


def test_one_stage_takes_what_the_host_takes_alone():
    host = StageHost("a", 1, 8.0, 2.0)
    alone = update_seconds(even_chain(), [Course((host,), (0,), batch=16, count=4)], wire_of([host]))
    tasks_s = 0.99 * (4 * 0.008 + 16 * 0.002)
    assert alone == pytest.approx(1.01 * tasks_s)


def test_two_equal_stages_and_one_micro_batch_wait_for_each_other():
    """0.33 s each, on two stages half of it: F0 F1 B1 B0 and, while nobody waits, W1; then W0 and the optimiser."""
    hosts = (StageHost("a", 1, 0.0, 1000.0), StageHost("b", 1, 0.0, 1000.0))
    course = Course(hosts, (0, 1), batch=1, count=1)
    task, optimiser = 0.99 / 6, 0.01 * 0.99 / 2
    found = update_seconds(even_chain(), [course], wire_of(hosts, 1e18, FREE))
    assert found == pytest.approx(5 * task + optimiser)


def late_s(hosts, starts, wire, *, weight_bytes=0, **course):
    """Seconds of an exact and a late update of one sample in one micro-batch, if `course` says nothing else."""
    chain, course = even_chain(len(starts), weight_bytes=weight_bytes), {"batch": 1, "count": 1, **course}
    exact, late = (update_seconds(chain, [Course(hosts, starts, late=part, **course)], wire) for part in (0.0, 1.0))
    return exact, late


def alike(count):
    return tuple(StageHost(name, 1, 0.0, 1000.0) for name in "abc"[:count])


def test_two_late_stages_compute_all_the_time():
    """While b does F1 B1 W1 and its optimiser, a does B0 W0 of the update before, its optimiser, and the next F0."""
    hosts, task, optimiser = alike(2), 0.99 / 6, 0.01 * 0.99 / 2
    _, late = late_s(hosts, (0, 1), wire_of(hosts, 1e18, FREE))
    assert late == pytest.approx(3 * task + optimiser)


@pytest.mark.parametrize("delay_s", [0.0, 0.05, 0.1, 0.5])
def test_messages_of_late_stages_cost_nothing_until_the_update_but_one_waits_for_them(delay_s):
    """From B1 of an update to B1 of the next but one: back to a, B0 W0, optimiser, F0, to b, F1 B1."""
    hosts, task, optimiser = alike(2), 0.99 / 6, 0.01 * 0.99 / 2
    wire = wire_of(hosts, 1e18, dataclasses.replace(FREE, message_s=delay_s))
    _, late = late_s(hosts, (0, 1), wire)
    assert late == pytest.approx(max(3 * task + optimiser, (2 * delay_s + 5 * task + optimiser) / 2))


@pytest.mark.parametrize("count", [1, 2])
def test_of_three_late_stages_the_first_waits_for_its_update_but_one(count):
    """One micro-batch: a takes F0, b F1, c the W2 and the optimiser of the update before, F2 B2, b B1, a B0 W0 and its
    optimiser in two updates. Two micro-batches fill all stages.
    """
    hosts, task = alike(3), 0.99 / 9
    optimiser = 0.01 * 3 * task
    exact, late = late_s(hosts, (0, 1, 2), wire_of(hosts, 1e18, FREE), batch=count, count=count)
    assert late == pytest.approx((8 * task + 2 * optimiser) / 2 if count == 1 else 2 * (3 * task + optimiser))
    assert exact > 1.2 * late


def test_a_limited_norm_makes_late_stages_wait_for_each_other():
    """F1 (beside F0 of the next update) B1 B0 W0 (beside W1), then both optimisers."""
    hosts = (StageHost("a", 1, 0.0, 1000.0), StageHost("b", 1, 0.0, 1000.0))
    task, optimiser = 0.99 / 6, 0.01 * 0.99 / 2
    _, late = late_s(hosts, (0, 1), wire_of(hosts, 1e18, FREE), clips=True)
    assert late == pytest.approx(4 * task + optimiser)


def test_a_late_stage_copies_its_weights_after_each_update_and_the_last_stage_does_not():
    a, b = alike(2)
    copy_s = 2 * 10**9 / 2e9
    for hosts, copies_s in (((a,), 0.0), ((a, b), copy_s)):
        starts = tuple(range(len(hosts)))
        wire = wire_of(hosts, 1e18, dataclasses.replace(FREE, moved_bytes_per_s=2e9))
        _, light = late_s(hosts, starts, wire)
        _, heavy = late_s(hosts, starts, wire, weight_bytes=10**9)
        assert heavy == pytest.approx(light + copies_s)


def test_a_stage_that_holds_one_micro_batch_is_never_late():
    hosts = alike(2)
    exact, late = late_s(hosts, (0, 1), wire_of(hosts, 1e18, FREE), batch=4, count=4, in_flight=1)
    assert late == pytest.approx(exact)


def test_a_run_that_is_late_for_a_part_takes_the_mean():
    hosts, wire = alike(2), wire_of(alike(2))
    exact, late, mean = (
        update_seconds(even_chain(), [Course(hosts, (0, 1), 1, 1, late=part)], wire) for part in (0.0, 1.0, 0.75)
    )
    assert mean == pytest.approx(0.25 * exact + 0.75 * late)


@pytest.mark.parametrize(
    ("fixed_ms", "sample_ms", "start", "batch", "count"),
    [((19, 2), (0.3, 0.3), 23, 128, 3), ((11, 1), (0.5, 0.3), 24, 256, 4), ((15, 13), (0.3, 0.1), 21, 128, 3)],
)
def test_late_updates_that_alternate_are_counted_in_whole_turns(fixed_ms, sample_ms, start, batch, count, monkeypatch):
    hosts = tuple(StageHost(name, 1, *ms) for name, *ms in zip("ab", fixed_ms, sample_ms, strict=True))
    course = Course(hosts, (0, start), batch, count, splits=False, late=1.0)
    wire = wire_of(hosts, 1e9, NCCL)
    found = update_seconds(RESNET, [course], wire)
    monkeypatch.setattr(clock, "LATE", (40, 100))
    assert found == pytest.approx(update_seconds(RESNET, [course], wire), rel=1e-9)


def test_late_stages_hold_two_updates_and_two_more_copies_of_their_weights():
    chain = Chain((ChainBlock(1 / 6, 1 / 6, 1 / 6, 0.5, weight_bytes=1000, kept_bytes=10, cut_bytes=0),) * 2)
    late, many = (Course(alike(2), (0, 1), 64, count, late=0.9) for count in (1, 16))
    assert late.memory_bytes(chain) == (5 * 1000 + 2 * 64 * 10, 3 * 1000 + 64 * 10)
    assert many.memory_bytes(chain) == (5 * 1000 + 6 * 4 * 10, 3 * 1000 + 5 * 4 * 10)
    timed = time_update(chain, [late], wire_of(alike(2)))
    assert [stage.memory_bytes for stage in timed.stages[0]] == list(late.memory_bytes(chain))


def test_a_message_takes_its_bytes_and_its_delay():
    hosts = (StageHost("a", 1, 0.0, 1000.0), StageHost("b", 1, 0.0, 1000.0))
    course, chain = Course(hosts, (0, 1), batch=1, count=1), even_chain(cut_bytes=125_000)
    costs = dataclasses.replace(FREE, message_s=0.25)
    free = update_seconds(chain, [course], wire_of(hosts, 1e18, FREE))
    assert update_seconds(chain, [course], wire_of(hosts, 1e6, costs)) == pytest.approx(free + 2 * (1.0 + 0.25))


def test_activations_cost_what_gloo_costs_though_gradients_travel_over_nccl():
    hosts = (StageHost("a", 1, 0.0, 10.0), StageHost("b", 1, 0.0, 10.0))
    course, chain = Course(hosts, (0, 1), batch=8, count=4), even_chain(cut_bytes=1)
    over_nccl, over_gloo = (update_seconds(chain, [course], wire_of(hosts, costs=costs)) for costs in (NCCL, GLOO))
    assert over_nccl == pytest.approx(over_gloo)
    inside = (StageHost("a:0", 1, 0.0, 0.001, site="a"), StageHost("a:1", 1, 0.0, 0.001, site="a"))
    wire = LinkCosts((Site("a", 2, 1e18, 1e18),), NCCL)
    course, chain = Course(inside, (0, 1), batch=8, count=1), even_chain(cut_bytes=10**9)
    assert update_seconds(chain, [course], wire) == pytest.approx(2 * 8 * 8e9 / wire.cuts.local_bps, rel=0.01)


def test_a_link_that_carries_less_than_hosts_compute_sets_the_time():
    hosts = (StageHost("a", 1, 0.0, 1.0), StageHost("b", 1, 0.0, 1.0))
    course, chain = Course(hosts, (0, 1), batch=64, count=16), even_chain(cut_bytes=125_000)
    timed = time_update(chain, [course], wire_of(hosts, 1e7, FREE))
    assert timed.seconds >= 64 * 0.1
    assert timed.limited_by == "link"


def test_micro_batches_of_two_ranks_go_side_by_side_and_their_gradients_add_up():
    pair, other = StageHost("a", 2, 0.0, 20.0), StageHost("b", 1, 0.0, 10.0)
    course = Course((pair, other), (0, 1), batch=64, count=8)
    quick = time_update(even_chain(), [course], wire_of(course.hosts, 1e18, FREE))
    assert quick.seconds == pytest.approx(64 * 0.01 / 2, rel=0.15)
    heavy = even_chain(weight_bytes=10**9)
    sum_s = 2 * (FREE.local_message_s + 8 * 10**9 / 2 / FREE.local_bps)
    slower = time_update(heavy, [course], wire_of(course.hosts, 1e18, FREE))
    assert slower.seconds >= max(quick.seconds, sum_s)
    assert slower.seconds == pytest.approx(quick.seconds + sum_s, rel=0.05)
    assert slower.limited_by == "link"


@pytest.mark.parametrize("ranks", [1, 2])
def test_micro_batches_have_the_sizes_that_the_ranks_give_them(ranks):
    course = Course((dataclasses.replace(A2000, ranks=ranks), V100), (0, 14), 256, 6, smaller_first=0.3)
    cut = MicroBatches(6, [None] * ranks, together=False, smaller_first=0.3)
    of_lanes = [
        tuple(route.size for route in course.routes() if route.lanes[0] == lane)
        for lane in range(course.hosts[0].ranks)
    ]
    assert of_lanes == [cut.sizes([256 // ranks] * ranks, rank) for rank in range(ranks)]
    assert len(set(of_lanes[0])) > 1


def test_two_pipelines_beside_each_other_add_up_their_gradients_over_the_link():
    a, b, c, d = (StageHost(name, 1, 0.0, 10.0) for name in "abcd")
    chain = even_chain(weight_bytes=10_000_000)
    pair = [Course((a, b), (0, 1), batch=32, count=8), Course((c, d), (0, 1), batch=32, count=8)]
    wire = wire_of([a, b, c, d], 1e9, FREE)
    one = update_seconds(chain, pair[:1], wire)
    assert update_seconds(chain, pair, wire) == pytest.approx(one + 0.08, rel=0.02)  # 10 MB at 1 Gbps


def test_a_stage_is_busy_or_waits():
    course = Course((V100, A2000), (0, 37), batch=256, count=16)
    timed = time_update(RESNET, [course], wire_of(course.hosts))
    assert sum(timed.parts_s.values()) == pytest.approx(timed.seconds, rel=1e-3)
    for stage in timed.stages[0]:
        assert stage.busy_s + stage.waiting_s == pytest.approx(timed.seconds)
    first, last = timed.stages[0]
    assert first.busy_s == pytest.approx(256 / 833 * RESNET.work(0, 37), rel=0.01)
    assert first.out_bytes == last.out_bytes == 256 * 16_384
    assert timed.limited_by == "slowest stage"


# ---- the network ----------------------------------------------------------------------------------------------------


def test_the_chain_is_the_network():
    """Bytes and parts of the work as they were counted on the network itself at 32 px."""
    assert len(RESNET.blocks) == 52
    assert RESNET.weight_bytes(0, 52) == gradient_bytes(LAYERS)
    assert RESNET.work(0, 52) == pytest.approx(1)
    assert [RESNET.cut_bytes(cut) for cut in (1, 4, 12, 48, 51)] == [16_384, 65_536, 32_768, 16_384, 8_192]
    told = {1: 0.010, 4: 0.068, 12: 0.233, 16: 0.323, 22: 0.436, 30: 0.588, 48: 0.930, 50: 0.981}
    assert {cut: RESNET.work(0, cut) for cut in told} == pytest.approx(told, abs=0.002)
    assert RESNET.weight_bytes(0, 37) == pytest.approx(124e6, rel=0.01)
    assert len(chain_from(blocks_of("lenet", (1, 28, 28), 10)).blocks) == 2
    assert chain_from(blocks_of(*CIFAR), sent_bytes=2).cut_bytes(1) == 8_192


# ---- what was found before ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "one_f_one_b", "more_in_flight", "zero_bubble"),
    [
        ((A2000, V100), 0.837, 0.986, 0.991),
        ((A16, V100), 0.849, 0.985, 0.993),
        ((A2000, dataclasses.replace(A2000, name="a2000b")), 0.876, 0.966, 0.979),
        ((A16, A2000, V100), 0.738, 0.943, 0.975),
    ],
)
def test_assumed_paces_reach_what_another_event_model_found(hosts, one_f_one_b, more_in_flight, zero_bubble):
    """Of the sum of all speeds at batch 256. That model played a single update, from the first task to the last; here
    the next one begins while later stages still do this one, so that schedules that wait much gain, up to 0.07.
    """
    wire, tried = wire_of(hosts), {"least_samples": 4, "near": 0.0}
    plain = solve(RESNET, hosts, wire, 256, Space(in_flight=len(hosts), splits=False, counts=(16,)))
    more = solve(RESNET, hosts, wire, 256, Space(splits=False, **tried))
    best = solve(RESNET, hosts, wire, 256, Space(**tried))
    assert 0 <= of_sum(hosts, 256, plain.seconds) - one_f_one_b < 0.07
    assert of_sum(hosts, 256, more.seconds) == pytest.approx(more_in_flight, abs=0.03)
    assert of_sum(hosts, 256, best.seconds) == pytest.approx(zero_bubble, abs=0.015)
    assert best.is_proved


def test_four_hosts_reach_nine_tenths():
    hosts = (A16, A2000, V100, R3090)
    found = solve(RESNET, hosts, wire_of(hosts), 256)
    assert 0.88 < of_sum(hosts, 256, found.seconds) < 0.96


def test_at_the_catalogues_speeds_the_v100_alone_stays_ahead_at_batch_256():
    hosts = (card("A2000"), card("V100"))
    found = solve(RESNET, hosts, wire_of(hosts), 256)
    alone_s = (hosts[1].fixed_ms + 256 * hosts[1].sample_ms) / 1000
    assert found.seconds > 1.1 * alone_s
    few = time_update(RESNET, [Course(hosts, (0, 10), 256, 16)], wire_of(hosts))
    assert few.limited_by == "fixed cost"


def test_with_cuda_graphs_and_large_batches_cutting_wins_over_the_v100_alone():
    hosts = (card("A2000", 0.25), card("V100", 0.25))
    found = solve(RESNET, hosts, wire_of(hosts), 2048)
    alone_s = (hosts[1].fixed_ms + 2048 * hosts[1].sample_ms) / 1000
    assert found.seconds < 0.95 * alone_s


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_a_network_that_no_host_holds_alone_is_cut_so_that_each_holds_its_part():
    whole = 3 * RESNET.weight_bytes(0, 52)
    hosts = tuple(dataclasses.replace(host, memory_bytes=round(0.75 * whole)) for host in (A2000, V100))
    found = solve(RESNET, hosts, wire_of(hosts), 256)
    assert found.course.fits(RESNET)
    assert all(need <= 0.75 * whole for need in found.course.memory_bytes(RESNET))
    stages = parse_stages(stages_setting([found.course], RESNET))
    check_stages(stages, 52)
    assert {stage.node for stage in stages[0]} == {"a2000", "v100"}


def test_what_fits_nowhere_has_no_cut():
    hosts = tuple(dataclasses.replace(host, memory_bytes=10**8) for host in (A2000, V100))
    assert solve(RESNET, hosts, wire_of(hosts), 256) is None
    assert solve(even_chain(1), (A2000, V100), wire_of((A2000, V100)), 256) is None


def test_no_more_micro_batches_are_held_than_an_update_has():
    chain = Chain((ChainBlock(1 / 6, 1 / 6, 1 / 6, 0.5, weight_bytes=1000, kept_bytes=10, cut_bytes=0),) * 2)
    assert Course(alike(2), (0, 1), 64, 1).memory_bytes(chain) == (3 * 1000 + 64 * 10,) * 2
    pair = StageHost("a", 2, 0.0, 1000.0)
    assert Course((pair, alike(2)[1]), (0, 1), 64, 1).memory_bytes(chain) == (
        3 * 1000 + 32 * 10,
        3 * 1000 + 2 * 32 * 10,
    )


def test_each_size_of_micro_batches_keeps_memory_of_its_own():
    equal = Course((A2000, V100), (0, 14), 256, 16)
    smaller = dataclasses.replace(equal, smaller_first=0.3)
    weights = [3 * RESNET.weight_bytes(first, end) for first, end in ((0, 14), (14, 52))]
    kept = [RESNET.kept_bytes(first, end) for first, end in ((0, 14), (14, 52))]
    samples = [
        [(need - weight) / each for need, weight, each in zip(course.memory_bytes(RESNET), weights, kept, strict=True)]
        for course in (equal, smaller)
    ]
    assert samples == [[6 * 16, 5 * 16], [11 + 5 * 17 + 6 * 16, 11 + 5 * 17 + 5 * 16]]


def test_less_memory_holds_fewer_micro_batches():
    course = Course((A2000, V100), (0, 14), 256, 16)
    needs = course.memory_bytes(RESNET)
    tight = tuple(
        dataclasses.replace(host, memory_bytes=round(0.8 * need))
        for host, need in zip(course.hosts, needs, strict=True)
    )
    space = Space(counts=(16,))
    found, free = (solve(RESNET, hosts, wire_of(hosts), 256, space) for hosts in (tight, course.hosts))
    assert found.course.fits(RESNET)
    assert found.seconds > free.seconds
