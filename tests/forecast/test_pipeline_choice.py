"""The pipeline that a job's settings and hosts come to."""

from __future__ import annotations

import dataclasses

import pytest

from orchestrator.forecast import (
    GLOO,
    NCCL,
    Block,
    HostSpeed,
    Layer,
    LinkCosts,
    Scene,
    Site,
    Workload,
    advise,
    imagine,
    layers_in,
    layers_of,
    parse_groups,
)
from orchestrator.forecast.pipeline import as_set, choose
from orchestrator.forecast.pipeline.choice import CHOSEN, chain_for
from trainer.shared import Speed, parse_settings

LAYERS = layers_of("resnet152", (3, 32, 32), 10)
BATCH_256 = {"batch": "256", "strategy": "pipeline"}


def settings_of(**pairs):
    return parse_settings("resnet152_cifar", {**BATCH_256, **{key: str(value) for key, value in pairs.items()}})


def scene_of(batch=256, cap=None, **speeds):
    hosts = tuple(HostSpeed(name, (Speed(0.0, 1000 / speed, cap),)) for name, speed in speeds.items())
    wire = LinkCosts(tuple(Site(name, 1, 2.35e9, 2.35e9) for name in speeds), GLOO)
    return Scene(Workload(LAYERS, batch), hosts, wire)


def test_of_two_unequal_hosts_a_pipeline_is_the_fastest_exact_way_and_a_run_takes_it_up():
    scene, settings = scene_of(a2000=333, v100=833), settings_of()
    found = choose(scene, settings, ())
    assert found.samples_per_s > 0.95 * (333 + 833)
    assert found.samples_per_s > 3.5 * advise(scene).best["exact"].samples_per_s
    taken = dataclasses.replace(settings, **found.settings)
    assert as_set(scene, taken).timed == found.timed
    assert found.limited_by == "slowest stage"
    words = list(found.words)
    assert len(words) == 2
    assert all("blocks" in each and "weights" in each for each in words)


def test_what_a_person_has_chosen_stays():
    settings = settings_of(accumulate=16, in_flight=2, smaller_first=0.2, schedule="1f1b")
    found = choose(scene_of(a2000=333, v100=833), settings)
    assert {key: found.settings[key] for key in CHOSEN} == {
        "accumulate": 16,
        "in_flight": 2,
        "smaller_first": 0.2,
        "schedule": "1f1b",
    }
    assert found.samples_per_s < choose(scene_of(a2000=333, v100=833), settings, ()).samples_per_s


def of_catalogue(**pairs):
    settings = settings_of(**pairs)
    return imagine(parse_groups("1xA2000,1xV100"), LAYERS, 2.5e9, settings), settings


def test_the_first_micro_batch_is_smaller_if_that_is_at_least_a_hundredth_faster():
    scene, settings = of_catalogue(batch=2048)
    found, equal = choose(scene, settings, ()), choose(scene, settings, ("smaller_first",))
    assert found.settings["smaller_first"] == 0.3
    assert "smaller_first" not in equal.settings
    assert found.samples_per_s >= 1.01 * equal.samples_per_s
    assert found.gain == pytest.approx(found.samples_per_s / equal.samples_per_s - 1, abs=0.005)
    taken = dataclasses.replace(settings, **found.settings)
    assert as_set(scene, taken).timed == found.timed
    sizes = [route.size for route in found.courses[0].routes()]
    assert sizes[0] < 0.8 * min(sizes[1:])


@pytest.mark.parametrize(
    "asked", [{"batch": 1024}, {"batch": 1536, "amp": "fp16"}, {"batch": 2048, "fidelity": "late"}]
)
def test_micro_batches_are_equal_if_a_smaller_first_does_not_help(asked):
    found = choose(*of_catalogue(**asked), ())
    assert found.micro_batches > 1
    assert "smaller_first" not in found.settings
    assert found.gain == 0


@pytest.mark.parametrize("batch", [256, 1024, 2048])
@pytest.mark.parametrize("amp", ["none", "fp16"])
def test_hardly_any_number_of_micro_batches_that_a_person_may_set_is_faster(amp, batch):
    scene, settings = of_catalogue(batch=batch, amp=amp)
    found = choose(scene, settings, ()).samples_per_s
    for accumulate in range(1, 9):
        asked = dataclasses.replace(settings, accumulate=accumulate)
        assert choose(scene, asked, ("accumulate",)).samples_per_s < found / 0.975


def test_batch_norm_sees_as_many_samples_in_a_smaller_first_micro_batch_unless_a_person_allows_fewer():
    scene, settings = scene_of(32, a2000=333, v100=833), settings_of(batch=32, accumulate=4)
    found, asked = choose(scene, settings, ()), choose(scene, settings, ("accumulate",))
    assert [choice.settings["accumulate"] for choice in (found, asked)] == [4, 4]
    assert "smaller_first" not in found.settings
    assert 2 <= asked.courses[0].routes()[0].size < 8


def test_a_smaller_first_micro_batch_that_memory_does_not_hold_is_not_chosen():
    settings = settings_of(batch=2048, accumulate=8)
    scene = imagine(parse_groups("1xA2000,1xV100"), LAYERS, 1e9, settings)
    equal, free = (choose(scene, settings, chosen) for chosen in (("accumulate", "smaller_first"), ("accumulate",)))
    held = {stage.host: stage.memory_bytes for stage in equal.timed.stages[0]}
    assert free.gain > 0
    assert any(stage.memory_bytes > held[stage.host] for stage in free.timed.stages[0])
    hosts = tuple(dataclasses.replace(host, memory_bytes=held[host.name]) for host in scene.hosts)
    tight = choose(dataclasses.replace(scene, hosts=hosts), settings, ("accumulate",))
    assert all(stage.memory_bytes <= held[stage.host] for stage in tight.timed.stages[0])


def test_at_the_catalogues_speeds_a_pipeline_is_slower_than_the_fastest_host_alone():
    scene = imagine(parse_groups("1xA2000,1xV100"), LAYERS, 2.5e9, settings_of())
    assert choose(scene, settings_of(), ()).samples_per_s < max(scene.alone.values())


def test_a_host_that_holds_few_samples_gets_what_it_can_hold():
    found = choose(scene_of(cap=8, a2000=333, v100=833), settings_of(), ())
    needs = [stage.memory_bytes for stages in found.timed.stages for stage in stages]
    assert all(need <= host.memory_bytes for need, host in zip(needs, found.courses[0].hosts, strict=True))


def test_without_batch_norm_a_micro_batch_may_be_one_sample():
    """GPT-2's 124 M parameters in 12 blocks, 1,024 tokens of 768 numbers a sample, at 14 and 40 k tokens/s."""
    layer = Layer(((7_087_872,),), 7.1e6 * 1024)
    norm = Layer(((768,), (768,)), 768.0 * 1024, batch_norm=False)
    blocks = tuple(Block((norm, layer), 768 * 1024) for _ in range(12))
    hosts = tuple(HostSpeed(name, (Speed(5.0, ms),)) for name, ms in (("a2000", 73.0), ("v100", 25.6)))
    wire = LinkCosts(tuple(Site(host.name, 1, 2.35e9, 2.35e9) for host in hosts), GLOO)
    scene = Scene(Workload(layers_in(blocks), 16, blocks), hosts, wire)
    found = choose(scene, settings_of(batch=16), ())
    assert found.settings["accumulate"] > 2
    named = [dataclasses.replace(block, layers=(dataclasses.replace(norm, batch_norm=True), layer)) for block in blocks]
    with_norm = Scene(Workload(layers_in(named), 16, tuple(named)), hosts, wire)
    assert choose(with_norm, settings_of(batch=16), ()).settings["accumulate"] <= 2
    assert found.samples_per_s > 1.15 * choose(with_norm, settings_of(batch=16), ()).samples_per_s


def test_late_is_as_fast_as_both_hosts_with_the_whole_batch_in_one_micro_batch():
    """At the speeds of CUDA graphs, where an exact pipeline pays the fixed time of each micro-batch."""
    hosts = tuple(HostSpeed(name, (Speed(*ms),)) for name, ms in (("a2000", (15.0, 0.38)), ("v100", (10.0, 0.19))))
    wire = LinkCosts(tuple(Site(host.name, 1, 2.35e9, 2.35e9) for host in hosts), NCCL)
    scene = Scene(Workload(LAYERS, 256), hosts, wire)
    exact, late, mean = (
        choose(scene, settings_of(**pairs), ())
        for pairs in ({}, {"fidelity": "late", "late_after": 0}, {"fidelity": "late"})
    )
    whole = sum(scene.alone.values())
    assert late.settings["accumulate"] == 1
    assert late.samples_per_s > 0.85 * whole
    assert exact.samples_per_s < 0.66 * whole
    assert exact.samples_per_s < mean.samples_per_s < late.samples_per_s
    assert (exact.exact_part, late.exact_part, mean.exact_part) == (0, 0, pytest.approx(0.1))
    settings = dataclasses.replace(settings_of(fidelity="late", late_after=0), stages=late.settings["stages"])
    assert as_set(scene, settings).timed == late.timed  # a run without `accumulate` has one micro-batch


def test_late_pipelines_side_by_side_add_up_their_gradients():
    scene = scene_of(a=333, b=333, c=833, d=833)
    found = choose(scene, settings_of(fidelity="late", accumulate=2), ())
    beside = as_set(
        scene,
        settings_of(fidelity="late", accumulate=2, stages="c:0-35,a:36-51|d:0-35,b:36-51"),
    )
    assert len(beside.courses) == 2
    assert found.samples_per_s >= beside.samples_per_s > 0


def test_local_has_pipelines_beside_each_other_that_average():
    settings = settings_of(strategy="ddp", fidelity="local", local_steps=16)
    found = choose(scene_of(a=333, b=333, c=833, d=833), settings, ())
    assert len(found.courses) == 2
    often = choose(scene_of(a=333, b=333, c=833, d=833), dataclasses.replace(settings, local_steps=1), ())
    assert often.samples_per_s < found.samples_per_s
    assert choose(scene_of(a=333, b=833), settings, ()) is None


def test_pipelines_beside_each_other_take_the_samples_that_shares_give_their_first_hosts():
    scene = scene_of(2048, a=333, b=430, c=833, d=1400)
    settings = settings_of(batch=2048, fidelity="local", local_steps=32)
    found = choose(scene, settings, ())
    assert [course.batch for course in found.courses] == [1185, 863]
    taken = dataclasses.replace(settings, **found.settings)
    assert as_set(scene, taken).timed == found.timed
    equal = as_set(scene, dataclasses.replace(taken, shares="equal"))
    assert [course.batch for course in equal.courses] == [1024, 1024]
    assert equal.samples_per_s < 0.9 * found.samples_per_s
    by_speed = as_set(scene, dataclasses.replace(taken, shares="measured"))
    assert sum(course.batch for course in by_speed.courses) == 2048
    assert by_speed.courses[0].batch > by_speed.courses[1].batch


def test_a_person_who_gives_shares_sees_their_prediction():
    scene = scene_of(2048, a=333, b=430, c=833, d=1400)
    settings = settings_of(batch=2048, fidelity="local", local_steps=32, shares="a=0,b=0,c=1,d=3")
    found = choose(scene, settings, ("shares",))
    assert [course.batch for course in found.courses] == [1536, 512]
    assert found.samples_per_s < choose(scene, settings, ()).samples_per_s
    others = dataclasses.replace(settings, shares="x=1,d=1")
    assert choose(scene, others, ("shares",)) is None


def test_a_cut_leaves_room_for_the_state_of_the_optimiser():
    scene = scene_of(a2000=333, v100=833)
    needs = [stage.memory_bytes for stage in choose(scene, settings_of(), ()).timed.stages[0]]
    hosts = tuple(dataclasses.replace(host, memory_bytes=max(needs)) for host in scene.hosts)
    tight = dataclasses.replace(scene, hosts=hosts)
    sgd, adamw = (choose(tight, settings_of(optimizer=name), ()) for name in ("sgd", "adamw"))
    for found, states in ((sgd, 3), (adamw, 4)):
        course, chain = found.courses[0], chain_for(tight, settings_of())
        for number, (first, end) in enumerate(zip(course.starts, course.ends(chain), strict=True)):
            kept = course._held_samples(number) * chain.kept_bytes(first, end)
            assert states * chain.weight_bytes(first, end) + kept <= max(needs)
    assert adamw.courses != sgd.courses


def test_a_single_host_is_no_pipeline():
    assert choose(scene_of(v100=833), settings_of(), ()) is None


@pytest.mark.parametrize(
    ("stages", "message"),
    [("v100:0-31,a2000:32-50", "block 51"), ("v100:0-31,b:32-51", "a2000, b"), ("v100:0-51", "a2000")],
)
def test_stages_that_do_not_fit_are_refused(stages, message):
    with pytest.raises(ValueError, match=message):
        as_set(scene_of(a2000=333, v100=833), settings_of(stages=stages, accumulate=8))
