"""How devices compute: what `auto` turns out to be, and that what it changes is the order of sums alone."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")
import torch
from torch import nn

from tests.support.gloo_ranks import Gang, group_of
from tests.support.sums import UNAVAILABLE
from trainer.compute import arithmetic
from trainer.compute.arithmetic import (
    Devices,
    Fp16,
    Full,
    build_precision,
    choose_arithmetic,
    has_fused_sgd,
    use_arithmetic,
)
from trainer.compute.timer import CpuTimer
from trainer.setup import build_optimizer
from trainer.shared import STRATEGIES, SettingsError, TrainError, parse_settings
from trainer.strategies import build_strategy, local_loss

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
AMPERES, MIXED, WITH_CPU = Devices(True, True), Devices(True, False), Devices(False, False)
NAMES = ("tf32", "channels_last", "cudnn_benchmark", "fused_sgd")


def chosen(monkeypatch, device, everyone, capability=(8, 6), **asked):
    """The settings that are on."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(arithmetic, "has_fused_sgd", lambda device: True)
    settings = choose_arithmetic(parse_settings("resnet152_cifar", asked), device, everyone)
    assert {getattr(settings, name) for name in NAMES} <= {"on", "off"}
    return {name for name in NAMES if getattr(settings, name) == "on"}


def test_ranks_compute_alike_unless_asked_otherwise(monkeypatch):
    assert chosen(monkeypatch, GPU, AMPERES) == {"tf32", "fused_sgd"}
    a2000, v100 = chosen(monkeypatch, GPU, MIXED), chosen(monkeypatch, GPU, MIXED, (7, 0))
    assert a2000 == v100 == {"fused_sgd"}
    assert "tf32" in chosen(monkeypatch, GPU, MIXED, tf32="on")
    assert "tf32" not in chosen(monkeypatch, GPU, MIXED, (7, 0), tf32="on")
    assert "channels_last" in chosen(monkeypatch, GPU, MIXED, (7, 0), amp="fp16")
    assert "channels_last" not in chosen(monkeypatch, GPU, WITH_CPU, amp="fp16")


def test_a_cpu_computes_as_ever_unless_asked_otherwise(monkeypatch):
    assert chosen(monkeypatch, CPU, WITH_CPU) == set()
    asked = dict.fromkeys(NAMES, "on")
    assert chosen(monkeypatch, CPU, WITH_CPU, **asked) == {"channels_last", "fused_sgd"}


def test_algorithms_are_timed_only_where_that_is_asked_for(monkeypatch):
    assert "cudnn_benchmark" not in chosen(monkeypatch, GPU, AMPERES, shares="auto")
    assert "cudnn_benchmark" in chosen(monkeypatch, GPU, AMPERES, cudnn_benchmark="on")
    assert "cudnn_benchmark" in chosen(monkeypatch, GPU, AMPERES, shares="auto", cudnn_benchmark="on")


def test_weights_in_pieces_keep_their_order_in_memory(monkeypatch):
    assert chosen(monkeypatch, GPU, AMPERES, strategy="fsdp", amp="bf16") == {"tf32"}
    with pytest.raises(SettingsError, match=r"channels_last: strategy fsdp .*\nfused_sgd: strategy fsdp"):
        parse_settings("resnet152_cifar", {"strategy": "fsdp", "channels_last": "on", "fused_sgd": "on"})


def test_a_torch_without_a_fused_sgd_says_so_if_asked_for_it(monkeypatch):
    monkeypatch.setattr(torch.optim, "SGD", lambda params, lr: None)
    assert not has_fused_sgd(CPU)
    with pytest.raises(TrainError, match=r"fused_sgd: torch .* lacks it for cpu"):
        choose_arithmetic(parse_settings("mnist_lenet", {"fused_sgd": "on"}), CPU, WITH_CPU)


def test_what_torch_computes_with_is_set_and_not_left_to_its_version():
    cudnn, matmul, is_new = torch.backends.cudnn, torch.backends.cuda.matmul, hasattr(torch.backends.cudnn, "conv")
    for value in ("off", "on"):  # the last one is torch's own
        use_arithmetic(parse_settings("mnist_lenet", {"tf32": value, "cudnn_benchmark": value}))
        found = (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision) if is_new else (cudnn.allow_tf32,) * 2
        assert found == (("tf32" if value == "on" else "ieee") if is_new else value == "on",) * 2
        assert (matmul.fp32_precision == "ieee") if is_new else not matmul.allow_tf32
        assert cudnn.benchmark == (value == "on")
    cudnn.benchmark = False


def test_a_gpu_that_only_emulates_bf16_is_refused_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-PCIE-16GB")
    with pytest.raises(TrainError, match=r"Tesla V100-PCIE-16GB \(compute capability 7\.0\) .* use amp=fp16"):
        build_precision("bf16", GPU, None)


# ---- the same steps, but for the order of sums ---------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
        self.classifier = nn.Linear(4 * 6 * 6, 3)

    def forward(self, images):
        return self.classifier(self.features(images).flatten(1))


def trained(settings, group, rank, updates=3):
    """The weights after a few updates of half of 8 samples."""
    torch.manual_seed(0)
    model = arithmetic.arranged(Net().double(), settings)
    strategy = build_strategy(settings, model, group, CpuTimer())
    optimizer = build_optimizer(settings, model)
    for update in range(updates):
        generator = torch.Generator().manual_seed(update)
        images = torch.randn(8, 3, 8, 8, generator=generator, dtype=torch.float64)
        own, labels = slice(rank * 4, rank * 4 + 4), torch.arange(8) % 3
        optimizer.zero_grad(set_to_none=True)
        strategy.backward(local_loss(strategy.model, images[own], labels[own]), 4, 8)
        optimizer.step()
        strategy.after_update()
    return torch.cat([weight.detach().flatten() for weight in strategy.whole().parameters()])


UNLIKE = ("none", "dp", "fsdp", "pipeline", "tensor")
WAYS = [{"strategy": name} for name in STRATEGIES if name not in UNLIKE and name not in UNAVAILABLE]
WAYS += [
    {"strategy": "allreduce_flat", "fidelity": "compressed", "compress_after": "1"},
    {"strategy": "ddp", "fidelity": "local", "local_steps": "2", "local_overlap": "1"},
    {"strategy": "allreduce", "fidelity": "half"},
]


def distances(rank, _):
    """By way: how far channels_last and fused SGD lead from the plain steps, as a part of them."""
    group = group_of(2)
    if rank > 1:
        return None
    found = {}
    for way in WAYS:
        pairs = {"bucket_mib": "0.0001", **way}
        plain = trained(parse_settings("mnist_lenet", pairs), group, rank)
        other = parse_settings("mnist_lenet", {**pairs, "channels_last": "on", "fused_sgd": "on"})
        found[str(way)] = ((trained(other, group, rank) - plain).norm() / plain.norm()).item()
    return found


def test_channels_last_and_fused_sgd_make_the_same_steps_in_every_way(tmp_path):
    gang = Gang(tmp_path)
    try:
        found = gang.run(distances, None, timeout_s=120)[0]
    finally:
        gang.end()
    assert len(found) == len(WAYS)
    assert {way: far for way, far in found.items() if far > (1e-2 if "half" in way else 1e-9)} == {}


def test_an_update_that_fp16_leaves_out_leaves_nothing_behind():
    """The very first one, too: torch's own fused SGD would go on from memory as it found it."""
    settings = parse_settings("mnist_lenet", {"fused_sgd": "on"})
    models = [nn.Linear(64, 64), nn.Linear(64, 64)]
    models[1].load_state_dict(models[0].state_dict())
    with torch.no_grad():
        garbage = [torch.full_like(weight, 1e30) for weight in models[0].parameters()]
    del garbage  # what an allocator hands out next
    fused, plain = (
        build_optimizer(settings, models[0]),
        torch.optim.SGD(models[1].parameters(), lr=settings.lr, momentum=0.9),
    )
    for weight in models[0].parameters():
        weight.grad = torch.full_like(weight, float("inf"))
    fused.grad_scale, fused.found_inf = None, torch.ones(1)
    fused.step()
    fused.found_inf = torch.zeros(1)
    for _ in range(2):
        for model, optimizer in zip(models, (fused, plain), strict=True):
            for weight in model.parameters():
                weight.grad = torch.ones_like(weight)
            optimizer.step()
    for own, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(own, other, rtol=1e-6, atol=1e-7)


def test_a_rank_that_scales_its_loss_by_itself_takes_its_scale_back():
    if not hasattr(torch.amp, "GradScaler"):
        pytest.skip("before torch 2.3 only a GPU can scale")
    before, after = Fp16(CPU, None), Fp16(CPU, None)
    before.scaler.load_state_dict({**before.scaler.state_dict(), "scale": 128.0, "_growth_tracker": 7})
    after.take_scale(before.own_scale())
    assert after.scaler.state_dict() == before.scaler.state_dict()
    for damaged in ([float("nan"), 1.0], [0.0, 1.0], [2.0], [2.0, -1.0]):
        with pytest.raises(TrainError, match="the checkpoint's loss scale is invalid"):
            after.take_scale({"scale.own": torch.tensor(damaged)})
    assert not Full().own_scale()
