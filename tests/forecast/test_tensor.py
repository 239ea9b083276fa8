"""Layers cut over the ranks: what a step takes and holds, and what a plan says of it."""

from __future__ import annotations

import dataclasses
import re
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.forecast import (
    GLOO,
    NCCL,
    HostSpeed,
    Kept,
    Layer,
    LinkCosts,
    Scene,
    Site,
    Way,
    Workload,
    activation_bytes,
    advise,
    choices,
    forecast_in,
    gradient_bytes,
    layers_of,
    meetings_of,
    memory_bytes,
    predict,
    sent_of,
    time_step,
    ways,
    weight_bytes,
)
from orchestrator.forecast.tensor_step import MOST_RANKS
from tests.support.plan_command import dry_run, orch, planned
from tests.support.simulate import simulate_step_ms
from trainer.shared import Speed, equal_shares
from trainer.tensor import survey

RESNET = layers_of("resnet152", (3, 32, 32), 10)
LENET = layers_of("lenet", (1, 28, 28), 10)
SMALL = (
    Layer(((9, 4),), 900.0, 40),
    Layer(((9,), (9,)), 225.0),
    Layer(((7, 9), (7,)), 630.0, 90),
    Layer(((3, 7),), 21.0, 7),
    Layer(((3,), (3,)), 3.0),
)
"""BatchNorm between layers, behind the last, and none behind the one in the middle."""
TENSOR = Way("tensor")
FREE = dataclasses.replace(GLOO, message_s=0.0, local_message_s=0.0, local_bps=1e18)


def scene_of(layers, batch, speeds, bps=2.35e9, costs=GLOO):
    """One rank a host."""
    hosts = tuple(HostSpeed(str(number), (speed,)) for number, speed in enumerate(speeds))
    sites = [Site(host.name, 1, bps, bps) for host in hosts]
    return Scene(Workload(layers, batch), hosts, LinkCosts(sites, costs))


def forecast(scene, way, shares):
    return predict(scene.job, scene.hosts, scene.wire, way, shares)


# ---- the network ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "shape"), [("resnet152", (3, 32, 32)), ("lenet", (1, 28, 28))])
def test_layers_take_give_and_are_cut_as_the_trainer_has_it(name, shape):
    shares = (73, 183, 5)
    known = [layer for layer in layers_of(name, shape, 10) if not layer.is_batch_norm]
    real = survey(name, shape, 10, shares)
    assert [layer.inputs for layer in known] == [prod(layer.takes) for layer in real]
    assert [layer.outputs for layer in known] == [prod(layer.gives) for layer in real]
    found = meetings_of(tuple(known), (Speed(0, 1),) * 3, shares, (2,), sent_of(TENSOR))
    parts = [tuple(bytes_ / 8 for bytes_ in meeting.parts_bytes) for meeting in found[: len(known)]]
    whole = [prod(layer.gives) // sum(layer.slices.channels) for layer in real]
    assert parts == [
        pytest.approx([count * each for count in layer.slices.channels])
        for layer, each in zip(real, whole, strict=True)
    ]
    added_up = [meeting.sum_bytes / 8 for meeting in found[len(known) :]]
    assert added_up == [prod(layer.takes) for layer in real[:0:-1]]


def test_a_rank_holds_its_slices_all_of_what_is_not_cut_and_all_activations():
    apart = gradient_bytes([layer for layer in RESNET if layer.is_batch_norm])
    held = weight_bytes(RESNET, (1, 3))
    assert sum(held) == gradient_bytes(RESNET) + apart
    assert (held[1] - apart) / (held[0] - apart) == pytest.approx(3, rel=0.01)
    assert weight_bytes(LENET, (0, 1)) == (0, gradient_bytes(LENET))
    assert memory_bytes(RESNET, (1, 3), 10) == tuple(3 * each + 10 * activation_bytes(RESNET) for each in held)


# ---- a step ---------------------------------------------------------------------------------------------------------


def test_resnet152_exchanges_so_much_in_so_many_parts():
    scene = scene_of(RESNET, 256, (Speed(0, 3), Speed(0, 1.2)))
    timed = time_step(RESNET, (Speed(0, 3), Speed(0, 1.2)), (1, 1), (256,), scene.wire, sent_of(TENSOR))
    assert timed.meetings == 156 + 155
    assert timed.wire_bytes == 4 * 256 * (460_298 + 450_048)
    # Gathers are one message, sums two.
    free = dataclasses.replace(scene.wire, costs=FREE)
    assert timed.step_s - time_step(
        RESNET, (Speed(0, 3), Speed(0, 1.2)), (1, 1), (256,), free, sent_of(TENSOR)
    ).step_s == pytest.approx(466 * GLOO.message_s)


def test_a_step_of_lenet_by_hand():
    """Two ranks, one computes a third of the channels; 64 samples; links of 1 Gbps that cost 1 ms a message."""
    scene = scene_of(LENET, 64, (Speed(5, 1.0), Speed(0, 0.5)), bps=1e9)
    work = [117_600, 240_000, 48_000, 10_080, 840]
    cut = [(2, 4), (5, 11), (40, 80), (28, 56), (3, 7)]  # of 6, 16, 120, 84 and 10 channels
    outputs, inputs = [4704, 1600, 120, 84, 10], [0, 1176, 400, 120, 84]
    step_ms, own_ms = 0.0, [0.0, 0.0]
    for passes, part in ((range(5), 0.33), (range(4, -1, -1), 0.66)):
        for layer in passes:
            each = [
                part * (fixed / 5 + 64 * sample * own / sum(cut[layer]) * work[layer] / sum(work))
                for fixed, sample, own in zip((5, 0), (1.0, 0.5), cut[layer], strict=True)
            ]
            own_ms = [sum(pair) for pair in zip(own_ms, each, strict=True)]
            if part == 0.66 and layer == 0:
                last = each
                continue
            if part == 0.33 and layer == 0:
                first = each
            else:
                step_ms += max(each)
            if part == 0.33:
                step_ms += 1 + 1000 * 8 * 4 * 64 * outputs[layer] * max(cut[layer]) / sum(cut[layer]) / 1e9
            else:
                step_ms += 2 + 1000 * 8 * 4 * 64 * inputs[layer] / 1e9
    # Nobody meets between the last gradients and the first outputs of the next step: the update lies there, too.
    step_ms += max(sum(ends) for ends in zip(last, [own / 99 for own in own_ms], first, strict=True))
    predicted = forecast(scene, TENSOR, (1, 2))
    assert predicted.step_ms == pytest.approx(step_ms, rel=1e-9)
    assert predicted.own_ms == pytest.approx([own / 0.99 for own in own_ms])


def test_micro_batches_meet_as_often_as_there_are_of_them():
    scene = scene_of(RESNET, 256, (Speed(0, 3), Speed(0, 1.2)))
    whole, parts = (forecast_in(scene, TENSOR, (73, 183), micro) for micro in (0, 4))
    assert parts.wire_bytes == pytest.approx(whole.wire_bytes)
    assert parts.step_ms - whole.step_ms == pytest.approx(3 * 466, rel=0.01)
    assert parts.own_ms == pytest.approx(whole.own_ms)


def test_memory_of_one_rank_cuts_the_batch_of_all():
    speeds = (Speed(10, 3, cap=100), Speed(0, 1.2))
    capped, asked = scene_of(RESNET, 256, speeds), scene_of(RESNET, 256, (Speed(10, 3), Speed(0, 1.2)))
    assert forecast_in(capped, TENSOR, (1, 1), 0) == forecast_in(asked, TENSOR, (1, 1), 3)


def test_half_and_amp_send_less():
    scene = scene_of(RESNET, 256, (Speed(0, 3), Speed(0, 1.2)))
    exact, half, amp = (
        forecast(scene, way, (1, 1)) for way in (TENSOR, Way("tensor", "half"), Way("tensor", half_wire=True))
    )
    assert half.wire_bytes == exact.wire_bytes / 2
    assert exact.wire_bytes - amp.wire_bytes == 2 * 256 * 460_298
    assert half.step_ms < amp.step_ms < exact.step_ms


def test_a_rank_alone_exchanges_nothing():
    scene = scene_of(RESNET, 256, (Speed(3, 3),))
    assert forecast(scene, TENSOR, (256,)).step_ms == forecast(scene, Way("ddp"), (256,)).step_ms


# ---- beside the simulator -------------------------------------------------------------------------------------------

SPEEDS = st.builds(Speed, st.floats(0, 20), st.floats(0.01, 5), st.none() | st.integers(20, 64))


@st.composite
def racks(draw, hosts, most_ranks):
    """Links alike; the ranks of a host as well."""
    ranks = draw(st.lists(st.integers(1, most_ranks), min_size=hosts[0], max_size=hosts[1]))
    bps = draw(st.floats(5e7, 1e10))
    costs = dataclasses.replace(draw(st.sampled_from([GLOO, NCCL])), message_s=draw(st.floats(0, 2e-3)))
    found = tuple(HostSpeed(str(i), tuple(draw(SPEEDS) for _ in range(n))) for i, n in enumerate(ranks))
    wire = LinkCosts([Site(host.name, n, bps, bps) for host, n in zip(found, ranks, strict=True)], costs)
    batch = draw(st.integers(1, 100))
    shares = draw(st.lists(st.integers(0, 9), min_size=sum(ranks), max_size=sum(ranks)).filter(any))
    return Scene(Workload(SMALL, batch), found, wire), shares


WAYS = (TENSOR, Way("tensor", "half"), Way("tensor", half_wire=True))


@settings(max_examples=40, deadline=None)
@given(racks(hosts=(2, 2), most_ranks=1), st.sampled_from(WAYS))
def test_between_two_hosts_the_simulator_says_the_same(rack, way):
    scene, shares = rack
    played = simulate_step_ms(scene.job, scene.hosts, scene.wire, way, shares)
    assert played == pytest.approx(forecast(scene, way, shares).step_ms, rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(racks(hosts=(2, 4), most_ranks=2), st.sampled_from(WAYS))
def test_between_more_the_simulator_is_near(rack, way):
    """Its links serve one message after the other; the forecast lets those of other pairs pass meanwhile."""
    scene, shares = rack
    played = simulate_step_ms(scene.job, scene.hosts, scene.wire, way, shares)
    assert 0.5 <= played / forecast(scene, way, shares).step_ms <= 2


@settings(max_examples=40, deadline=None)
@given(racks(hosts=(1, 4), most_ranks=2), st.sampled_from(WAYS), st.floats(1, 20))
def test_faster_links_never_slow_it_and_no_step_is_shorter_than_its_slowest_rank(rack, way, factor):
    scene, shares = rack
    predicted = forecast(scene, way, shares)
    assert forecast(scene.with_links(factor), way, shares).step_ms <= predicted.step_ms * (1 + 1e-12)
    assert predicted.step_ms >= max(predicted.own_ms) * (1 - 1e-9)


# ---- among the other ways -------------------------------------------------------------------------------------------


def test_it_is_preferred_where_it_is_far_the_best_way_and_nowhere_else():
    """The gradient is large, the batch small, and a message costs little; its predictions are not relied on further."""
    slow, near = (scene_of(RESNET, batch, (Speed(0, 3), Speed(0, 1.2))) for batch in (256, 8))
    few = scene_of(RESNET, 8, (Speed(0, 3), Speed(0, 1.2)), costs=dataclasses.replace(GLOO, message_s=1e-4))
    assert forecast(near, Way("ddp"), (4, 4)).step_ms / 2 < forecast(near, TENSOR, (4, 4)).step_ms
    assert forecast(near, TENSOR, (4, 4)).step_ms < forecast(near, Way("ddp"), (4, 4)).step_ms
    assert advise(near).best["exact"].forecast.way.strategy == "ddp"
    assert advise(slow).best["exact"].forecast.way.strategy == "ddp"
    assert advise(scene_of(LENET, 256, (Speed(0, 3), Speed(0, 1.2)))).best["exact"].forecast.way.strategy == "ddp"
    assert advise(few).best["exact"].forecast.way == TENSOR
    assert advise(few, "exact", Kept(slices=False)).best["exact"].forecast.way.strategy == "ddp"
    assert forecast(few, TENSOR, (4, 4)).step_ms < min(
        forecast(few, way, (4, 4)).step_ms for way in ways("exact", Kept(slices=False))
    )


def test_it_is_tried_over_few_ranks():
    for ranks, tried in ((1, False), (2, True), (MOST_RANKS + 1, False)):
        scene = scene_of(LENET, 256, (Speed(0, 1),) * ranks)
        found = choices(scene, [Way("ddp"), TENSOR])
        assert (TENSOR in [choice.forecast.way for choice in found]) == tried


def test_inside_one_host_links_cost_less():
    site = LinkCosts([Site("one", 2, float("inf"), float("inf"))], NCCL)
    scene = Scene(Workload(RESNET, 256), (HostSpeed("one", (Speed(0, 3),) * 2),), site)
    apart = scene_of(RESNET, 256, (Speed(0, 3),) * 2)
    inside = forecast(scene, TENSOR, equal_shares(256, 2))
    assert inside.step_ms < 0.3 * forecast(apart, TENSOR, equal_shares(256, 2)).step_ms
    assert inside.limited_by == "compute"


# ---- what a plan says -----------------------------------------------------------------------------------------------

GIVEN = ("--set", "strategy=tensor", "--set", "shares=a2000=73,v100=183")


@pytest.mark.usefixtures("home")
def test_a_plan_says_the_slices_and_what_it_predicts():
    plan = dry_run(*GIVEN)
    (said,) = (note for note in plan.notes if note.startswith("tensor: "))
    assert said.startswith("tensor: v100 computes 71 %, a2000 29 % of each layer's channels, ")
    assert "932 MB of activations" in said and " 311 exchanges" in said
    assert plan.prediction.samples_per_s == pytest.approx(75, rel=0.02)
    assert plan.prediction.words.endswith("limited by the network")
    assert any(words.startswith("tensor: ") and "BatchNorm" in words for words in plan.prediction.basis)
    assert any(each.what == "v100 alone" for each in plan.faster)
    shown = re.sub(r"\s+", " ", orch("run", "--exp", "resnet152_cifar", *GIVEN, "--dry-run").stdout)
    assert "256 samples a step on every rank, 29 % of each layer's channels" in shown
    parts = dry_run(*GIVEN, "--set", "accumulate=2")
    assert any(" 622 exchanges" in note for note in parts.notes)
    assert parts.prediction.step_ms == pytest.approx(plan.prediction.step_ms + 466, rel=0.01)


@pytest.mark.usefixtures("home")
def test_it_has_a_row_beside_the_others():
    document = planned()
    (tensor, *others) = [way for way in document["ways"] if way["way"]["strategy"] == "tensor"]
    assert {way["way"]["fidelity"] for way in (tensor, *others)} == {"exact", "half"}
    assert document["best"]["exact"]["way"]["strategy"] == "ddp"
    (row,) = [line for line in orch("plan", "--exp", "resnet152_cifar").stdout.splitlines() if " tensor " in line]
    assert row.startswith("exact *") and "network" in row and f"{tensor['step_ms']:,.0f} ms" in row
    assert not [way for way in planned("--set", "sync_bn=true")["ways"] if way["way"]["strategy"] == "tensor"]


def test_auto_takes_it_where_it_is_best_and_never_with_hosts_that_may_leave(home):
    """Two ranks of one host, which no pipeline cuts, and a batch that is small beside the gradient."""
    cluster = home.cluster()
    home.save_cluster(
        cluster.model_copy(update={"nodes": tuple(n.model_copy(update={"ranks": 2}) for n in cluster.nodes)}),
        current=True,
    )
    few = ("--set", "strategy=auto", "--set", "batch=8", "--nodes", "v100")
    plan = dry_run(*few)
    assert plan.settings["strategy"] == "tensor"
    assert any(note.startswith("strategy=auto: strategy=tensor (exact)") for note in plan.notes)
    assert dry_run(*few, "--set", "batch=256").settings["strategy"] == "ddp"
