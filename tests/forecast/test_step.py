"""The model of a step: its bounds, its directions, and the same played out message by message."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from orchestrator.forecast import (
    GLOO,
    GOODPUT,
    NCCL,
    PREDICTED,
    HostSpeed,
    Kept,
    Layer,
    LinkCosts,
    Scene,
    Site,
    Way,
    Workload,
    advise,
    alone_samples_per_s,
    batch_norms_s,
    buckets_of,
    choices,
    compressed_bytes,
    fewer,
    fewest_steps,
    gradient_bytes,
    layers_of,
    measured,
    predict,
    ways,
)
from tests.support.simulate import simulate_step_ms
from trainer.compute.models import build_model
from trainer.shared import STRATEGIES, Speed, equal_shares, fastest_shares

RESNET = layers_of("resnet152", (3, 32, 32), 10)
SMALL = tuple(Layer(((size, 40), (size,)), work) for size, work in ((400, 5.0), (900, 9.0), (90, 2.0), (2000, 1.0)))
GPUS = {"a2000": 333.0, "v100": 833.0, "a16": 220.0}
EVERY_WAY = [
    *(Way(strategy) for strategy in PREDICTED if strategy != "parameter_average"),
    *(Way(strategy, "half") for strategy in ("ddp", "allreduce", "allreduce_flat")),
    *(Way("ddp", "exact", 0.1), Way("allreduce_flat", "compressed"), Way("ddp", "half", 0.1)),
    *(Way("parameter_average", "local", every=8, overlap=wait) for wait in (0, 1, 7)),
    Way("parameter_average", "local", every=8, half_wire=True, overlap=2),
]


def paced(names, gbps, batch, layers=RESNET, costs=GLOO):
    """One rank a host, at the speeds that the lab's twins assume."""
    hosts = tuple(HostSpeed(f"{name}{i}", (Speed(0, 1000 / GPUS[name]),)) for i, name in enumerate(names))
    bps = GOODPUT * 1e9 * gbps
    return Scene(Workload(layers, batch), hosts, LinkCosts([Site(host.name, 1, bps, bps) for host in hosts], costs))


def forecast(scene, way, policy="equal"):
    return predict(scene.job, scene.hosts, scene.wire, way, scene.shares(policy))


# ---- the networks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("resnet152", (3, 32, 32)),
        ("resnet101", (3, 32, 32)),
        ("resnet50", (3, 64, 64)),
        ("lenet", (1, 28, 28)),
        ("lenet", (3, 32, 32)),
    ],
)
def test_a_network_has_the_tensors_and_the_work_of_the_real_one(name, shape):
    with torch.device("meta"):
        model = build_model(name, shape, 10)
    layers = layers_of(name, shape, 10)
    assert [s for layer in layers for s in layer.shapes] == [tuple(p.shape) for p in model.parameters()]
    done: list[float] = []
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.register_forward_hook(
                lambda m, _, out: done.append(max(p.numel() for p in m.parameters()) * out[0].numel() / out.shape[1])
            )
    model(torch.zeros(2, *shape, device="meta"))
    assert [layer.work for layer in layers] == pytest.approx(done)


def test_buckets_hold_every_tensor_once_and_the_last_waits_for_all_of_backward():
    for bucket_mib in (0.001, 1.0, 25.0, 1000.0):
        buckets = buckets_of(RESNET, bucket_mib)
        assert sum(bucket.bytes for bucket in buckets) == gradient_bytes(RESNET)
        shapes = [shape for bucket in buckets for shape in bucket.shapes]
        assert shapes == [shape for layer in reversed(RESNET) for shape in reversed(layer.shapes)]
        ready = [bucket.ready for bucket in buckets]
        assert ready == sorted(ready)
        assert ready[-1] == pytest.approx(1.0)


def test_every_batch_norm_is_found():
    with torch.device("meta"):
        model = build_model("resnet152", (3, 32, 32), 10)
    normed = [module.num_features for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    assert [layer.shapes[0][0] for layer in RESNET if layer.is_batch_norm] == normed


def test_ranks_that_meet_in_every_batch_norm_hide_nothing():
    scene = paced(("a2000", "v100"), 2.5, 256)
    for strategy in ("ddp", "allreduce_flat"):
        apart, together = forecast(scene, Way(strategy)), forecast(scene, Way(strategy, sync_bn=True))
        assert len(set(together.own_ms)) == 1
        assert together.own_ms[0] == pytest.approx(max(apart.own_ms) + 1000 * batch_norms_s(scene.job, scene.wire))
        assert together.step_ms > apart.step_ms
    alone = scene.only(["v1001"])
    assert forecast(alone, Way("ddp", sync_bn=True)).step_ms == forecast(alone, Way("ddp")).step_ms


@pytest.mark.parametrize(("rank", "factor"), [(1, 147), (2, 91), (4, 51)])
def test_powersgd_makes_resnet152_so_much_smaller(rank, factor):
    shapes = tuple(shape for layer in RESNET for shape in layer.shapes)
    assert gradient_bytes(RESNET) / compressed_bytes(shapes, rank) == pytest.approx(factor, rel=0.02)


# ---- known figures --------------------------------------------------------------------------------------------------


def test_a_ring_costs_what_patarasuk_and_yuan_prove():
    wire = LinkCosts([Site(str(i), 1, 2.5e9, 2.5e9) for i in range(4)], dataclasses.replace(GLOO, message_s=0.001))
    assert wire.all_reduce_s(232.7e6) == pytest.approx(6 * 0.001 + 1.5 * 232.7e6 * 8 / 2.5e9)


def test_ranks_of_one_host_add_up_first_where_the_trainer_has_them_do_so():
    sites = [Site("two", 2, 1e9, 1e9), Site("one", 1, 1e9, 1e9)]
    wire = LinkCosts(sites, dataclasses.replace(GLOO, message_s=0, local_message_s=0, local_bps=1e15))
    assert wire.all_reduce_s(1e9) == pytest.approx(4 / 3 * 8)
    assert sum(wire.relay_s(1e9)) == pytest.approx(8.0, rel=1e-4)
    assert wire.sum_s(1e9) == sum(wire.relay_s(1e9))
    assert dataclasses.replace(wire, costs=dataclasses.replace(wire.costs, relays=False)).sum_s(1e9) == pytest.approx(
        4 / 3 * 8
    )


MEASURED = [
    (("a2000", "v100"), 2.5, "allreduce", 2157),
    (("a2000", "v100"), 2.5, "ddp", 977),
    (("a2000", "v100", "a16", "a2000"), 1.0, "allreduce", 5818),
    (("a2000", "v100", "a16", "a2000"), 1.0, "ddp", 3122),
]
"""Steps of 256 samples in equal shares on lab twins, in ms."""


@pytest.mark.parametrize(("names", "gbps", "strategy", "step_ms"), MEASURED)
def test_a_step_takes_what_was_measured_on_a_lab(names, gbps, strategy, step_ms):
    assert forecast(paced(names, gbps, 256), Way(strategy)).step_ms == pytest.approx(step_ms, rel=0.05)


def test_the_parts_of_a_step_add_up_for_every_rank():
    for way in EVERY_WAY:
        predicted = forecast(paced(("a2000", "v100", "a16"), 1.0, 256), way)
        for rank in predicted.ranks:
            assert rank.compute_ms + rank.optim_ms + rank.exposed_ms == pytest.approx(predicted.step_ms)
            assert rank.exposed_ms == pytest.approx(rank.wait_ms + predicted.sync_ms)
        assert predicted.ranks[predicted.critical].wait_ms == pytest.approx(0)


def test_accumulated_micro_batches_leave_before_the_last_one_nothing_on_the_wire():
    whole, parts = (HostSpeed("one", (Speed(0, 1.0, cap),)) for cap in (None, 16))
    sites = [Site("one", 1, 1e9, 1e9), Site("two", 1, 1e9, 1e9)]
    times = []
    for host in (whole, parts):
        hosts = (host, HostSpeed("two", (Speed(0, 0.001),)))
        times.append(predict(Workload(RESNET, 65), hosts, LinkCosts(sites, GLOO), Way("ddp"), (64, 1)).step_ms)
    assert times[1] > times[0]


# ---- the model beside the simulator ---------------------------------------------------------------------------------

speeds = st.builds(Speed, st.floats(0, 20), st.floats(0.01, 5), st.none() | st.integers(1, 64))
links = st.floats(5e7, 1e10)


@st.composite
def scenes(draw, alike=False):
    ranks = draw(st.lists(st.just(1) if alike else st.integers(1, 2), min_size=2, max_size=4))
    hosts = tuple(HostSpeed(str(i), tuple(draw(speeds) for _ in range(n))) for i, n in enumerate(ranks))
    bps = draw(links)
    sites = [
        Site(host.name, n, *((bps, bps) if alike else (draw(links), draw(links))))
        for host, n in zip(hosts, ranks, strict=True)
    ]
    costs = dataclasses.replace(draw(st.sampled_from([GLOO, NCCL])), message_s=draw(st.floats(0, 2e-3)))
    return Scene(Workload(SMALL, draw(st.integers(1, 600))), hosts, LinkCosts(sites, costs))


ROOTED = {"reduce", "broadcast", "gather", "scatter"}
RINGS = [way for way in EVERY_WAY if not ROOTED & {*STRATEGIES[way.strategy].collectives}]


@settings(max_examples=60)
@given(scenes(alike=True), st.sampled_from(RINGS))
def test_on_links_alike_the_simulator_says_the_same(scene, way):
    played = simulate_step_ms(scene.job, scene.hosts, scene.wire, way, scene.equal)
    assert played == pytest.approx(forecast(scene, way).step_ms, rel=1e-9)


@settings(max_examples=60)
@given(scenes(alike=True), st.sampled_from([way for way in EVERY_WAY if way not in RINGS]))
def test_where_one_rank_is_the_root_the_simulator_is_no_further_than_twice(scene, way):
    """Its links serve one message after the other, the forecast lets them overlap."""
    played = simulate_step_ms(scene.job, scene.hosts, scene.wire, way, scene.equal)
    assert 0.5 <= played / forecast(scene, way).step_ms <= 2


@settings(max_examples=60)
@given(scenes(), st.sampled_from(RINGS))
def test_on_unlike_links_the_forecast_is_a_bound(scene, way):
    """Pieces of early ranks pass slow links before the last rank joins: a step may be that much shorter."""
    predicted = forecast(scene, way)
    played = simulate_step_ms(scene.job, scene.hosts, scene.wire, way, scene.equal)
    assert 0.5 * predicted.step_ms <= played <= predicted.step_ms * (1 + 1e-9)


def test_on_racks_of_odd_hosts_the_simulator_says_nearly_the_same():
    chance = random.Random(1)
    misses = []
    for _ in range(40):
        ranks = [chance.choice([1, 1, 1, 2]) for _ in range(chance.randint(2, 5))]
        rates = [1000 / chance.choice(list(GPUS.values())) for _ in ranks]
        hosts = tuple(HostSpeed(str(i), (Speed(chance.uniform(0, 20), rates[i]),) * n) for i, n in enumerate(ranks))
        bps = [GOODPUT * chance.choice([1e9, 2.5e9, 10e9]) for _ in ranks]
        wire = LinkCosts([Site(str(i), n, bps[i], bps[i]) for i, n in enumerate(ranks)], GLOO)
        scene = Scene(Workload(RESNET, chance.choice([64, 256, 1024])), hosts, wire)
        for way in (Way("ddp"), Way("allreduce_flat"), Way("ddp", "half"), Way("parameter_average", "local", every=8)):
            played = simulate_step_ms(scene.job, scene.hosts, scene.wire, way, scene.equal)
            misses.append(abs(played / forecast(scene, way).step_ms - 1))
    misses.sort()
    assert misses[len(misses) // 2] < 1e-6
    assert misses[int(0.95 * len(misses))] < 0.08
    assert misses[-1] < 0.25


def test_the_simulator_says_the_same_twice():
    scene = paced(("a2000", "v100", "a16"), 1.0, 256)
    first, second = (simulate_step_ms(scene.job, scene.hosts, scene.wire, Way("ddp"), scene.equal) for _ in "ab")
    assert first == second


def test_a_rank_sends_nothing_to_one_that_is_not_there_yet():
    """A slow root keeps all senders of a gather, however early they are."""
    hosts = (HostSpeed("slow", (Speed(0, 10.0),)), HostSpeed("fast", (Speed(0, 0.1),)))
    scene = Scene(Workload(SMALL, 20), hosts, LinkCosts([Site(h.name, 1, 1e9, 1e9) for h in hosts], GLOO))
    played = simulate_step_ms(scene.job, scene.hosts, scene.wire, Way("gather_scatter"), scene.equal)
    assert played > 100 + 1000 * 8 * gradient_bytes(SMALL) / 1e9


# ---- directions -----------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(scenes(), st.sampled_from(EVERY_WAY), st.floats(1, 20))
def test_a_faster_link_is_never_slower(scene, way, factor):
    assert forecast(scene.with_links(factor), way).step_ms <= forecast(scene, way).step_ms * (1 + 1e-12)


@settings(max_examples=60)
@given(scenes(), st.sampled_from(EVERY_WAY))
def test_no_forecast_exceeds_the_sum_of_what_ranks_do_alone(scene, way):
    speeds = [speed for host in scene.hosts for speed in host.speeds]
    ceiling = sum(1000 / (speed.sample_ms + (speed.fixed_ms / speed.cap if speed.cap else 0)) for speed in speeds)
    for policy in ("equal", "measured"):
        assert forecast(scene, way, policy).samples_per_s <= ceiling * (1 + 1e-9)


@settings(max_examples=40)
@given(scenes(), st.sampled_from([way for way in EVERY_WAY if way.strategy != "ddp"]))
def test_shares_by_speed_are_never_slower_where_nothing_overlaps(scene, way):
    assume(1 not in fastest_shares([speed for host in scene.hosts for speed in host.speeds], scene.job.batch))
    assert forecast(scene, way, "measured").step_ms <= forecast(scene, way, "equal").step_ms * (1 + 1e-12)


@settings(max_examples=40)
@given(scenes())
def test_shares_hold_the_whole_batch(scene):
    assert sum(scene.equal) == sum(scene.measured) == scene.job.batch


@settings(max_examples=40)
@given(scenes(), st.sampled_from(EVERY_WAY))
def test_a_step_is_never_shorter_than_its_slowest_rank(scene, way):
    predicted = forecast(scene, way)
    assert predicted.sync_ms >= -1e-9 * predicted.step_ms
    assert predicted.samples_per_s > 0


@pytest.mark.parametrize("costs", [GLOO, NCCL])
@pytest.mark.parametrize("batch", [256, 2048])
def test_fitted_buckets_cost_little_beside_the_best_whatever_the_batch(costs, batch):
    scene = paced(["a2000", "v100"], 2.5, batch, costs=costs)
    best = min(forecast(scene, Way("ddp", "exact", mib), "measured").step_ms for mib in (2, 4, 8, 16, 25, 50, 100))
    assert forecast(scene, Way("ddp", "exact", 0.0), "measured").step_ms < 1.03 * best


@pytest.mark.parametrize(("half_wire", "rounds"), [(False, (8, 4)), (True, (4, 2))])
def test_the_fewest_local_steps_that_hide_the_wire_are_found(half_wire, rounds):
    wire_alone = dataclasses.replace(NCCL, moved_bytes_per_s=1e15)
    scene = paced(["a2000", "v100"], 2.5, 256, costs=wire_alone)

    def speed(every, overlap):
        way = Way("parameter_average", "local", every=every, overlap=overlap, half_wire=half_wire)
        return forecast(scene, way, "measured").samples_per_s

    assert fewest_steps(speed, asked=-1) == rounds
    assert speed(*rounds) >= 0.99 * speed(32, 16) > 1.01 * speed(rounds[0] - 1, (rounds[0] - 1) // 2)
    every, overlap = fewest_steps(speed, asked=2)
    assert overlap == 2 and all(speed(steps, 2) < 0.99 * speed(256, 2) for steps in range(3, min(every, 33)))
    assert fewest_steps(lambda *_: 100.0, asked=-1) == (1, 0)
    assert fewest_steps(lambda *_: 100.0, asked=40) == (41, 40)


def test_over_a_slow_network_more_than_32_local_steps_are_found():
    """At the catalogue's speeds over 200 Mbps 32 steps keep less than half of what 256 do."""
    scene = paced(["a2000", "v100"], 0.2, 256)
    scene = dataclasses.replace(scene, hosts=tuple(HostSpeed(host.name, (Speed(10.0, 0.2),)) for host in scene.hosts))

    def speed(every, overlap):
        way = Way("parameter_average", "local", every=every, overlap=overlap)
        return forecast(scene, way, "measured").samples_per_s

    every, overlap = fewest_steps(speed, asked=-1)
    assert every in (192, 256) and overlap <= every // 2
    assert speed(every, overlap) > 2 * speed(32, 16)


def test_an_average_costs_each_of_its_local_steps_the_same_part():
    scene = paced(("a2000", "v100"), 2.5, 256)
    once, often = (forecast(scene, Way("parameter_average", "local", every=every)) for every in (32, 1))
    assert once.local_steps == (32, 32)
    assert once.step_ms - max(once.own_ms) == pytest.approx((often.step_ms - max(often.own_ms)) / 32)


LOCAL_16 = Way("parameter_average", "local", every=4, local_batch=16)


def with_fixed_ms(scene, fixed_ms, cap=None):
    hosts = tuple(HostSpeed(host.name, (Speed(fixed_ms, host.speeds[0].sample_ms, cap),)) for host in scene.hosts)
    return Scene(scene.job, hosts, scene.wire)


def test_with_a_local_batch_a_rank_makes_an_update_of_each_part_of_its_share():
    scene = paced(("a2000", "v100"), 2.5, 256)
    small = with_fixed_ms(scene, 0, cap=8)
    one_a_step = dataclasses.replace(LOCAL_16, local_batch=0)
    predicted = {
        (cap, way.local_batch): predict(cluster.job, cluster.hosts, cluster.wire, way, (64, 192)).local_steps
        for cap, cluster in ((None, scene), (8, small))
        for way in (LOCAL_16, one_a_step)
    }
    assert predicted == {(None, 16): (16, 48), (8, 16): (32, 96), (None, 0): (4, 4), (8, 0): (4, 4)}


def test_a_local_batch_costs_its_parts_in_the_simulator_too():
    scene = with_fixed_ms(paced(("a2000", "v100"), 2.5, 256), 20.0)
    predicted = predict(scene.job, scene.hosts, scene.wire, LOCAL_16, scene.equal)
    assert predicted.own_ms[0] == pytest.approx(8 * 20 + 128 / 0.333)
    played = simulate_step_ms(scene.job, scene.hosts, scene.wire, LOCAL_16, scene.equal)
    assert played == pytest.approx(predicted.step_ms, rel=1e-9)


def test_a_local_batch_changes_local_alone_and_its_shares():
    hosts = (HostSpeed("steep", (Speed(40, 0.5),)), HostSpeed("flat", (Speed(0, 2.0),)))
    scene = Scene(Workload(RESNET, 256), hosts, LinkCosts([Site(host.name, 1, 1e10, 1e10) for host in hosts], GLOO))
    without, with_it = advise(scene), advise(scene, kept=Kept(local_batch=16))
    for fidelity in ("exact", "half", "compressed"):
        assert with_it.best[fidelity] == without.best[fidelity]
    assert with_it.sum_of_parts == without.sum_of_parts
    assert with_it.best["local"].samples_per_s < without.best["local"].samples_per_s
    by_speed = fastest_shares((Speed(40, 0.5, 16), Speed(0, 2.0, 16)), 256)
    assert with_it.best["local"].forecast.shares == by_speed != scene.measured


def test_a_measured_latency_takes_the_place_of_the_assumed_one():
    wire = LinkCosts([Site(str(i), 1, 1e9, 1e9) for i in range(4)], measured(GLOO, 0.002, "lab"))
    assert wire.all_reduce_s(0) == pytest.approx(6 * 0.002)


# ---- advice ---------------------------------------------------------------------------------------------------------


def test_the_best_way_of_each_fidelity_is_the_fastest_of_all():
    scene = paced(("a2000", "v100"), 2.5, 256)
    advice = advise(scene)
    for fidelity in ("exact", "half", "compressed", "local"):
        tried = [
            forecast(scene, way, policy).samples_per_s
            for way, policy in itertools.product(ways(fidelity), ("equal", "measured"))
        ]
        assert advice.best[fidelity].samples_per_s == pytest.approx(max(tried))
        assert advice.best[fidelity].forecast.way.fidelity == fidelity


def test_a_host_that_costs_more_than_it_brings_is_named():
    advice = advise(paced(("a2000", "v100"), 2.5, 256))
    assert advice.without[0].hosts == ("v1001",)
    assert advice.without[0].choice.samples_per_s == pytest.approx(833)
    assert advise(paced(("a2000", "v100"), 2.5, 256), "local").without == ()


def test_more_of_everything_is_predicted_for_the_fidelity_that_is_allowed():
    scene = paced(("a2000", "v100"), 2.5, 256)
    speeds = {change.change: change.choice.samples_per_s for change in advise(scene).what_if}
    assert speeds["links four times as fast"] == advise(scene.with_links(4)).best["exact"].samples_per_s
    assert speeds["adding a host like v1001"] < advise(scene).best["exact"].samples_per_s
    assert speeds["batch 2048 instead of 256"] > speeds["batch 512 instead of 256"]


def test_a_host_alone_takes_the_whole_batch_on_its_ranks():
    host = HostSpeed("two", (Speed(1.0, 1.0), Speed(1.0, 1.0)))
    assert alone_samples_per_s(host, 100) == pytest.approx(100 / 0.051)
    assert fastest_shares(host.speeds, 100) == equal_shares(100, 2)


def test_of_many_hosts_those_behind_a_slow_link_are_left_out_as_a_kind_of_their_own():
    hosts = tuple(HostSpeed(f"gpu{i}", (Speed(0, 1.0),)) for i in range(20))
    sites = [Site(host.name, 1, bps, bps) for host, bps in zip(hosts, [1e8, 1e8] + 18 * [1e10], strict=True)]
    scene = Scene(Workload(RESNET, 2560), hosts, LinkCosts(sites, GLOO))
    assert scene.kinds == (("gpu0", "gpu1"), tuple(f"gpu{i}" for i in range(2, 20)))
    assert advise(scene).without[0].hosts == tuple(f"gpu{i}" for i in range(2, 20))


def test_no_rank_is_predicted_with_a_single_sample():
    """As the trainer has it: BatchNorm can make nothing of one value."""
    hosts = tuple(HostSpeed(str(i), (Speed(0, ms),)) for i, ms in enumerate((1.0, 1.0, 7.5)))
    wire = LinkCosts([Site(host.name, 1, 1e9, 1e9) for host in hosts], GLOO)
    scene = Scene(Workload(SMALL, 16), hosts, wire)
    assert fastest_shares([host.speeds[0] for host in hosts], 16) == (8, 7, 1)
    assert scene.measured == (9, 7, 0)
    few = Scene(Workload(SMALL, 4), hosts, wire)
    assert few.equal == (2, 1, 1)
    assert {choice.policy for choice in choices(few, list(ways("exact")))} == {"measured"}
    assert {choice.policy for choice in choices(scene, list(ways("exact")))} == {"equal", "measured"}
    alone = Scene(Workload(SMALL, 1), hosts[:1], LinkCosts(wire.sites[:1], GLOO))
    assert alone.measured == (1,)


@pytest.mark.parametrize(("wire", "halves"), [("auto", {False, True}), ("fp32", {False}), ("bf16", {True})])
def test_local_travels_in_what_a_person_chose(wire, halves):
    assert {way.half_wire for way in ways("local", Kept(wire=wire))} == halves


def test_of_many_kinds_the_slowest_are_left_out_and_the_fastest_are_alone():
    hosts = tuple(HostSpeed(f"h{i:02}", (Speed(0, 1 + i),)) for i in range(40))
    wire = LinkCosts([Site(host.name, 1, 1e9, 1e9) for host in hosts], GLOO)
    kept = [[host.name for host in scene.hosts] for scene in fewer(Scene(Workload(SMALL, 64), hosts, wire))]
    assert len(kept) < 10
    assert ["h00"] in kept
    assert [host.name for host in hosts[:-1]] in kept
