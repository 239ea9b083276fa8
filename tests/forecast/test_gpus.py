"""Hardware that is not here, and clusters made of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from orchestrator.errors import UsageError
from orchestrator.forecast import (
    Layer,
    activation_bytes,
    blocks_of,
    estimate,
    failures,
    imagine,
    is_imagined,
    layers_of,
    parse_groups,
)
from orchestrator.forecast.pipeline import StageHost, chain_from, times_of
from orchestrator.hosts import all_cards, cards, find_card, read_cards
from trainer.compute.models import build_model
from trainer.shared import parse_settings
from trainer.strategies import cross_entropy_sum

RESNET = layers_of("resnet152", (3, 32, 32), 10)


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("RTX A2000", "A2000"),
        ("NVIDIA RTX A2000 12GB", "A2000"),
        ("NVIDIA RTX A2000 6GB", "A2000 6GB"),
        ("Tesla V100-16GB", "V100"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("NVIDIA A16", "A16"),
        ("NVIDIA GeForce RTX 3090", "3090"),
        ("RTX3090", "3090"),
        ("GeForce GTX 1080 Ti", "1080Ti"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("A160", None),
        ("", None),
    ],
)
def test_a_label_means_a_card(label, name):
    found = find_card(label)
    assert (found.name if found else None) == name


OURS = read_cards(Path(cards.__file__).with_name("cards.json"))
"""The catalogue as users have it; the other tests have a copy of their own."""
H100_MS = {
    "none": {2: 9.4, 32: 12.5, 256: 21.1, 1024: 80.9, 2048: 141.0},
    "bf16": {256: 12.0, 2048: 0.45 * 141.0},
    "fp16": {256: 11.4},
}
"""A step of ResNet-152 at 32 px by samples (docs/gpu.md, "Measured")."""


def ours(name, layers=RESNET, amp="none"):
    return estimate(next(card for card in OURS.cards if card.name == name), layers, amp)


def test_a_card_is_found_by_its_own_name():
    for gpu in all_cards().cards:
        assert find_card(gpu.name) == gpu
    assert {card.name for card in OURS.cards} == {card.name for card in all_cards().cards}


@pytest.mark.parametrize("amp", H100_MS)
def test_an_h100_takes_what_was_measured_within_15_percent(amp):
    for samples, measured_ms in H100_MS[amp].items():
        assert ours("H100", amp=amp).speed.step_ms(samples) == pytest.approx(measured_ms, rel=0.15)


def test_cards_reach_their_published_rates_of_resnet50_within_10_percent():
    layers = layers_of("resnet50", (3, 224, 224), 1000)
    for name, amp, published in (("V100", "none", 374), ("V100", "fp16", 841), ("3090", "none", 472)):
        assert 1000 / ours(name, layers, amp).speed.sample_ms == pytest.approx(published, rel=0.1)


def test_16_bits_are_faster_on_tensor_cores_only_and_bf16_is_not_emulated():
    fp32, fp16 = (ours("V100", amp=amp).speed for amp in ("none", "fp16"))
    assert fp16.step_ms(256) < 0.65 * fp32.step_ms(256) and fp16.cap > 1.9 * fp32.cap
    assert ours("P100", amp="fp16").speed.sample_ms == ours("P100").speed.sample_ms
    with pytest.raises(UsageError, match="V100 only emulates bf16"):
        ours("V100", amp="bf16")
    assert ours("A2000", amp="bf16").speed == ours("A2000", amp="fp16").speed


def test_launches_are_the_least_time_of_a_micro_batch_without_graphs():
    chain, found = chain_from(blocks_of("resnet152", (3, 32, 32), 10)), ours("V100")
    host = StageHost.of("v100", (found.speed,), launch_ms=found.launch_ms)
    line = times_of(chain, host).forward.line(0, len(chain.blocks))
    assert line.at(1) == pytest.approx(0.99 * found.launch_ms / 3000)
    assert line.at(1) > 1.5 * (line.fixed_s + line.sample_s)
    assert line.at(1024) == pytest.approx(line.fixed_s + 1024 * line.sample_s)


def test_more_memory_bandwidth_is_more_speed():
    by_bandwidth = sorted(all_cards().cards, key=lambda gpu: gpu.gb_per_s)
    times = [estimate(gpu, RESNET, "none").speed.step_ms(256) for gpu in by_bandwidth]
    assert times == sorted(times, reverse=True)


def test_a_network_of_resnet50s_work_runs_at_the_rule():
    """0.50 images/s per GB/s, which is what ResNet-50 at 224 px reaches: a V100 450."""
    speed = estimate(find_card("V100"), RESNET, "none").speed
    work = sum(layer.work for layer in RESNET)
    assert 1000 / speed.sample_ms * work / 4.09e9 == pytest.approx(450)


def test_what_a_sample_takes_in_memory_is_about_what_torch_keeps():
    """3,931,904 bytes by `trainer.paced.standin.dissect`."""
    assert activation_bytes(RESNET) == pytest.approx(3_931_904, rel=0.1)


@pytest.mark.parametrize(("tokens", "vocabulary"), [(256, 256), (256, 8192), (512, 256)])
def test_what_a_sample_of_text_takes_in_memory_is_about_what_torch_keeps(tokens, vocabulary):
    network, kept = build_model("gpt_small", (1, 1, tokens), vocabulary), {}
    weights = {weight.untyped_storage().data_ptr() for weight in network.parameters()}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    numbers = torch.zeros(1, 1, 1, tokens, dtype=torch.uint8)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = network(numbers)
        cross_entropy_sum(outputs, numbers[:, 0, 0].long())
    keep(outputs)
    found = sum(storage.nbytes() for place, storage in kept.items() if place not in weights)
    assert activation_bytes(layers_of("gpt_small", (1, 1, tokens), vocabulary)) == pytest.approx(found, rel=0.05)


def test_failures_grow_with_the_hosts_and_checkpoints_come_at_youngs_interval():
    small, large = failures(10, 5e8), failures(1000, 5e8)
    assert large.a_day == pytest.approx(100 * small.a_day) == pytest.approx(1000 / 365)
    assert large.every_s == pytest.approx(math.sqrt(2 * 1.0 * 86_400 * 365 / 1000))
    assert 0 < small.lost < large.lost < 0.1


def test_hosts_that_are_not_there_are_written_as_groups():
    groups = parse_groups("500xA2000, 2x4xA16,1x3090")
    assert [(group.hosts, group.gpus, group.gpu.name) for group in groups] == [
        (500, 1, "A2000"),
        (2, 4, "A16"),
        (1, 1, "3090"),
    ]
    scene = imagine(groups, RESNET, 2.5e9, parse_settings("resnet152_cifar", {"batch": "1000"}))
    assert (len(scene.hosts), scene.wire.ranks) == (503, 509)
    assert {site.up_bps for site in scene.wire.sites} == {0.94 * 2.5e9}
    assert [scene.hosts[number].kind for number in (0, 500, 502)] == ["A2000", "4xA16", "3090"]
    assert [group.kind for group in parse_groups("7x4xA16")] == ["4xA16"]


@pytest.mark.parametrize("text", ["500xB1000", "x", "0xA16", "2x0xA16", "3xA16,", "30000xA16", "-1xA16", "1xA16;ls"])
def test_what_is_no_group_is_refused(text):
    with pytest.raises(UsageError):
        parse_groups(text)


def test_a_network_too_large_for_a_gpu_is_refused():
    huge = (Layer(((100_000, 20_000),), 1e9),)
    with pytest.raises(UsageError, match="not one sample fits into the 16 GiB of an A16"):
        imagine(parse_groups("1xA16"), huge, 1e9, parse_settings("resnet152_cifar", {}))


def test_names_of_nodes_are_no_groups():
    assert is_imagined("500xA2000")
    assert not is_imagined("a2000,v100")
