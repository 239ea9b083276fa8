"""Block times that hosts have measured, in what a stage is predicted to take and in where the network is cut."""

from __future__ import annotations

import dataclasses

import pytest

from orchestrator.forecast import GLOO, HostSpeed, LinkCosts, Scene, Site, Workload, blocks_of, inputs_of, layers_of
from orchestrator.forecast.pipeline import Course, StageHost, chain_from, choose, stage_hosts, times_of, update_seconds
from orchestrator.forecast.pipeline.solve import solve
from orchestrator.planning import BlockTimes, Profile, RunRequest, kinds_of
from tests.support.plans import pair, plan
from trainer.shared import Speed, parse_settings

CIFAR = ("resnet152", (3, 32, 32), 10)
RESNET = chain_from(blocks_of(*CIFAR))
EARLY = 16
"""Blocks whose activations are large: layer1, layer2 and a few of layer3."""


def measured(sample_ms, early=1.0):
    """By multiplications, but `early` times as long in the first blocks; a sample takes sample_ms in all."""
    parts = [block.forward * (early if i < EARLY else 1.0) for i, block in enumerate(RESNET.blocks)]
    scale = sample_ms / 3 / sum(parts)
    task = tuple((0.0, scale * part) for part in parts)
    return BlockTimes(samples=(8, 16), forward=task, backward=task, weights=task, stretches=52)


def wire_of(hosts):
    return LinkCosts(tuple(Site(host.name, 1, 2.35e9, 2.35e9) for host in hosts), GLOO)


def test_a_stage_takes_what_its_blocks_took():
    forward, backward, weights = ((0.5, 1.0), (0.0, 2.0), (1.0, 0.5)), ((0, 1), (0, 1), (0, 3)), ((0, 1),) * 3
    blocks = BlockTimes(samples=(8, 16), forward=forward, backward=backward, weights=weights, stretches=3)
    chain = dataclasses.replace(RESNET, blocks=RESNET.blocks[:3])
    host = StageHost("a", 1, 99.0, 99.0, blocks=blocks)
    stage = Course((host, host), (0, 1), batch=16, count=4).stages(chain)[1]
    assert stage.forward.at(4) == pytest.approx(((0.0 + 2.0 * 4) + (1.0 + 0.5 * 4)) / 1000)
    assert (stage.backward.at(4), stage.weights.at(4)) == (pytest.approx(0.016), pytest.approx(0.008))


def test_block_times_of_another_network_are_left_aside():
    host = StageHost("a", 1, 4.0, 2.0)
    other = dataclasses.replace(host, blocks=BlockTimes(samples=(8, 16), stretches=1, **{
        task: ((1.0, 1.0),) for task in ("forward", "backward", "weights")}))  # fmt: skip
    assert times_of(RESNET, other) == times_of(RESNET, host)


def test_blocks_that_take_their_part_of_the_multiplications_change_nothing():
    both = (StageHost("a2000", 1, 0.0, 3.0), StageHost("v100", 1, 0.0, 1.2))
    same = tuple(dataclasses.replace(host, blocks=measured(0.99 * host.sample_ms)) for host in both)
    plain, found = (solve(RESNET, hosts, wire_of(hosts), 256) for hosts in (both, same))
    assert found.seconds == pytest.approx(plain.seconds)
    assert found.course.starts == plain.course.starts


def test_a_host_whose_early_blocks_are_slow_gets_fewer_of_them():
    """Two hosts of one speed as wholes. The one that is slow at the beginning does not begin; and where it has to, it
    holds fewer blocks than its speed alone would give it.
    """
    odd = StageHost("odd", 1, 0.0, 2.0, blocks=measured(1.98, early=3.0))
    even = StageHost("even", 1, 0.0, 2.0, blocks=measured(1.98))
    blind = tuple(dataclasses.replace(host, blocks=None) for host in (odd, even))
    found = solve(RESNET, (odd, even), wire_of((odd, even)), 256)
    assert found.course.hosts == (even, odd)
    unaware = solve(RESNET, blind, wire_of(blind), 256).course
    for hosts in ((odd, even), (even, odd)):
        as_cut = dataclasses.replace(unaware, hosts=hosts)
        assert found.seconds < 0.97 * update_seconds(RESNET, [as_cut], wire_of(hosts))
    starts_odd = min(
        (dataclasses.replace(found.course, hosts=(odd, even), starts=(0, cut)) for cut in range(1, 52)),
        key=lambda course: update_seconds(RESNET, [course], wire_of((odd, even))),
    )
    assert starts_odd.starts[1] < unaware.starts[1]


def test_the_slowest_ranks_blocks_count():
    slow, quick = measured(3.0), measured(1.0)
    speeds = (Speed(0.0, 1.0), Speed(0.0, 3.0))
    assert StageHost.of("a", speeds, None, (quick, slow)).blocks == slow
    assert StageHost.of("a", speeds).blocks is None


def test_the_choice_goes_by_them():
    speeds = {"a2000": 3.0, "v100": 1.2}
    hosts = tuple(HostSpeed(name, (Speed(0.0, ms),), blocks=(measured(2 * ms),)) for name, ms in speeds.items())
    scene = Scene(Workload(layers_of(*CIFAR), 256), hosts, wire_of(hosts))
    settings = parse_settings("resnet152_cifar", {"batch": "256", "strategy": "pipeline"})
    assert [host.blocks for host in stage_hosts(scene, RESNET)] == [host.blocks[0] for host in hosts]
    twice = choose(scene, settings, ()).samples_per_s
    plain = tuple(dataclasses.replace(host, blocks=()) for host in hosts)
    once = choose(dataclasses.replace(scene, hosts=plain), settings, ()).samples_per_s
    assert twice == pytest.approx(once / 2, rel=0.03)


def test_a_profile_brings_them():
    nodes, found = pair()
    settings = parse_settings("resnet152_cifar", {})
    made = plan(nodes, found, RunRequest("experiment", "resnet152_cifar", (), settings=settings))
    speed = {"samples": (2, 4), "step_ms": (1, 2), "fixed_ms": 4, "sample_ms": 2, "largest": 4}
    about = {"forward_ms": 1, "optim_ms": 1, "schema": 1, "node": "n41", "created": "2026-11-21T09:12:00+00:00"}
    kinds = kinds_of(made, found)
    for blocks in (measured(2.0), None):
        profiles = {rank: Profile(**dict(kind), **speed, **about, blocks=blocks) for rank, kind in kinds.items()}
        assert [host.blocks for host in inputs_of(made, profiles, bandwidth_bps=2.5e9).scene.hosts] == [
            (blocks,),
            (blocks,),
        ]
